"""One side of a probe: a process that holds one NIXL agent and one buffer.

Run as ``python -m kvops.doctor.probe.side JOB`` by ``child``, from which it inherits
a connected socket and a pipe for events.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from typing import IO, TYPE_CHECKING

import msgspec

from kvops.doctor.probe.channel import Channel, PeerGoneError, ProtocolError
from kvops.doctor.probe.messages import Failed, SideJob
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from kvops.doctor.probe.messages import Event

_PR_SET_PDEATHSIG = 1


class Events:
    """Tells the process that started this one what happens; one JSON line each."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def __call__(self, event: Event) -> None:
        """Send one event; a parent that is gone is no reason to fail, this process is about to end too."""
        with contextlib.suppress(OSError):
            self._stream.write(msgspec.json.encode(event) + b"\n")
            self._stream.flush()


def main(job_json: str) -> None:
    """Play the job's role and report its end as an event."""
    job = msgspec.json.decode(job_json, type=SideJob)
    _die_with(job.parent_pid)
    tell = Events(os.fdopen(job.events_fd, "wb"))
    channel = Channel(socket.socket(fileno=job.socket_fd))
    try:
        _play(job, channel, tell)
    except KvopsError as error:
        tell(Failed(error.message, error.fix, error.exit_code))
    except PeerGoneError as error:
        tell(Failed(f"the peer went away: {error}", exit_code=1, peer_gone=True))
    except ProtocolError as error:
        tell(Failed(f"the peer speaks another language: {error}", "run the same kvops on both hosts"))
    except ImportError as error:
        tell(Failed(f"this Python lacks {error.name or error}", "install NIXL, which brings numpy: pip install nixl"))
    except Exception as error:  # a defect of this side must reach the user as a sentence too
        tell(Failed(f"this side of the probe broke: {type(error).__name__}: {error}", exit_code=1))
    finally:
        channel.close()


def _play(job: SideJob, channel: Channel, tell: Events) -> None:
    if job.role == "peer":
        from kvops.doctor.probe.peer import serve  # noqa: PLC0415

        serve(job, channel, tell)
    else:
        from kvops.doctor.probe.initiator import measure  # noqa: PLC0415

        measure(job, channel, tell)


def _die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends; NIXL may block every other way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1])
