"""``kvops logs``: what the processes of a fleet wrote."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from kvops.cli.options import name_option
from kvops.errors import KvopsError
from kvops.launch.rundir import ProcessState, RunDir
from kvops.launch.supervisor import last_lines

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.command()
@click.argument("process", required=False)
@name_option
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written until the fleet ends.")
@click.option("-n", "--lines", default=20, show_default=True, type=click.IntRange(0), help="Last lines of each.")
def command(*, process: str | None, name: str, follow: bool, lines: int) -> None:
    """Show the last lines that the processes of a fleet wrote, of one PROCESS or of all.

    \b
    Example:
      kvops logs decode-0 -n 100
      kvops logs -f
    """
    run_dir = RunDir(name)
    state = run_dir.read_state()
    if state is None:
        raise KvopsError(f"no fleet named {name} was started here", "kvops status lists the fleets")
    chosen = [each for each in state.processes if process in (None, each.name)]
    if not chosen:
        known = ", ".join(each.name for each in state.processes)
        raise KvopsError(f"the fleet {name} has no process {process}", f"choose one of {known}")
    with contextlib.ExitStack() as stack:
        # Opened at their ends before the last lines are shown, so that no line falls between the two.
        files = [(each, stack.enter_context(Path(each.log_file).open(errors="replace"))) for each in chosen]
        for each, file in files:
            file.seek(0, os.SEEK_END)
            for line in last_lines(each.log_file, lines) if lines else ():
                _print(each, line, alone=len(chosen) == 1)
        if follow:
            _follow(run_dir, files)


def _follow(run_dir: RunDir, files: Sequence[tuple[ProcessState, TextIO]]) -> None:
    while True:
        running = run_dir.is_running()
        written = [(process, line) for process, file in files for line in file.readlines()]
        for process, line in written:
            _print(process, line.rstrip("\n"), alone=len(files) == 1)
        if not running and not written:
            return
        time.sleep(0.2)


def _print(process: ProcessState, line: str, *, alone: bool) -> None:
    click.echo(line if alone else f"{process.name:<10} | {line}")
