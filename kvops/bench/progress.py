"""What a run shows while it goes: a bar on a terminal, a line a cell elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

if TYPE_CHECKING:
    from kvops.bench.results import CellCounters, RequestResult
    from kvops.launch.rundir import FleetState


class Progress:
    """Writes to standard error, so that standard output holds the result alone."""

    def __init__(self, *, quiet: bool) -> None:
        """Choose how to show things; ``quiet`` shows nothing but the bar of a terminal."""
        self._console = Console(stderr=True)
        self._quiet = quiet and not self._console.is_terminal
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._requests = self._bars.add_task("requests", total=None)
        self._phases: dict[str, str] = {}

    def __enter__(self) -> Self:
        """Start the bar."""
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the bar."""
        self._bars.stop()

    def expect(self, requests: int) -> None:
        """Set the bar's end; 0 for one that is not known."""
        self._bars.update(self._requests, total=requests or None)

    def request(self, result: RequestResult) -> None:
        """Count a request."""
        self._bars.update(self._requests, advance=1, description=result.leg)

    def cell(self, counted: CellCounters) -> None:
        """Tell that a leg is done with a cell."""
        rate = f"at {counted.cell.rate_per_second:g}/s" if counted.cell.rate_per_second else "one by one"
        self._say(
            f"{counted.leg}: round {counted.round + 1}, {counted.cell.input_tokens} tokens {rate} done in "
            f"{counted.seconds:.1f} s"
        )

    def fleet(self, state: FleetState) -> None:
        """Tell what a fleet is doing, once a phase."""
        if self._phases.get(state.name) != state.phase:
            self._phases[state.name] = state.phase
            self._say(f"fleet {state.name}: {state.phase}")

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
