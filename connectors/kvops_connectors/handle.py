"""Reading ``kv_transfer_params``: who asks for what, is it usable, how much of it belongs to this prompt.

What comes in was written by a router, and behind it by a client. Nothing is trusted: stock vLLM dies of an
``AssertionError`` or a ``KeyError`` in the engine when a key is missing, so a handle that is not whole is dropped here
and the tokens are computed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from kvops_connectors import prefix
from kvops_connectors.journal import text
from kvops_connectors.worker import EXPIRY_MARGIN_SECONDS

# The one key that kvops adds to kv_transfer_params. From an engine to the router: prefix, ttl_seconds, expires_at. From
# the router to an engine: router_id, conversation, turn, attempt.
KEY = "kvops"
MOST_BLOCKS = 4_000_000


@dataclass(frozen=True)
class Context:
    """What the router says about a request; unusable values are None."""

    router_id: str | None = None
    conversation: str | None = None
    turn: int | None = None
    attempt: int | None = None


@dataclass(frozen=True)
class Handle:
    """The peer's offer, as it came in.

    Attributes:
        remote_id: request id on the peer.
        engine_id: the peer's engine id.
        peer: host:port of its side channel.
        tokens: tokens on offer; 0 if it does not say.
        blocks: blocks on offer.
        prefix: digests of the tokens, if the peer is instrumented.
        ttl_seconds: TTL that the peer granted, if it is instrumented.
        expires_at: unix time of its end, if it is instrumented.
    """

    remote_id: str
    engine_id: str
    peer: str
    tokens: int
    blocks: int
    prefix: prefix.Prefix | None
    ttl_seconds: float | None
    expires_at: float | None

    @property
    def expired(self) -> bool:
        """Return whether the TTL is over, or so near its end that vLLM would not begin a read."""
        return self.expires_at is not None and time.time() + EXPIRY_MARGIN_SECONDS >= self.expires_at


def context(params: dict[str, Any]) -> Context:
    """Return what the router says about the request."""
    given = params.get(KEY)
    if not isinstance(given, dict):
        return Context()
    return Context(
        text(given.get("router_id")),
        text(given.get("conversation")),
        _count(given.get("turn")),
        _count(given.get("attempt")),
    )


def read(params: dict[str, Any], push: bool) -> Handle | None:
    """Return the offer in a request's params, or None if it is not whole.

    Args:
        params: the request's ``kv_transfer_params``.
        push: whether the engine runs the push connector, where decode needs no block ids of prefill.
    """
    names = [params.get(name) for name in ("remote_request_id", "remote_engine_id", "remote_host")]
    port, tp_size = params.get("remote_port"), params.get("tp_size", 1)
    if not all(isinstance(name, str) and name for name in names):
        return None
    if not (type(port) is int and 0 < port < 65536 and type(tp_size) is int and tp_size > 0):
        return None
    blocks = _blocks(params.get("remote_block_ids"))
    if blocks is None and not push:
        return None
    ours = params.get(KEY) if isinstance(params.get(KEY), dict) else {}
    assert isinstance(ours, dict)  # noqa: S101
    return Handle(
        str(names[0]),
        str(names[1]),
        f"{names[2]}:{port}",
        _count(params.get("remote_num_tokens")) or 0,
        blocks or 0,
        prefix.from_wire(ours.get("prefix")),
        _seconds(ours.get("ttl_seconds")),
        _seconds(ours.get("expires_at")),
    )


def drop(params: dict[str, Any]) -> None:
    """Take a load request out of the params; the request computes its own tokens."""
    params["do_remote_prefill"] = False
    params["remote_block_ids"] = None


def cut(params: dict[str, Any], handle: Handle, matched: int) -> int:
    """Shorten an offer to its first ``matched`` tokens, and return how many are left.

    With nothing left, the block ids stay: vLLM then tells the peer, in the same way as after a full local hit, that the
    blocks are not needed any more, and the peer frees them.

    Args:
        params: the request's params, changed in place.
        handle: the offer in them, with digests.
        matched: tokens that equal the prompt; a multiple of the peer's block size.
    """
    assert handle.prefix is not None  # noqa: S101
    groups, block_tokens = params["remote_block_ids"], handle.prefix.block_tokens
    # Only one group of full attention has its blocks in token order from the first token on; the others hold a window
    # or a state, of which no part belongs to a shorter prefix.
    whole = len(groups) == 1 and len(groups[0]) * block_tokens >= matched and matched % block_tokens == 0
    kept = matched if whole else 0
    params["remote_num_tokens"] = kept
    if kept:
        params["remote_block_ids"] = [list(groups[0])[: kept // block_tokens]]
    return kept


def _blocks(groups: Any) -> int | None:
    """Return the number of block ids, or None if they are not lists of whole numbers or there are none."""
    if not isinstance(groups, list | tuple) or not groups:
        return None
    total = 0
    for group in groups:
        if not isinstance(group, list | tuple) or not all(type(block) is int and block >= 0 for block in group):
            return None
        total += len(group)
    return total if 0 < total <= MOST_BLOCKS else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def _seconds(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < 2**53 else None
