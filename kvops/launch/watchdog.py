"""Outlives the supervisor by a few seconds: when the supervisor is gone, however it went, the fleet goes too.

Run as ``python -m kvops.launch.watchdog RUN_ID`` with a pipe as standard input that only the supervisor holds open.
"""

from __future__ import annotations

import signal
import sys

from kvops.launch.processes import end_run


def main(run_id: str) -> None:
    """Wait for the supervisor's end of the pipe to close, then end every process of ``run_id``."""
    # Signals meant for the fleet (Ctrl-C, a closed terminal) must not take away its safety net.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_run(run_id)


if __name__ == "__main__":
    main(sys.argv[1])
