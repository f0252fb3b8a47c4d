"""How a run looks in the terminal: one row a leg and cell, then the verdict."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from kvops.bench.client import quantile

if TYPE_CHECKING:
    from pathlib import Path

    from kvops.bench.results import Cell, RequestResult, Run

# A pipe has no width; nothing may be cut off there.
_PLAIN_WIDTH = 200


def show_run(run: Run, results: list[RequestResult], folder: Path, *, as_json: bool) -> None:
    """Print a run: a table and the verdict, or ``run.json``."""
    if as_json:
        click.echo((folder / "run.json").read_text(), nl=False)
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    console.print(_table(run, results))
    for problem in run.verdict.problems:
        console.print(problem, style="red", markup=False)
    verdict = "KV moved in every cell and every answer was right" if run.verdict.ok else "the run FAILED"
    console.print(f"{verdict}; {folder}", style="green" if run.verdict.ok else "bold red", markup=False)


def _table(run: Run, results: list[RequestResult]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("leg", "tokens", "rate", "ok", "failed", "TTFT mean", "p50", "p90", "TPOT mean", "p90", "KV moved"):
        table.add_column(column, justify="left" if column == "leg" else "right", no_wrap=True)
    moved: dict[tuple[str, Cell], int] = {}
    for counted in run.counters:
        key = (counted.leg, counted.cell)
        moved[key] = moved.get(key, 0) + counted.prefill.kv_bytes + counted.decode.kv_bytes
    groups: dict[tuple[Cell, str], list[RequestResult]] = {}
    for result in results:
        groups.setdefault((result.cell, result.leg), []).append(result)
    order = {leg.name: index for index, leg in enumerate(run.legs)}
    for (cell, leg), group in sorted(
        groups.items(), key=lambda item: (item[0][0].input_tokens, item[0][0].rate_per_second, order[item[0][1]])
    ):
        good = [result for result in group if result.outcome == "ok"]
        table.add_row(
            leg,
            str(cell.input_tokens),
            f"{cell.rate_per_second:g}/s" if cell.rate_per_second else "one by one",
            str(len(good)),
            str(sum(result.outcome == "failed" for result in group)),
            *_milliseconds([result.ttft_seconds for result in good], (0.5, 0.9)),
            *_milliseconds([result.tpot_seconds for result in good], (0.9,)),
            decimal(moved[leg, cell]) if (leg, cell) in moved else "",
        )
    return table


def _milliseconds(seconds: list[float | None], shares: tuple[float, ...]) -> list[str]:
    values = sorted(value * 1e3 for value in seconds if value is not None)
    if not values:
        return ["-"] * (1 + len(shares))
    return [f"{value:.1f} ms" for value in (statistics.fmean(values), *(quantile(values, share) for share in shares))]
