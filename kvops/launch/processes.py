"""Ending a fleet's processes, however far they have spread.

Every process of a fleet inherits the variable ``KVOPS_RUN_ID``; that mark, read from ``/proc``, is what makes a process
ours. Process ids are reused, parents die and vLLM's workers outlive the server that started them: the mark holds in all
of these cases.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

RUN_ID_VARIABLE = "KVOPS_RUN_ID"
# vLLM drains and closes NIXL within a few seconds; what has not ended by then never will.
TERM_GRACE_SECONDS = 8.0
_KILL_GRACE_SECONDS = 8.0
_POLL_SECONDS = 0.1


def pids_of_run(run_id: str) -> list[int]:
    """Return the ids of all living processes that carry the mark of ``run_id``."""
    mark = f"{RUN_ID_VARIABLE}={run_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # A zombie's environment reads as empty, so it does not count as living.
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def listens(run_id: str, port: int) -> bool:
    """Return whether a process of ``run_id`` listens on TCP ``port`` of this machine."""
    ours = set(pids_of_run(run_id))
    return any(
        connection.laddr and connection.laddr.port == port and connection.pid in ours
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    )


def unpin(run_id: str) -> None:
    """Let every thread of ``run_id`` run on all cores that this process may use."""
    cores = os.sched_getaffinity(0)
    for pid in pids_of_run(run_id):
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)


def end_run(run_id: str, grace_seconds: float = TERM_GRACE_SECONDS) -> bool:
    """End every process of ``run_id`` and return whether all are gone.

    The session leaders (the programs that were launched) get SIGTERM and time to close down their own workers in
    order; whatever is left then gets SIGKILL.
    """
    for pid in pids_of_run(run_id):
        if _is_session_leader(pid):
            _send(pid, signal.SIGTERM)
    if _wait_until_gone(run_id, grace_seconds):
        return True
    deadline = time.monotonic() + _KILL_GRACE_SECONDS
    while time.monotonic() < deadline:
        for pid in pids_of_run(run_id):
            _send(pid, signal.SIGKILL)
        if _wait_until_gone(run_id, _POLL_SECONDS):
            return True
    return False


def _wait_until_gone(run_id: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while pids_of_run(run_id):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _is_session_leader(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
