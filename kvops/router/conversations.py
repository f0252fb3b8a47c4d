"""The conversations whose last turn's KV a decode engine keeps, and the handle to each.

A handle is good for one read, so it is popped when it is used. The map is bounded in entries and bytes; what falls out
of it is given back to the engine, which would keep the blocks for minutes otherwise. Handles are kept as bytes and
engines by name, for the map may live in another process than the one that serves the request.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec

from kvops.router import bodies

if TYPE_CHECKING:
    from kvops.router.exchange import Exchange
    from kvops.router.settings import Settings

_BODY_FIELD = "conversation_id"
_HEADERS = ("x-conversation-id", "x-session-id", "x-correlation-id")
_LONGEST_ID = 256
# Of an entry without its handle, in bytes: key, dict slot, object.
_ENTRY_BYTES = 512


class Held(msgspec.Struct, frozen=True):
    """A decode engine and the blocks that it keeps.

    Attributes:
        handle: JSON of the handle, None where the answer brought none.
        holder: name of the engine.
        started_at: when the engine's process started, None where it does not say.
        has_digests: whether the handle tells for which tokens it stands.
        ttl_seconds: how long the engine keeps the blocks, None where it does not say.
    """

    handle: bytes | None
    holder: str
    started_at: float | None = None
    has_digests: bool = False
    ttl_seconds: float | None = None


class Unused(msgspec.Struct, frozen=True):
    """Blocks that nobody will read, and why: no_digests, replaced or evicted."""

    held: Held
    reason: str


class Turn(msgspec.Struct, frozen=True):
    """What is known as a turn begins.

    Attributes:
        number: 1 for the conversation's first.
        outcome: hit, or one of the catalogue's ``HANDLE_MISSES``.
        held: what the turn before left, its handle there with a hit only.
        unused: blocks to be given back.
    """

    number: int
    outcome: str
    held: Held | None = None
    unused: list[Unused] = []


class _Entry(msgspec.Struct):
    turn: int
    why_not: str
    held: Held
    expires_at: float

    @property
    def size_bytes(self) -> int:
        return _ENTRY_BYTES + len(self.held.handle or b"")


class Conversations:
    """A bounded map from conversation to the handle of its last turn.

    Attributes:
        bytes: what the entries take, about.
    """

    def __init__(self, settings: Settings) -> None:
        """Start empty, with the TTL, margin and bounds of ``settings``."""
        self.bytes = 0
        self._settings = settings
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def __len__(self) -> int:
        """Return how many conversations are known."""
        return len(self._entries)

    def begin(self, key: str) -> Turn:
        """Return what is known of the conversation, and take its handle out: it is good for one read."""
        self._drop_expired()
        entry = self._entries.get(key)
        if entry is None:
            return Turn(1, "first_turn")
        outcome, held = self._outcome(entry), entry.held
        self.bytes -= entry.size_bytes
        entry.held, entry.why_not = msgspec.structs.replace(held, handle=None), "used"
        self.bytes += entry.size_bytes
        unused = [Unused(held, "no_digests")] if outcome == "no_digests" else []
        return Turn(entry.turn + 1, outcome, held if outcome == "hit" else entry.held, unused)

    def keep(self, key: str, turn: int, held: Held) -> list[Unused]:
        """Remember the turn that has ended well and what it left; return what this pushes out."""
        unused = self._remove(key, "replaced")
        ttl = held.ttl_seconds or self._settings.decoder_ttl_seconds
        entry = _Entry(turn, "no_handle", held, time.monotonic() + ttl)
        self._entries[key] = entry
        self.bytes += entry.size_bytes
        limits = self._settings.limits
        while len(self._entries) > limits.conversations or self.bytes > limits.conversation_bytes:
            unused += self._remove(next(iter(self._entries)), "evicted")
        return unused

    def _outcome(self, entry: _Entry) -> str:
        if entry.held.handle is None:
            return entry.why_not
        if entry.expires_at - time.monotonic() <= self._settings.ttl_margin_seconds:
            return "late"
        return "hit" if entry.held.has_digests else "no_digests"

    def _drop_expired(self) -> None:
        # Entries stand in the order of their last turn, which with one TTL is that of their end.
        now = time.monotonic()
        while self._entries and next(iter(self._entries.values())).expires_at <= now:
            _, entry = self._entries.popitem(last=False)
            self.bytes -= entry.size_bytes

    def _remove(self, key: str, reason: str) -> list[Unused]:
        entry = self._entries.pop(key, None)
        if entry is None:
            return []
        self.bytes -= entry.size_bytes
        return [Unused(entry.held, reason)] if entry.held.handle is not None else []


def key_of(exchange: Exchange) -> str | None:
    """Return the key of the request's conversation, and take the field that names it out of the body.

    The key is a digest over the caller's credential, model (which names an adapter too), cache salt and the
    conversation's id, so that nobody reaches the KV of somebody else's conversation by its name.

    Raises:
        bodies.BodyError: the conversation's id is no text, or too long.
    """
    body = exchange.body
    named: Any = bodies.value_of(body, _BODY_FIELD)
    body.pop(_BODY_FIELD, None)
    if named is None:
        named = next(filter(None, map(exchange.request.header, _HEADERS)), None)
    if named is None or named == "":
        return None
    if not isinstance(named, str) or len(named) > _LONGEST_ID or not _is_text(named):
        raise bodies.BodyError(f"{_BODY_FIELD} should be a text of at most {_LONGEST_ID} characters")
    parts = [exchange.credential, bodies.value_of(body, "model"), bodies.value_of(body, "cache_salt"), named]
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()


def _is_text(value: str) -> bool:
    # A header may hold any bytes.
    try:
        return bool(value.encode())
    except UnicodeEncodeError:
        return False
