"""Request bodies of the two legs, made from the client's body without touching what the legs have no say in.

Bodies are edited as raw JSON: values that stay are never decoded, so a long prompt costs nothing, and fields that this
router does not know reach the engines byte for byte.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

Body = dict[str, msgspec.Raw]

# What P must not see, each because of what vLLM does with it beside max_tokens=1 (measured on 0.32): min_tokens above
# max_tokens and stream_options without stream are answered with 400; n and best_of finish siblings whose KV nobody
# releases; the rest costs work for a token that is thrown away.
_PREFILL_DROPS = (
    "min_tokens",
    "stream_options",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "use_beam_search",
)
# Each prompt of a list costs a leg of its own on P; beyond this one request would hold the fleet.
MAX_PROMPTS = 256
_ONE = msgspec.Raw(b"1")
_FALSE = msgspec.Raw(b"false")
KV_TRANSFER_PARAMS = "kv_transfer_params"
_KEY = re.compile(rb'"(?:[^"\\]|\\.)*"\s*:\s*')
_decode_body = msgspec.json.Decoder(Body)
_encode = msgspec.json.Encoder().encode


class BodyError(ValueError):
    """The client's body cannot be served; the text is for the client."""


def parse(content: bytes) -> Body:
    """Return the client's body with its values undecoded and without its ``kv_transfer_params``.

    A client's ``kv_transfer_params`` could name another request's blocks, and malformed ones end vLLM's engine core.

    Raises:
        BodyError: not a JSON object.
    """
    try:
        body = _decode_body.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BodyError(f"the request body is not a JSON object: {error}") from None
    body.pop(KV_TRANSFER_PARAMS, None)
    return body


def members(content: bytes) -> Body:
    """Return the members of an engine's answer, their values undecoded.

    Raises:
        BodyError: not a JSON object.
    """
    try:
        return _decode_body.decode(content)
    except msgspec.DecodeError as error:
        raise BodyError(f"its answer is not a JSON object: {error}") from None


def encode(body: Body) -> bytes:
    """Return the JSON of ``body``."""
    return _encode(body)


def prefill_body(body: Body, params: msgspec.Raw) -> Body:
    """Return P's body: the same prompt, one token that nobody reads, and what to do with the KV.

    Structured output stays, for some chat templates write the schema into the prompt, and so do tools. A forced tool
    choice cannot be kept with one token; "auto" renders the same prompt.

    Args:
        body: the client's.
        params: P's ``kv_transfer_params``.
    """
    leg = {key: value for key, value in body.items() if key not in _PREFILL_DROPS}
    leg["max_tokens"] = _ONE
    for limit in ("max_completion_tokens", "max_output_tokens"):
        if limit in leg:
            leg[limit] = _ONE
    leg["stream"] = _FALSE
    if "tool_choice" in leg and value_of(leg, "tool_choice") not in ("none", "auto", None):
        leg["tool_choice"] = msgspec.Raw(b'"auto"')
    leg[KV_TRANSFER_PARAMS] = params
    return leg


def decode_body(body: Body, params: msgspec.Raw) -> Body:
    """Return D's body: the client's, with where its KV comes from."""
    return body | {KV_TRANSFER_PARAMS: params}


def release_body(params: msgspec.Raw) -> Body:
    """Return a body that every engine refuses, for it names a model that no engine serves.

    vLLM (from 0.22 on) answers a refused request that carries a handle by telling the holder to free the blocks, which
    is the only way of giving them back without reading them.
    """
    return {
        "model": msgspec.Raw(b'"kvops-release-blocks"'),
        "prompt": msgspec.Raw(b'"-"'),
        "max_tokens": _ONE,
        KV_TRANSFER_PARAMS: params,
    }


def with_token_ids(body: Body) -> Body:
    """Return P's body with the wish to get back the token ids of the prompt."""
    return body | {"return_token_ids": msgspec.Raw(b"true")}


def sequences(body: Body) -> list[Body]:
    """Return one body a prompt for a request that needs several handles, or ``[]`` for an ordinary one.

    A handle is good for one sequence: vLLM gives the same one to every choice of ``n`` and to every prompt of a list,
    and P frees the blocks when the first has read them.

    Raises:
        BodyError: ``n``, ``best_of`` or ``prompt`` has the wrong type.
    """
    prompts = _prompt_list(body)
    choices = max(_count(body, "n"), _count(body, "best_of"))
    if len(prompts) > 1:
        return [body | {"prompt": prompt} for prompt in prompts]
    return [body] if choices > 1 else []


def needs_whole_prompt(body: Body) -> bool:
    """Return whether only an engine that computes the whole prompt itself can serve this request.

    Logprobs of the prompt come from its forward pass, which D skips for the KV that it takes over; and the beams of a
    beam search are sequences that share one handle.
    """
    if value_of(body, "prompt_logprobs") is not None or value_of(body, "use_beam_search") is True:
        return True
    # 0 asks for logprobs too: those of the chosen tokens.
    logprobs = value_of(body, "logprobs")
    return value_of(body, "echo") is True and logprobs is not None and logprobs is not False


def cut_member(content: bytes, key: str) -> tuple[bytes, msgspec.Raw | None]:
    """Return ``content`` without the top-level member ``key``, every other byte as it was, and the member's value.

    Args:
        content: a JSON object.
        key: a name that JSON writes without escapes.

    Raises:
        ValueError: not a JSON object.
    """
    if b'"' + key.encode() + b'"' not in content:
        return content, None
    members = _decode_body.decode(content)
    if key not in members:
        return content, None
    spans = list(_member_spans(content, members))
    if content[spans[-1][1] :].strip() != b"}":
        # A name that occurs twice: the decoder kept one of the two values, so the spans are not to be trusted.
        return _encode({name: value for name, value in members.items() if name != key}), members[key]
    at = list(members).index(key)
    start, end = spans[at]
    # One of the two commas around the member goes with it.
    if at + 1 < len(spans):
        end = spans[at + 1][0]
    elif at:
        start = content.index(b",", spans[at - 1][1])
    return content[:start] + content[end:], members[key]


def _member_spans(content: bytes, members: Body) -> Iterator[tuple[int, int]]:
    """Yield start of the key and end of the value of each member, given that the decoder has accepted ``content``."""
    position = content.index(b"{") + 1
    for value in members.values():
        start = content.index(b'"', position)
        end_of_key = _KEY.match(content, start)
        if end_of_key is None:
            raise ValueError("an object's member has no name")
        position = end_of_key.end() + len(memoryview(value))
        yield start, position


def is_null(raw: msgspec.Raw | None) -> bool:
    """Return whether a member is missing or null, which mean the same wherever the router looks."""
    return raw is None or bytes(memoryview(raw)[:4]) == b"null"


def value_of(body: Body, key: str) -> Any:
    """Return the decoded value of ``key``, None where it is missing."""
    return msgspec.json.decode(body[key]) if key in body else None


def _prompt_list(body: Body) -> list[msgspec.Raw]:
    """Return the prompts of a list of prompts; ``[]`` for a string, for token ids, and for chat."""
    raw = body.get("prompt")
    if raw is None or not _starts(raw, b"["):
        return []
    prompts = msgspec.json.decode(raw, type=list[msgspec.Raw])
    if not prompts:
        raise BodyError("prompt is an empty list; send a prompt")
    if not (_starts(prompts[0], b"[") or _starts(prompts[0], b'"')):
        return []
    if len(prompts) > MAX_PROMPTS:
        raise BodyError(f"prompt lists {len(prompts)} prompts; send at most {MAX_PROMPTS} in one request")
    return prompts


def _starts(raw: msgspec.Raw, with_: bytes) -> bool:
    # A slice of the view, because bytes(raw) would copy a prompt of megabytes.
    return bytes(memoryview(raw)[:1]) == with_


def _count(body: Body, key: str) -> int:
    value = value_of(body, key)
    if value is None:
        return 1
    if not isinstance(value, int) or isinstance(value, bool):
        raise BodyError(f"{key} is {value!r} but should be a whole number")
    return value
