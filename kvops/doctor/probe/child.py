"""One side's process as its parent sees it: its events, its log, and its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from kvops.doctor.probe.evidence import LOG_ENVIRONMENT
from kvops.doctor.probe.messages import Event, Failed, Finished, Progress, SideJob

if TYPE_CHECKING:
    import socket

SIDE_COMMAND = (sys.executable, "-m", "kvops.doctor.probe.side")
# NIXL's C++ (glog) and Python lines, UCX's, and the last line of a traceback.
_COMPLAINT = re.compile(r"^[EWF]\d{4} | (ERROR|WARN|WARNING) |^\w+Error: ")
_READ_BYTES = 64 * 2**10
_MOST_LINE_BYTES = 64 * 2**10
_MOST_LOG_LINES = 50_000  # four UCX workers write a table for each pair of memory kinds
_LAST_LOG_LINES = 50


class Lines:
    """Splits what comes through a pipe into lines, in bounded memory."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.ended = False
        self._rest = b""
        os.set_blocking(descriptor, False)

    def read(self) -> list[str]:
        """Return the lines that have come since the last call, without waiting."""
        data = b""
        while not self.ended and len(data) < _MOST_LINE_BYTES:
            try:
                part = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                break
            self.ended = not part
            data += part
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:_MOST_LINE_BYTES]
        return [line.decode(errors="replace") for line in lines]


class Child:
    """A running side.

    Args:
        name: what the user reads, "this side" or "the peer".
        job: without the two numbers that only this class knows.
        connection: this side's end of the control connection; stays open here too.
    """

    def __init__(self, name: str, job: SideJob, connection: socket.socket) -> None:
        self.name = name
        self.progress = Progress("starting", 0, 0)
        self.outcome: Finished | Failed | None = None
        self.log: list[str] = []
        self.last_log: deque[str] = deque(maxlen=_LAST_LOG_LINES)
        events, events_of_child = os.pipe()
        output, output_of_child = os.pipe()
        self._process = subprocess.Popen(
            [*SIDE_COMMAND, _encode(job, connection, events_of_child)],
            stdin=subprocess.DEVNULL,
            stdout=output_of_child,
            stderr=output_of_child,
            pass_fds=(connection.fileno(), events_of_child),
            env=_environment(),
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        os.close(events_of_child)
        os.close(output_of_child)
        self._events = Lines(events)
        self._output = Lines(output)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def descriptors(self) -> list[int]:
        """Return the descriptors that become readable when there is something to ``read``."""
        return [lines.descriptor for lines in (self._events, self._output) if not lines.ended]

    def read(self) -> bool:
        """Take in what the process has said; return whether it moved on."""
        moved = False
        for line in self._output.read():
            self.last_log.append(line)
            if len(self.log) < _MOST_LOG_LINES:
                self.log.append(line)
        for line in self._events.read():
            event = msgspec.json.decode(line, type=Event)
            moved = True
            if isinstance(event, Progress):
                self.progress = event
            else:
                self.outcome = event
        return moved

    def death(self) -> str:
        """Return how the process ended; an empty string while it runs."""
        status = self._process.poll()
        if status is None:
            return ""
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def complaint(self) -> str:
        """Return the last error or warning that NIXL or UCX wrote; an empty string if there is none."""
        for line in reversed(self.last_log):
            if _COMPLAINT.search(line):
                return line.strip()[:200]
        return ""

    def end(self, grace_seconds: float) -> None:
        """End the process: ``grace_seconds`` to go by itself, then SIGKILL, which NIXL cannot block."""
        try:
            self._process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for lines in (self._events, self._output):
            os.close(lines.descriptor)


def _encode(job: SideJob, connection: socket.socket, events_fd: int) -> str:
    job = msgspec.structs.replace(job, parent_pid=os.getpid(), socket_fd=connection.fileno(), events_fd=events_fd)
    return msgspec.json.encode(job).decode()


def _environment() -> dict[str, str]:
    # A log file of the user's own settings would take the evidence away.
    kept = {key: value for key, value in os.environ.items() if key not in ("UCX_LOG_FILE", "NIXL_LOG_FILE")}
    return kept | LOG_ENVIRONMENT
