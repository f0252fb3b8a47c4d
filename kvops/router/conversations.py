"""The conversations whose last turn's KV a decode engine keeps, and the handle to each.

A handle is good for one read, so it is popped when it is used. The map is bounded in entries and bytes; what falls out
of it is given back to the engine, which would keep the blocks for minutes otherwise.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec

from kvops.router import bodies

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvops.router.exchange import Exchange
    from kvops.router.handles import Handle
    from kvops.router.pool import Endpoint
    from kvops.router.settings import Settings

_BODY_FIELD = "conversation_id"
_HEADERS = ("X-Conversation-ID", "X-Session-ID", "X-Correlation-ID")
_LONGEST_ID = 256
# Of an entry without its handle, in bytes: key, dict slot, object.
_ENTRY_BYTES = 512


class Turn(msgspec.Struct, frozen=True):
    """What is known as a turn begins.

    Attributes:
        number: 1 for the conversation's first.
        outcome: hit, or one of the catalogue's ``HANDLE_MISSES``.
        handle: D's handle of the turn before, there with a hit only.
        holder: the D that served the turn before.
    """

    number: int
    outcome: str
    handle: Handle | None = None
    holder: Endpoint | None = None


class _Entry(msgspec.Struct):
    turn: int
    why_not: str
    handle: Handle | None
    holder: Endpoint
    generation: int
    expires_at: float

    @property
    def size_bytes(self) -> int:
        return _ENTRY_BYTES + (self.handle.size_bytes if self.handle else 0)


class Conversations:
    """A bounded map from conversation to the handle of its last turn.

    Attributes:
        bytes: what the entries take, about.
    """

    def __init__(self, settings: Settings, give_back: Callable[[Handle, Endpoint, str], None]) -> None:
        """Start empty.

        Args:
            settings: TTL, margin and bounds.
            give_back: called with a handle that will not be used, its holder and the reason.
        """
        self.bytes = 0
        self._settings = settings
        self._give_back = give_back
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
        outcome = self._outcome(entry)
        handle = entry.handle
        self.bytes -= entry.size_bytes
        entry.handle, entry.why_not = None, "used"
        self.bytes += entry.size_bytes
        if outcome != "hit":
            if handle is not None and outcome == "no_digests":
                self._give_back(handle, entry.holder, "no_digests")
            return Turn(entry.turn + 1, outcome, None, entry.holder)
        return Turn(entry.turn + 1, "hit", handle, entry.holder)

    def keep(self, key: str, turn: int, handle: Handle | None, holder: Endpoint) -> None:
        """Remember the turn that has ended well, and its handle if it brought one."""
        self._remove(key, "replaced")
        ttl = (handle.ttl_seconds if handle else None) or self._settings.decoder_ttl_seconds
        entry = _Entry(
            turn=turn,
            why_not="no_handle",
            handle=handle,
            holder=holder,
            generation=holder.generation,
            expires_at=time.monotonic() + ttl,
        )
        self._entries[key] = entry
        self.bytes += entry.size_bytes
        limits = self._settings.limits
        while len(self._entries) > limits.conversations or self.bytes > limits.conversation_bytes:
            self._remove(next(iter(self._entries)), "evicted")

    def _outcome(self, entry: _Entry) -> str:
        if entry.handle is None:
            return entry.why_not
        if entry.generation != entry.holder.generation:
            return "restarted"
        if entry.expires_at - time.monotonic() <= self._settings.ttl_margin_seconds:
            return "late"
        return "hit" if entry.handle.has_digests else "no_digests"

    def _drop_expired(self) -> None:
        # Entries stand in the order of their last turn, which with one TTL is that of their end.
        now = time.monotonic()
        while self._entries and next(iter(self._entries.values())).expires_at <= now:
            _, entry = self._entries.popitem(last=False)
            self.bytes -= entry.size_bytes

    def _remove(self, key: str, reason: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.bytes -= entry.size_bytes
        if entry.handle is not None and entry.generation == entry.holder.generation:
            self._give_back(entry.handle, entry.holder, reason)


def key_of(exchange: Exchange) -> str | None:
    """Return the key of the request's conversation, and take the field that names it out of the body.

    The key is a digest over the caller's credential, model (which names an adapter too), cache salt and the
    conversation's id, so that nobody reaches the KV of somebody else's conversation by its name.

    Raises:
        bodies.BodyError: the conversation's id is no text, or too long.
    """
    body, headers = exchange.body, exchange.request.headers
    named: Any = bodies.value_of(body, _BODY_FIELD)
    body.pop(_BODY_FIELD, None)
    if named is None:
        named = next((headers[name] for name in _HEADERS if headers.get(name)), None)
    if named is None or named == "":
        return None
    if not isinstance(named, str) or len(named) > _LONGEST_ID:
        raise bodies.BodyError(f"{_BODY_FIELD} should be a text of at most {_LONGEST_ID} characters")
    parts = [exchange.credential, bodies.value_of(body, "model"), bodies.value_of(body, "cache_salt"), named]
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()
