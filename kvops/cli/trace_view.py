"""How traced requests look in the terminal; every line fits 80 columns."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from kvops_connectors.catalogue import HANDLE_MISSES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from kvops.journal.requests import Request, Span
    from kvops.router.journal import Record as RouterRecord
    from kvops_connectors.journal import HoldEnd, Record, Transfer

_BAR_COLUMNS = 28
_SPAN_STYLE = {"queue": "yellow", "wait for KV": "magenta", "prefill": "cyan", "decode": "green"}
_GOOD = ("ok", "")


class Event(NamedTuple):
    """One thing that happened; ``at`` in unix seconds."""

    at: float
    who: str
    what: str


def request_view(request: Request) -> Group:
    """Return the picture of one request: heading, bars of who worked when, and what happened in order of time."""
    outcome = "green" if request.outcome in _GOOD else "bold red"
    heading = Text.assemble(
        ("request ", "bold"),
        (min(request.legs), "bold cyan"),
        f"  {request.mode}  ",
        (request.outcome or "unfinished", outcome),
    )
    place = [clock(request.began)]
    if request.conversation:
        place.append(f"conversation {request.conversation[:16]}")
    if request.turn is not None:
        place.append(f"turn {request.turn}")
    parts: list[RenderableType] = [heading, Text("  ".join(place), style="dim")]
    if spans := request.spans():
        parts.append(_bars(spans, request.began))
    parts.append(_events(request))
    return Group(*parts)


def requests_table(requests: list[Request]) -> Table:
    """Return a table with a row a request: where its tokens came from and how long its KV took."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column, justify in (
        ("at", "left"),
        ("request", "left"),
        ("turn", "right"),
        ("prompt", "right"),
        ("from P", "right"),
        ("from D", "right"),
        ("first", "right"),
    ):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("outcome", overflow="fold")
    for request in requests:
        first = request.seconds_to_first_token
        table.add_row(
            clock(request.began)[:8],
            min(request.legs)[:12],
            "" if request.turn is None else str(request.turn),
            str(max((record.tokens.prompt for record in request.records), default="")),
            _remote_tokens(request, "p_to_d"),
            _remote_tokens(request, "d_to_p"),
            "" if first is None else seconds_text(first),
            Text(_why(request), style="" if request.outcome in _GOOD else "red"),
        )
    return table


def clock(at: float) -> str:
    """Return local time of day with milliseconds."""
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"


def seconds_text(seconds: float) -> str:
    """Return ``seconds`` in the unit that reads best."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _remote_tokens(request: Request, direction: str) -> str:
    tokens = sum(record.tokens.remote for record in request.records if record.direction == direction)
    return str(tokens) if tokens else "-"


def _why(request: Request) -> str:
    lines: list[Record | HoldEnd] = [*request.records, *request.holds]
    errors = [line.error for line in lines if line.error]
    return " ".join(dict.fromkeys([request.outcome, *errors]))


def _bars(spans: list[Span], began: float) -> Table:
    """Return a bar a span on one common scale."""
    whole = max(max(span.end for span in spans) - began, 1e-6)
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    for span in spans:
        left = int((span.begin - began) / whole * _BAR_COLUMNS)
        width = max(1, round((span.end - span.begin) / whole * _BAR_COLUMNS))
        bar = Text(" " * min(left, _BAR_COLUMNS - 1))
        bar.append("█" * min(width, _BAR_COLUMNS - min(left, _BAR_COLUMNS - 1)), style=_SPAN_STYLE[span.what])
        table.add_row(span.who, span.what, bar, seconds_text(span.end - span.begin))
    return table


def _events(request: Request) -> Table:
    events = list(_router_events(request.router)) if request.router else []
    for record in request.records:
        events += _record_events(record)
    for hold in request.holds:
        events += _hold_events(hold)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for event in sorted(events, key=lambda event: event.at):
        table.add_row(f"+{event.at - request.began:.3f} s", event.who, event.what)
    return table


def _router_events(router: RouterRecord) -> Iterator[Event]:
    for leg in router.legs:
        yield Event(leg.started_at, "router", f"sent the {leg.role} leg to {leg.engine}")
        if leg.outcome != "ok" and leg.ended_at is not None:
            status = f", HTTP {leg.status}" if leg.status else ""
            yield Event(leg.ended_at, "router", f"{leg.role} leg ended: {leg.outcome}{status}")
    if router.handle:
        begin = min((leg.started_at for leg in router.legs), default=router.ts)
        miss = HANDLE_MISSES.get(router.handle)
        what = f"no handle to read back with: {miss}" if miss else "prefill may read the turn before from decode"
        yield Event(begin, "router", f"{what} ({router.handle})")
    if router.first_byte_at is not None:
        yield Event(router.first_byte_at, "router", "first byte to the client")
    if router.ended_at is not None:
        yield Event(router.ended_at, "router", f"answered {router.path}: {router.outcome} (HTTP {router.status})")


def _record_events(record: Record) -> Iterator[Event]:
    who, tokens, times = record.engine.name, record.tokens, record.times
    yield Event(times.arrived, who, f"arrived: {tokens.prompt} prompt tokens, {tokens.local_hit} in its own cache")
    if record.transfer and times.allocated:
        peer = record.transfer.peer or "the peer"
        verb = "waits for a write from" if record.mode == "push" and record.direction == "p_to_d" else "reads from"
        yield Event(times.allocated, who, f"has blocks, {verb} {peer} ({record.transfer.backend})")
    if times.loaded:
        yield Event(times.loaded, who, f"KV is there: {tokens.remote} tokens")
    if record.transfer and record.transfer.transfers:
        yield Event(times.loaded or record.ts, who, "read " + transfer_text(record.transfer))
    end = times.finished or record.ts
    if tokens.recomputed:
        reasons = ", ".join(f"{count} {reason}" for reason, count in tokens.recomputed.items())
        yield Event(end, who, f"computed {sum(tokens.recomputed.values())}: {reasons}")
    if record.mended:
        yield Event(end, who, f"mended: {', '.join(record.mended)}")
    what = f"ended {record.outcome}, {tokens.generated} tokens generated"
    if record.error:
        what += f", {record.error}"
    if record.hold:
        what += f"; holds {record.hold.blocks} blocks for {record.hold.ttl_granted_seconds:.0f} s"
    yield Event(end, who, what)


def _hold_events(line: HoldEnd) -> Iterator[Event]:
    who, hold = line.engine.name, line.hold
    if line.push and line.push.waited_for:
        last = "decode's registration" if line.push.waited_for == "registration" else "its own prefill"
        yield Event(line.ts, who, f"{last} came last, the other waited {seconds_text(line.push.waited_seconds or 0)}")
    if line.transfer and line.transfer.transfers:
        yield Event(line.ts, who, "wrote " + transfer_text(line.transfer))
    what = f"{hold.blocks} blocks {hold.ended_by} after {seconds_text(hold.held_seconds or 0)}"
    if hold.ended_by == "read" and hold.ttl_left_seconds is not None:
        what += f", {hold.ttl_left_seconds:.1f} of {hold.ttl_granted_seconds:.0f} s left"
    yield Event(line.ts, who, what + (f": {line.error}" if line.error else ""))


def transfer_text(transfer: Transfer) -> str:
    """Return what was moved and how fast, in one line: bytes, descriptors, GB/s, post against wire."""
    text = f"{decimal(transfer.bytes)} in {transfer.descriptors} descriptors"
    if transfer.ranks > 1:
        text += f" on {transfer.ranks} ranks"
    post, wire = transfer.post_seconds or 0.0, transfer.wire_seconds or 0.0
    if wire > 0:
        text += f", {transfer.bytes / wire / 1e9:.2f} GB/s: post {seconds_text(post)}, wire {seconds_text(wire)}"
    if transfer.handshake_seconds:
        text += f", handshake {seconds_text(transfer.handshake_seconds)}"
    if transfer.ttl_left_seconds is not None:
        text += f", {transfer.ttl_left_seconds:.1f} s of TTL left"
    return text
