"""The lines of one client request put together: what the router, prefill and decode each did, in one order of time."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvops.journal.reading import (
    Line,
    Lines,
    conversation_of,
    has_failed,
    legs_of,
    names_of,
    seconds_to_first_token,
)
from kvops.router.journal import Record as RouterRecord
from kvops_connectors.journal import HoldEnd, Record

if TYPE_CHECKING:
    from collections.abc import Callable

# More than a screen can show; a journal of a bad day holds millions.
MIN_ID_PREFIX = 8
MAX_REQUESTS = 1000


class Span(NamedTuple):
    """A stretch of time in which one process did one thing; times in unix seconds."""

    who: str
    what: str
    begin: float
    end: float


@dataclass
class Request:
    """One client request.

    Attributes:
        legs: the X-Request-Ids of its legs.
        router: the router's line, if it wrote one.
        records: the engines' lines, by time of arrival.
        holds: the ends of holds on its blocks.
    """

    legs: set[str]
    router: RouterRecord | None = None
    records: list[Record] = field(default_factory=list)
    holds: list[HoldEnd] = field(default_factory=list)

    def add(self, line: Line) -> None:
        """Add a line that belongs to this request."""
        if isinstance(line, RouterRecord):
            self.router = line
        elif isinstance(line, HoldEnd):
            self.holds.append(line)
        else:
            self.records.append(line)
            self.records.sort(key=lambda record: record.times.arrived)

    @property
    def began(self) -> float:
        """Unix time of the first thing known about it."""
        times = [record.times.arrived for record in self.records]
        if self.router:
            times += [leg.started_at for leg in self.router.legs]
        times += [hold.ts - (hold.hold.held_seconds or 0.0) for hold in self.holds]
        return min(times, default=0.0)

    @property
    def mode(self) -> str:
        """pull, bidirectional or push."""
        if self.router:
            return self.router.mode
        lines: list[Record | HoldEnd] = [*self.records, *self.holds]
        return next((line.mode for line in lines), "")

    @property
    def conversation(self) -> str | None:
        """Hash of its conversation."""
        lines: list[Line] = [*self.records, *self.holds]
        return next(filter(None, map(conversation_of, [*([self.router] if self.router else []), *lines])), None)

    @property
    def turn(self) -> int | None:
        """Number of its turn in the conversation."""
        if self.router and self.router.turn is not None:
            return self.router.turn
        return next((record.request.turn for record in self.records if record.request.turn is not None), None)

    @property
    def outcome(self) -> str:
        """What became of it in one word: the router's, or the worst of the engines'."""
        if self.router and self.router.outcome:
            return self.router.outcome
        return next((record.outcome for record in self.records if record.outcome != "ok"), "ok")

    @property
    def seconds_to_first_token(self) -> float | None:
        """How long it waited for its first token, as near as is known."""
        lines: list[Line] = [self.router] if self.router else []
        return next(filter(None, map(seconds_to_first_token, [*lines, *self.records])), None)

    def spans(self) -> list[Span]:
        """Return what can be drawn as bars, by beginning."""
        spans = []
        for record in self.records:
            who, times = record.engine.name, record.times
            worked_from = times.loaded or times.allocated
            if times.allocated:
                spans.append(Span(who, "queue", times.arrived, times.allocated))
            if times.allocated and times.loaded:
                spans.append(Span(who, "wait for KV", times.allocated, times.loaded))
            if worked_from and times.finished:
                what = "decode" if record.direction == "p_to_d" else "prefill"
                spans.append(Span(who, what, worked_from, times.finished))
        return sorted(spans, key=lambda span: (span.begin, span.end))


def find_by_id(lines: Lines, wanted: str) -> list[Request]:
    """Return the requests that anybody knows under the id ``wanted``, with all their lines.

    The first ``MIN_ID_PREFIX`` characters of an id or more stand for the whole, as tables show no more of it.
    """

    def named(line: Line) -> bool:
        names = names_of(line)
        return wanted in names or (len(wanted) >= MIN_ID_PREFIX and any(name.startswith(wanted) for name in names))

    return _with_all_lines(lines, _legs_where(lines, named, wanted))


def find_by_conversation(lines: Lines, conversation: str) -> list[Request]:
    """Return the requests of a conversation, turn by turn."""
    legs = _legs_where(lines, lambda line: (conversation_of(line) or "").startswith(conversation), conversation)
    return _with_all_lines(lines, legs)


def find_failed(lines: Lines) -> list[Request]:
    """Return the requests that failed, by time; of very many the last ``MAX_REQUESTS``."""
    return _with_all_lines(lines, _legs_where(lines, has_failed))


def find_slowest(lines: Lines, count: int) -> list[Request]:
    """Return the ``count`` requests that waited longest for their first token, the slowest first."""
    slowest: dict[frozenset[str], float] = {}
    for line in lines:
        seconds = seconds_to_first_token(line)
        if seconds is None:
            continue
        key = frozenset(legs_of(line))
        slowest[key] = max(seconds, slowest.get(key, 0.0))
        if len(slowest) > 4 * count + 64:
            slowest = dict(heapq.nlargest(2 * count, slowest.items(), key=lambda item: item[1]))
    chosen = heapq.nlargest(count, slowest.items(), key=lambda item: item[1])
    requests = _with_all_lines(lines, [set(key) for key, _ in chosen])
    return sorted(requests, key=lambda request: -(request.seconds_to_first_token or 0.0))


def _legs_where(lines: Lines, wanted: Callable[[Line], bool], word: str | None = None) -> list[set[str]]:
    """Return the legs of each line that is wanted; lines without ``word`` in them are passed over undecoded."""
    found = [legs_of(line) for line in lines.containing([word] if word else ()) if wanted(line)]
    return found[-MAX_REQUESTS:]


def _with_all_lines(lines: Lines, wanted: list[set[str]]) -> list[Request]:
    """Return one request for each group of legs that share an id, with every line that belongs to it, by time."""
    by_leg: dict[str, Request] = {}
    for legs in wanted:
        _join(by_leg, legs)
    # A router line may name more legs of a request than the line that made it wanted, such as those of a retry.
    for line in lines.containing(by_leg):
        if isinstance(line, RouterRecord) and legs_of(line) & by_leg.keys():
            _join(by_leg, legs_of(line))
    for line in lines.containing(by_leg):
        owner = next((by_leg[leg] for leg in legs_of(line) if leg in by_leg), None)
        if owner is not None:
            owner.add(line)
    unique = {id(request): request for request in by_leg.values()}
    return sorted(unique.values(), key=lambda request: request.began)


def _join(by_leg: dict[str, Request], legs: set[str]) -> None:
    request = next((by_leg[leg] for leg in legs if leg in by_leg), None) or Request(set())
    request.legs |= legs
    for leg in legs:
        by_leg[leg] = request
