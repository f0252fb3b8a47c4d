"""The router's journal: one JSON line a request, with its legs, their times and how they ended.

Lines are written by a thread from a bounded queue; a full queue drops the line and counts it, no request waits.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

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
    """hit, or why there was no handle to use (see conversations.MISSES)."""
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
    """Appends records to a file, rotated by size.

    Attributes:
        dropped: records that were lost because the queue was full or the disk failed.
    """

    def __init__(self, path: Path | None) -> None:
        """Start the writer; nothing is ever written without a path."""
        self.dropped = 0
        self._path = path
        self._queue: queue.Queue[Record | None] = queue.Queue(_QUEUED_LINES)
        self._thread = threading.Thread(target=self._run, name="kvops-journal", daemon=True)
        if path is not None:
            self._thread.start()

    def write(self, record: Record) -> None:
        """Hand a finished record over; the caller must not change it any more."""
        if self._path is None:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Write what is queued and stop."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_seconds)
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        going = True
        while going:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            going = None not in batch
            records = [record for record in batch if record is not None]
            try:
                self._append(records)
            except OSError as error:
                self.dropped += len(records)
                log.warning("%d journal lines were not written to %s: %s", len(records), self._path, error)

    def _append(self, records: list[Record]) -> None:
        if self._path is None or not records:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and self._path.stat().st_size >= _MAX_FILE_BYTES:
            self._rotate(self._path)
        # One write of whole lines: a reader that follows the file never sees half a line.
        with self._path.open("ab", buffering=0) as file:
            file.write(b"".join(msgspec.json.encode(record) + b"\n" for record in records))

    def _rotate(self, path: Path) -> None:
        for number in range(_KEPT_FILES - 1, 0, -1):
            older = path.with_name(f"{path.name}.{number}")
            if older.exists():
                older.replace(path.with_name(f"{path.name}.{number + 1}"))
        path.replace(path.with_name(f"{path.name}.1"))
