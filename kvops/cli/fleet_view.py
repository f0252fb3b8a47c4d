"""How a fleet looks in the terminal: one live screen, or a line a change where the output is no terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvops.launch.supervisor import last_lines

if TYPE_CHECKING:
    from types import TracebackType

    from kvops.launch.rundir import FleetState, ProcessState

_STYLE = {
    "waiting": "dim",
    "starting": "yellow",
    "checking": "yellow",
    "stopping": "yellow",
    "ready": "green",
    "stopped": "dim",
    "died": "bold red",
    "failed": "bold red",
    "stale": "bold red",
}
_PHASE_MEANS = {
    "starting": "engines are loading",
    "checking": "the canary is asking",
    "ready": "serving; Ctrl-C stops everything",
    "stopping": "ending every process",
    "stopped": "everything is gone",
    "failed": "everything is being ended",
}


class FleetView:
    """Shows every state it is called with; a context manager, so that the live screen ends in order."""

    def __init__(self, console: Console) -> None:
        """Choose the live screen on a terminal and plain lines elsewhere."""
        self._console = console
        self._state: FleetState | None = None
        self._shown: dict[str, str] = {}
        self._live = (
            Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=False)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> FleetView:
        """Start the live screen."""
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the live screen, leaving its last picture."""
        if self._live:
            self._live.stop()

    def __call__(self, state: FleetState) -> None:
        """Show ``state``."""
        self._state = state
        if not self._live:
            self._print_changes(state)

    def _render(self) -> Group | str:
        return fleet_table(self._state, live=True) if self._state else ""

    def _print_changes(self, state: FleetState) -> None:
        for process in state.processes:
            if process.phase == "waiting":
                continue
            line = f"{process.name}: {process.phase}"
            if process.phase == "starting":
                line += f" (pid {process.pid}, {process.url})"
            elif process.phase == "ready" and process.ready_seconds is not None:
                line += f" after {process.ready_seconds:.1f} s"
            self._print_once(process.name, line)
        self._print_once("fleet", f"fleet {state.name}: {state.phase}")
        if state.canary:
            self._print_once("canary", canary_line(state))

    def _print_once(self, subject: str, line: str) -> None:
        if self._shown.get(subject) != line:
            self._shown[subject] = line
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)


def fleet_table(state: FleetState, *, live: bool = False) -> Group:
    """Return the picture of one fleet: a heading, a row a process, the canary and the address for clients.

    Args:
        state: the fleet.
        live: show what a running supervisor is doing at the moment.
    """
    heading = Text.assemble(
        ("kvops ", "bold"), (state.name, "bold cyan"), f"  {state.model}  {state.mode}  ", _styled(state.phase)
    )
    if live:
        heading.append(f"  {_PHASE_MEANS[state.phase]} ({time.time() - state.started_at:.0f} s)", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    for column in ("process", "state", "port", "pid"):
        table.add_column(column, no_wrap=True)
    table.add_column("last line", no_wrap=True, overflow="ellipsis", ratio=1)
    for process in state.processes:
        table.add_row(
            process.name,
            _process_phase(process),
            process.url.rpartition(":")[2],
            str(process.pid or ""),
            Text("\n".join(last_lines(process.log_file, 1)), style="dim"),
        )
    parts: list[Text | Table] = [heading, table]
    if state.canary:
        parts.append(Text(canary_line(state), style="green" if state.canary.passed else "bold red"))
    if state.phase == "ready":
        parts.append(Text.assemble("OpenAI API at ", (f"{state.router_url}/v1", "bold")))
    return Group(*parts)


def canary_line(state: FleetState) -> str:
    """Return the canary's verdict in one line; empty before it ran."""
    if state.canary is None:
        return ""
    sign = "ok" if state.canary.passed else "FAILED"
    return f"canary {sign} ({state.canary.seconds:.1f} s): {state.canary.verdict}"


def _process_phase(process: ProcessState) -> Text:
    text = _styled(process.phase)
    if process.phase == "ready" and process.ready_seconds is not None:
        text.append(f" {process.ready_seconds:.0f} s", style="dim")
    elif process.exit_code is not None:
        text.append(f" {process.exit_code}", style="dim")
    return text


def _styled(phase: str) -> Text:
    return Text(phase, style=_STYLE[phase])
