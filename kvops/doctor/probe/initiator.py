"""The active side: moves every pattern both ways, with a clock and a check of every byte."""

from __future__ import annotations

import secrets
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvops.doctor.probe.agent import Operation, ProbeAgent, describe, nixl_version
from kvops.doctor.probe.channel import PeerGoneError
from kvops.doctor.probe.errors import ProbeTroubleError
from kvops.doctor.probe.greeting import describe_side, hello, refuse_a_different_peer
from kvops.doctor.probe.memory import Buffer, allocate, check, fill
from kvops.doctor.probe.messages import (
    Bye,
    Check,
    Checked,
    Clear,
    Done,
    Fill,
    Finished,
    Hello,
    Offer,
    Progress,
    Ready,
    Refused,
    Run,
)
from kvops.doctor.probe.patterns import Pattern, make_patterns
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvops.doctor.probe.agent import Timing
    from kvops.doctor.probe.channel import Channel
    from kvops.doctor.probe.messages import SideJob
    from kvops.doctor.probe.side import Events

_OPERATIONS: tuple[Operation, ...] = ("READ", "WRITE")
# The peer may have to import torch, allocate, and check 64 GiB; the parent's --timeout is what ends a probe.
_ANSWER_SECONDS = 600.0
_DYING_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class _Link:
    """What one measurement needs."""

    channel: Channel
    buffer: Buffer
    tell: Events
    repeat: int


def measure(job: SideJob, channel: Channel, tell: Events) -> None:
    """Run the whole probe against the peer at the other end of ``channel`` and tell the result.

    Raises:
        KvopsError: the probe could not start (exit status 2).
        ProbeTroubleError: a transfer failed.
        PeerGoneError: the peer went away.
        ProtocolError: the peer sent nonsense.
    """
    mine = hello(job)
    channel.send(mine)
    theirs = channel.receive(Hello, _ANSWER_SECONDS)
    refuse_a_different_peer(mine, theirs)
    channel.send(Offer(job.size_bytes))
    tell(Progress("registering memory", 0, 0))
    buffer = allocate(job.size_bytes, job.memory, job.device, job.preferred_device)
    agent = ProbeAgent(job.backend, buffer)
    ready = channel.receive(Ready | Refused, _ANSWER_SECONDS)
    if isinstance(ready, Refused):
        raise KvopsError(f"the peer refused: {ready.reason}")
    link = _Link(channel, buffer, tell, job.repeat)
    runs = _measure_all(link, agent, ready)
    moved_bytes = sum((run.repeat + 1) * run.size_bytes for run in runs)
    channel.send(Bye(moved_bytes))
    me = describe_side(mine, buffer.name, nixl_version(), agent.plugins)
    tell(Finished(me=me, peer=theirs, peer_device=ready.device_name, runs=runs, moved_bytes=moved_bytes))
    agent.close()


def _measure_all(link: _Link, agent: ProbeAgent, ready: Ready) -> list[Run]:
    peer_name = agent.connect(ready)
    runs = []
    for pattern in make_patterns(link.buffer.size_bytes, seed=0):
        move = agent.mover(ready, peer_name, pattern, lambda: _refuse_a_dead_peer(link.channel))
        for operation in _OPERATIONS:
            step = f"{operation} {pattern.name}"
            try:
                runs.append(_measure_one(link, pattern, operation, move))
            except (PeerGoneError, KvopsError):
                raise
            except Exception as error:
                # NIXL may notice before this connection does that the peer has died.
                _refuse_a_dead_peer(link.channel, _DYING_SECONDS)
                raise ProbeTroubleError(
                    f"{step} over {agent.backend} failed: {describe(error)}", "kvops doctor tells what is missing"
                ) from error
    return runs


def _refuse_a_dead_peer(channel: Channel, after_seconds: float = 0.0) -> None:
    if not channel.is_open(after_seconds):
        raise PeerGoneError("it closed the connection in the middle of a transfer")


def _measure_one(link: _Link, pattern: Pattern, operation: Operation, move: Callable[[Operation], Timing]) -> Run:
    step = f"{operation} {pattern.name}"
    link.tell(Progress(step, 0, link.repeat))
    seed = secrets.randbits(48)
    check_target = _prepare(link, pattern, operation, seed)
    # Not timed: it pays for connections and registrations. Checked at once, while the target holds nothing else that
    # could pass for it: a transfer that is "done" before its bytes are there shows up here.
    move(operation)
    wrong_bytes, first_wrong = check_target()
    timings = []
    for number in range(link.repeat):
        timings.append(move(operation))
        link.tell(Progress(step, number + 1, link.repeat))
    if not wrong_bytes:
        wrong_bytes, first_wrong = check_target()
    return _summary(pattern, operation, timings, wrong_bytes, first_wrong if wrong_bytes else None)


def _prepare(link: _Link, pattern: Pattern, operation: Operation, seed: int) -> Callable[[], tuple[int, int]]:
    """Fill the source and clear the target; return what checks the target, on the side where it is."""
    if operation == "READ":
        _ask(link, Fill(seed))
        link.buffer.clear()
        return lambda: check(link.buffer, seed, pattern.layout)

    fill(link.buffer, seed, pattern.layout)
    _ask(link, Clear())

    def check_at_peer() -> tuple[int, int]:
        link.channel.send(Check(seed))
        answer: Checked = link.channel.receive(Checked, _ANSWER_SECONDS)
        return answer.wrong_bytes, answer.first_wrong

    return check_at_peer


def _ask(link: _Link, request: Fill | Clear) -> None:
    link.channel.send(request)
    link.channel.receive(Done, _ANSWER_SECONDS)


def _summary(
    pattern: Pattern, operation: Operation, timings: list[Timing], wrong_bytes: int, first_wrong: int | None
) -> Run:
    count = len(pattern.layout.order)
    totals = [timing.total_seconds for timing in timings]
    post = statistics.median(timing.post_seconds for timing in timings)
    wire = statistics.median(max(timing.total_seconds - timing.post_seconds, 0.0) for timing in timings)
    prepare = statistics.median(timing.prepare_seconds for timing in timings)
    p50_seconds = statistics.median(totals)
    return Run(
        operation=operation,
        pattern=pattern.name,
        size_bytes=pattern.layout.size_bytes,
        descriptors=count,
        descriptor_bytes=pattern.layout.piece_bytes,
        wire_descriptors=timings[-1].wire_descriptors,
        repeat=len(timings),
        p50_seconds=p50_seconds,
        p99_seconds=percentile_99(totals),
        gb_per_second=pattern.layout.size_bytes / max(p50_seconds, 1e-9) / 1e9,
        prepare_us_per_descriptor=prepare / count * 1e6,
        post_us_per_descriptor=post / count * 1e6,
        wire_us_per_descriptor=wire / count * 1e6,
        timed_by="clock" if timings[-1].wire_descriptors is None else "nixl telemetry",
        wrong_bytes=wrong_bytes,
        first_wrong=first_wrong,
    )


def percentile_99(values: list[float]) -> float:
    """Return the 99th percentile by nearest rank; the largest value where there are fewer than a hundred."""
    ordered = sorted(values)
    return ordered[-(-len(ordered) * 99 // 100) - 1]
