"""Request bodies of the two legs, made from the client's body without touching what the legs have no say in.

Bodies are edited as raw JSON: values that stay are never decoded, so a long prompt costs nothing, and fields that this
router does not know reach the engines byte for byte.
"""

from __future__ import annotations

from typing import Any

import msgspec

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
_KV_TRANSFER_PARAMS = "kv_transfer_params"
# Asks P to keep the finished prompt's KV and to say where it lies.
_KEEP_FOR_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_decode_body = msgspec.json.Decoder(Body)
_encode = msgspec.json.Encoder().encode


class BodyError(ValueError):
    """The client's body cannot be served; the text is for the client."""


class HandleError(ValueError):
    """What P returned as KV handle cannot be given to D; the text says what is wrong with it."""


def parse(content: bytes) -> Body:
    """Return the client's body with its values undecoded and without its ``kv_transfer_params``.

    A client's ``kv_transfer_params`` could name another request's blocks, and malformed ones end vLLM's engine core.

    Raises:
        BodyError: not a JSON object.
    """
    try:
        body = _decode_body.decode(content)
    except msgspec.DecodeError as error:
        raise BodyError(f"the request body is not a JSON object: {error}") from None
    body.pop(_KV_TRANSFER_PARAMS, None)
    return body


def encode(body: Body) -> bytes:
    """Return the JSON of ``body``."""
    return _encode(body)


def prefill_body(body: Body) -> Body:
    """Return P's body: the same prompt, one token that nobody reads, and the request to keep the KV.

    Structured output stays, for some chat templates write the schema into the prompt, and so do tools. A forced tool
    choice cannot be kept with one token; "auto" renders the same prompt.
    """
    leg = {key: value for key, value in body.items() if key not in _PREFILL_DROPS}
    leg["max_tokens"] = _ONE
    for limit in ("max_completion_tokens", "max_output_tokens"):
        if limit in leg:
            leg[limit] = _ONE
    leg["stream"] = _FALSE
    if "tool_choice" in leg and value_of(leg, "tool_choice") not in ("none", "auto", None):
        leg["tool_choice"] = msgspec.Raw(b'"auto"')
    leg[_KV_TRANSFER_PARAMS] = msgspec.Raw(_encode(_KEEP_FOR_DECODE))
    return leg


def decode_body(body: Body, handle: msgspec.Raw) -> Body:
    """Return D's body: the client's, with P's handle."""
    return body | {_KV_TRANSFER_PARAMS: handle}


def priming_body(body: Body, handle: msgspec.Raw) -> Body:
    """Return a body that makes D load P's KV into its own prefix cache and answer one token that nobody reads."""
    return prefill_body(body) | {_KV_TRANSFER_PARAMS: handle}


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


def handle_of(content: bytes) -> msgspec.Raw:
    """Return the KV handle in P's answer, checked for everything without which D would hang or crash.

    vLLM's pull connector waits for ever without engine id, request id, host or port, and an empty list of blocks ends
    its engine core.

    Raises:
        HandleError: there is no handle, or it is not whole.
    """
    try:
        raw = _decode_body.decode(content).get(_KV_TRANSFER_PARAMS)
        handle = msgspec.json.decode(raw, type=_Handle | None) if raw is not None else None
    except msgspec.DecodeError as error:
        raise HandleError(f"its handle is malformed: {error}") from None
    if raw is None or handle is None:
        raise HandleError("it returned no kv_transfer_params; does it run with a NIXL connector?")
    if not any(handle.remote_block_ids):
        raise HandleError("its handle names no KV blocks")
    return raw


def value_of(body: Body, key: str) -> Any:
    """Return the decoded value of ``key``, None where it is missing."""
    return msgspec.json.decode(body[key]) if key in body else None


class _Handle(msgspec.Struct):
    """The fields of vLLM's ``kv_transfer_params`` that D cannot do without."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: list[list[int]]
    tp_size: int


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
