"""The router's journal: one JSON line a request, with its legs, their times and how they ended.

Lines are written by the writer of the engines' journals: a full queue drops the line and counts it, no request waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvops_connectors.journal import Writer

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 1
_QUEUED_LINES = 10_000
_MAX_FILE_BYTES = 64 * 2**20
_KEPT_FILES = 8


class LegRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request of the router to one engine."""

    role: str
    engine: str
    attempt: int
    id: str
    """The X-Request-Id of the leg; vLLM's ids contain it."""
    started_at: float
    """Unix time in seconds, as all times here."""
    first_byte_at: float | None = None
    ended_at: float | None = None
    status: int | None = None
    outcome: str = "cancelled"
    """ok, refused, cancelled, or the reason of an EngineFailure."""


class Record(msgspec.Struct, kw_only=True, omit_defaults=True, tag="router", tag_field="kind"):
    """One client request."""

    ts: float
    client_id: str
    router_id: str = ""
    """Id of the last attempt."""
    path: str
    mode: str
    streams: bool
    attempts: int = 0
    legs: list[LegRecord] = []
    conversation: str | None = None
    turn: int | None = None
    handle: str | None = None
    """hit, or why there was no handle to use (see HANDLE_MISSES of the catalogue)."""
    handle_kept: bool = False
    """Whether D's handle was kept for the next turn."""
    first_byte_at: float | None = None
    ended_at: float | None = None
    status: int | None = None
    outcome: str = ""
    """ok, refused, client_gone, or the type of the error that the client got."""
    error: str | None = None
    v: int = VERSION


class Journal:
    """Appends records to a file, rotated by size; without a path nothing is ever written."""

    def __init__(self, path: Path | None) -> None:
        """Start the writer."""
        self._writer = Writer(path, _MAX_FILE_BYTES, _KEPT_FILES, _QUEUED_LINES) if path else None

    @property
    def dropped(self) -> int:
        """Return how many records were lost because the queue was full or the disk failed."""
        return sum(self._writer.dropped.values()) if self._writer else 0

    def write(self, record: Record) -> None:
        """Hand a finished record over; the caller must not change it any more."""
        if self._writer:
            self._writer.write(record)

    def close(self) -> None:
        """Write what is queued and stop."""
        if self._writer:
            self._writer.close()
