"""Starts the sides of a probe, watches them, and ends them whatever happens."""

from __future__ import annotations

import select
import socket
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

import msgspec

from kvops.doctor.probe.channel import is_frame_of
from kvops.doctor.probe.child import Child
from kvops.doctor.probe.errors import ProbeTroubleError
from kvops.doctor.probe.evidence import read_counters
from kvops.doctor.probe.messages import Failed, Finished, Hello, Memory, Progress, SideJob
from kvops.doctor.probe.report import Report, make_report
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Show = Callable[[Progress], None]

_POLL_SECONDS = 0.1
# After one side failed, how long the other may take to give the real reason.
_SETTLE_SECONDS = 1.5
# How long a side may take to close NIXL down after it has said everything.
_TEARDOWN_SECONDS = 3.0
_CONNECT_SECONDS = 10.0
_GREETING_SECONDS = 10.0
_MOST_GREETING_BYTES = 4 * 2**10


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What to move, and how."""

    backend: str
    memory: Memory
    size_bytes: int
    repeat: int
    devices: tuple[int, ...]
    timeout_seconds: float


def probe_pair(settings: Settings, show: Show) -> Report:
    """Probe between two processes of this host and return what was seen.

    Raises:
        KvopsError: the probe could not be done.
        ProbeTroubleError: it began and failed.
    """
    mine, theirs = socket.socketpair()
    with ExitStack() as stack:
        stack.enter_context(mine)
        stack.enter_context(theirs)
        before = read_counters()
        own_device, peer_device = (*settings.devices, None, None)[:2]
        peer = _start(stack, "the peer", _job(settings, "peer", peer_device, 1), theirs)
        own = _start(stack, "this side", _job(settings, "initiator", own_device, 0), mine)
        # Each end must be held by its own side alone, or its death would not close the connection.
        mine.close()
        theirs.close()
        finished = _watch(own, [own, peer], None, settings.timeout_seconds, show)
        _await_outcome(peer)
        return _report("pair", settings, finished, own, before)


def probe_connect(settings: Settings, host: str, port: int, show: Show) -> Report:
    """Probe against a peer that listens on another host and return what was seen.

    Raises:
        KvopsError: the probe could not be done.
        ProbeTroubleError: it began and failed.
    """
    try:
        connection = socket.create_connection((host, port), _CONNECT_SECONDS)
    except OSError as error:
        raise KvopsError(
            f"no probe answers at {host}:{port}: {error.strerror or error}",
            f"start 'kvops probe --listen {host}:{port}' there, and let the port through",
        ) from error
    job = _job(settings, "initiator", _first(settings.devices), 0)
    return _one_side(settings, "connect", job, connection, show)


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        KvopsError: the address is not this host's, or the port is taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1)
    except OSError as error:
        raise KvopsError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", "choose an address and port of this host"
        ) from error


def probe_listen(settings: Settings, listener: socket.socket, show: Show) -> Report:
    """Wait for one initiator, serve it, and return what was seen from here.

    Whoever connects and is no probe is turned away; the port is closed as soon as a probe has come.

    Args:
        settings: ``size_bytes`` is the most that the initiator may ask for.
        listener: from ``open_listener``; closed here.
        show: takes the progress.

    Raises:
        KvopsError: the probe could not be done.
        ProbeTroubleError: it began and failed.
    """
    with listener:
        connection, _ = listener.accept()
        while not _says_hello(connection):
            connection.close()
            connection, _ = listener.accept()
    return _one_side(settings, "listen", _job(settings, "peer", _first(settings.devices), 0), connection, show)


def _says_hello(connection: socket.socket) -> bool:
    """Return whether a probe's greeting comes in time, leaving it where it is for the side that will answer it."""
    deadline = time.monotonic() + _GREETING_SECONDS
    connection.settimeout(_POLL_SECONDS)
    while time.monotonic() < deadline:
        try:
            seen = connection.recv(_MOST_GREETING_BYTES, socket.MSG_PEEK)
        except TimeoutError:
            continue
        except OSError:
            return False
        if not seen or (complete := is_frame_of(seen, Hello)) is False:
            return False
        if complete:
            connection.settimeout(None)
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _one_side(
    settings: Settings, role: Literal["connect", "listen"], job: SideJob, connection: socket.socket, show: Show
) -> Report:
    with ExitStack() as stack:
        stack.enter_context(connection)
        before = read_counters()
        child = _start(stack, "this side", job, connection)
        finished = _watch(child, [child], connection, settings.timeout_seconds, show)
        return _report(role, settings, finished, child, before)


def _report(
    role: Literal["pair", "connect", "listen"],
    settings: Settings,
    finished: Finished,
    own: Child,
    before: dict[str, int],
) -> Report:
    return make_report(
        role, finished, backend=settings.backend, memory=settings.memory, log=own.log, counters_before=before
    )


def _job(settings: Settings, role: Literal["initiator", "peer"], device: int | None, preferred: int) -> SideJob:
    return SideJob(
        role=role,
        parent_pid=0,
        socket_fd=-1,
        events_fd=-1,
        backend=settings.backend,
        memory=settings.memory,
        size_bytes=settings.size_bytes,
        repeat=settings.repeat,
        device=device,
        preferred_device=preferred,
    )


def _first(devices: Sequence[int]) -> int | None:
    return devices[0] if devices else None


def _start(stack: ExitStack, name: str, job: SideJob, connection: socket.socket) -> Child:
    child = Child(name, job, connection)
    stack.callback(lambda: child.end(_TEARDOWN_SECONDS if isinstance(child.outcome, Finished) else 0.0))
    return child


def _watch(
    own: Child, children: list[Child], connection: socket.socket | None, timeout_seconds: float, show: Show
) -> Finished:
    """Return the last event of ``own``.

    Args:
        own: the side whose result counts.
        children: all sides that run on this host.
        connection: the control connection, where the other side runs elsewhere.
        timeout_seconds: for everything.
        show: takes the progress of ``own``.
    """
    deadline = time.monotonic() + timeout_seconds
    failed_at: float | None = None
    while True:
        _wait(children)
        for child in children:
            if child.read() and child is own:
                show(child.progress)
        if isinstance(own.outcome, Finished):
            return own.outcome
        now = time.monotonic()
        if failed_at is None and _has_failed(children, connection):
            failed_at = now
        if failed_at is not None and now > failed_at + _SETTLE_SECONDS:
            raise _cause(own, children)
        if now > deadline:
            raise ProbeTroubleError(
                f"no end after {timeout_seconds:g} s, {_where(own)}", "raise --timeout, or lower --bytes or --repeat"
            )


def _wait(children: list[Child]) -> None:
    poll = select.poll()
    for child in children:
        for descriptor in child.descriptors:
            poll.register(descriptor, select.POLLIN)
    if not any(child.descriptors for child in children):
        time.sleep(_POLL_SECONDS)
    poll.poll(_POLL_SECONDS * 1000)


def _has_failed(children: list[Child], connection: socket.socket | None) -> bool:
    if any(isinstance(child.outcome, Failed) or (child.outcome is None and child.death()) for child in children):
        return True
    if connection is None or not children[0].progress.total:
        return False
    # A side that is stuck inside a transfer cannot see that the other one is gone; this process can. Before the first
    # transfer it will see it, and perhaps the reason too, as soon as NIXL has started.
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def _cause(own: Child, children: list[Child]) -> KvopsError:
    """Return what went wrong first: a reason that a side gave, before a death, before what follows from either."""
    failures = [child.outcome for child in children if isinstance(child.outcome, Failed)]
    for failure in failures:
        if not failure.peer_gone and not failure.problem.startswith("the peer refused"):
            return _error(failure)
    for child in children:
        if child.outcome is None and (death := child.death()):
            said = f" ({child.complaint()})" if child.complaint() else ""
            return ProbeTroubleError(f"{child.name} {death}, {_where(own)}{said}")
    if failures:
        return _error(failures[0], _where(own))
    return ProbeTroubleError(f"the peer went away, {_where(own)}")


def _error(failure: Failed, where: str = "") -> KvopsError:
    kind = ProbeTroubleError if failure.exit_code == ProbeTroubleError.exit_code else KvopsError
    return kind(f"{failure.problem}, {where}" if where else failure.problem, failure.fix)


def _where(own: Child) -> str:
    step = own.progress
    return f"at {step.step} {step.done}/{step.total}" if step.total else f"at {step.step}"


def _await_outcome(child: Child) -> None:
    """Give the passive side the moment it needs to say that it has finished too, so that it may close in order."""
    deadline = time.monotonic() + _TEARDOWN_SECONDS
    while child.outcome is None and not child.death() and time.monotonic() < deadline:
        _wait([child])
        child.read()
