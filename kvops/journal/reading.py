"""Journals as a stream of lines: of the router, of prefill and of decode engines, current files and rotated ones."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from kvops.errors import KvopsError
from kvops.router.journal import Record as RouterRecord
from kvops_connectors.journal import HoldEnd, Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

Line = Record | HoldEnd | RouterRecord
_MAX_NEEDLES = 16
_decode = msgspec.json.Decoder(Line).decode
# What vLLM makes of the X-Request-Id of a leg: chatcmpl-<id>, cmpl-<id>-<prompt>, <choice>_cmpl-<id>-<prompt>.
_ENGINE_ID = re.compile(r"(?:\d+_)?(?:chatcmpl|cmpl|generate-tokens)-(?P<leg>.+?)(?:-\d+)?")


class Lines:
    """All lines of some journals; ``unreadable`` counts those that were skipped while iterating."""

    def __init__(self, folder: Path) -> None:
        """Find the journals of ``folder``.

        Raises:
            KvopsError: there is none.
        """
        self.files = sorted(path for path in folder.glob("*.jsonl*") if path.is_file())
        self.unreadable = 0
        if not self.files:
            raise KvopsError(f"no journal in {folder}", "send a request first, or give the folder with --journal")

    def __iter__(self) -> Iterator[Line]:
        """Yield every line, file by file."""
        return self.containing(())

    def containing(self, words: Iterable[str]) -> Iterator[Line]:
        """Yield the lines that contain one of ``words``, without decoding the others.

        All lines are yielded for no word, and for so many words that decoding is the cheaper way to tell.
        """
        needles = [word.encode() for word in words]
        if len(needles) > _MAX_NEEDLES:
            needles = []
        self.unreadable = 0
        for path in self.files:
            with path.open("rb") as file:
                for content in file:
                    if needles and not any(needle in content for needle in needles):
                        continue
                    try:
                        yield _decode(content)
                    except (msgspec.DecodeError, UnicodeDecodeError):
                        self.unreadable += 1


def legs_of(line: Line) -> set[str]:
    """Return the ids by which the legs of one client request are joined: the X-Request-Id of each."""
    if isinstance(line, RouterRecord):
        return {leg.id for leg in line.legs}
    match = _ENGINE_ID.fullmatch(line.request.base_id)
    return {match["leg"] if match else line.request.base_id}


def names_of(line: Line) -> set[str]:
    """Return every id under which somebody may look for the request of a line."""
    if isinstance(line, RouterRecord):
        return {line.client_id, line.router_id, *legs_of(line)}
    request = line.request
    return {request.id, request.base_id, *legs_of(line), *filter(None, (request.router_id, request.remote_id))}


def conversation_of(line: Line) -> str | None:
    """Return the hash of a line's conversation."""
    return line.conversation if isinstance(line, RouterRecord) else line.request.conversation


def has_failed(line: Line) -> bool:
    """Return whether a line tells of a request that did not end as it should, or of KV that was lost."""
    if isinstance(line, HoldEnd):
        return line.error is not None or (line.hold.holder == "prefill" and line.hold.ended_by == "expired")
    if isinstance(line, RouterRecord):
        return line.outcome not in ("", "ok")
    return line.outcome != "ok" or line.error is not None


def seconds_to_first_token(line: Line) -> float | None:
    """Return how long a line says that its request waited for its first token, as near as it knows.

    The router knows best; decode knows the time until its KV was there, which is what differs from request to request.
    """
    if isinstance(line, RouterRecord):
        begin = min((leg.started_at for leg in line.legs), default=None)
        return None if line.first_byte_at is None or begin is None else line.first_byte_at - begin
    if isinstance(line, Record) and line.engine.role != "prefill" and line.direction == "p_to_d":
        end = line.times.loaded or line.times.finished
        return None if end is None else end - line.times.arrived
    return None
