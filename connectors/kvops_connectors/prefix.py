"""Digests of a token prefix: what lets prefill see how much of decode's KV belongs to its own prompt.

Decode hashes its tokens in chunks, each digest over the one before and the chunk, so equal digests mean equal prefixes.
A chunk is a whole number of KV blocks and grows with the prompt, so that the digests stay below 1.5 KB in the handle
whatever the length.
"""

from __future__ import annotations

import base64
import binascii
from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# 128 digests of 8 bytes are 1368 characters of base64. A wrong prefix that passes by accident: 1 in 2**64 for each
# digest.
MOST_DIGESTS = 128
DIGEST_BYTES = 8
_CHAIN_BYTES = 16


@dataclass(frozen=True)
class Extra:
    """Something other than tokens that the KV of a span depends on, such as an image.

    Attributes:
        start: first token of the span.
        end: one past its last token.
        identity: what it is.
    """

    start: int
    end: int
    identity: str


@dataclass(frozen=True)
class Prefix:
    """The digests of one token sequence.

    Attributes:
        tokens: length of the sequence.
        block_tokens: tokens per KV block of the side that made them.
        step: tokens per digest, a multiple of ``block_tokens``; the last digest covers the rest.
        digests: one digest per chunk, joined.
    """

    tokens: int
    block_tokens: int
    step: int
    digests: bytes

    def wire(self) -> dict[str, Any]:
        """Return the form that travels in a handle."""
        return {
            "tokens": self.tokens,
            "block_tokens": self.block_tokens,
            "step": self.step,
            "digests": base64.b64encode(self.digests).decode(),
        }


def of_tokens(tokens: Sequence[int], block_tokens: int, salt: str = "", extras: Sequence[Extra] = ()) -> Prefix:
    """Return the digests of a token sequence.

    Args:
        tokens: the token ids.
        block_tokens: tokens per KV block; digests stand only at block boundaries, and at the end.
        salt: whatever else the KV of all tokens depends on, such as the adapter.
        extras: what only the KV of some tokens depends on.
    """
    step = block_tokens
    while len(tokens) > step * MOST_DIGESTS:
        step *= 2
    return Prefix(len(tokens), block_tokens, step, b"".join(_chain(tokens, step, salt, extras)))


def from_wire(wire: Any) -> Prefix | None:
    """Return the digests of a handle, or None if there are none or they make no sense."""
    if not isinstance(wire, dict):
        return None
    numbers = [wire.get(name) for name in ("tokens", "block_tokens", "step")]
    sizes = [number for number in numbers if type(number) is int and 0 < number < 2**31]
    if len(sizes) < len(numbers):
        return None
    tokens, block_tokens, step = sizes
    raw = _decoded(wire.get("digests"))
    if raw is None or step % block_tokens or len(raw) != DIGEST_BYTES * -(-tokens // step):
        return None
    return Prefix(tokens, block_tokens, step, raw)


def _decoded(digests: Any) -> bytes | None:
    if not isinstance(digests, str) or len(digests) > 2 * MOST_DIGESTS * DIGEST_BYTES:
        return None
    try:
        return base64.b64decode(digests, validate=True)
    except (binascii.Error, ValueError):
        return None


def matched_tokens(prefix: Prefix, tokens: Sequence[int], salt: str = "", extras: Sequence[Extra] = ()) -> int:
    """Return how many leading tokens are surely equal: a multiple of ``prefix.step``, or all of the prefix.

    Args:
        prefix: the other side's digests.
        tokens: this side's token ids.
        salt: as in ``of_tokens``.
        extras: as in ``of_tokens``.
    """
    matched = 0
    for number, digest in enumerate(_chain(tokens[: prefix.tokens], prefix.step, salt, extras)):
        end = min((number + 1) * prefix.step, prefix.tokens)
        if end > len(tokens) or digest != prefix.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
            break
        matched = end
    return matched


def _chain(tokens: Sequence[int], step: int, salt: str, extras: Sequence[Extra]) -> Iterator[bytes]:
    # Both engines of a pair run on the same kind of host, so the byte order of int32 is theirs to share.
    raw = memoryview(array("i", tokens)).cast("B")
    width = 4 * step
    link = salt.encode()
    for start in range(0, len(raw), width):
        state = blake2b(link, digest_size=_CHAIN_BYTES)
        state.update(raw[start : start + width])
        for extra in extras:
            if extra.start < (start + width) // 4 and extra.end > start // 4:
                state.update(f"{extra.start}:{extra.end}:{extra.identity}".encode())
        link = state.digest()
        yield link[:DIGEST_BYTES]
