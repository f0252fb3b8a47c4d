"""``kvops down``: end a fleet."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import click

from kvops.cli.options import name_option
from kvops.errors import KvopsError
from kvops.launch.processes import end_run
from kvops.launch.rundir import RunDir
from kvops.launch.supervisor import clean_up_stale

# A supervisor gives its processes up to 16 s; one that takes longer is ended with them.
_PATIENCE_SECONDS = 18.0


@click.command()
@name_option
def command(*, name: str) -> None:
    """Stop a fleet and everything it started. Doing so twice is no error.

    \b
    Example:
      kvops down
      kvops down --name canary-fleet
    """
    run_dir = RunDir(name)
    if not run_dir.is_running():
        lock = run_dir.take_lock() if run_dir.path.exists() else None
        if lock:
            with lock:
                clean_up_stale(run_dir)
        click.echo(f"no fleet named {name} is running")
        return
    state = run_dir.read_state()
    if state is None:
        raise KvopsError(f"the fleet {name} has only just begun to start", "try again in a second")
    with contextlib.suppress(ProcessLookupError):
        os.kill(state.supervisor_pid, signal.SIGTERM)
    if not _ended(run_dir):
        with contextlib.suppress(ProcessLookupError):
            os.kill(state.supervisor_pid, signal.SIGKILL)
        end_run(state.run_id)
    click.echo(f"fleet {name} is stopped")


def _ended(run_dir: RunDir) -> bool:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while run_dir.is_running():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
