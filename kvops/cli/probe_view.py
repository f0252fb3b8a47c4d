"""How a probe looks in the terminal: a progress line while it runs, then a table and a verdict."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from types import TracebackType

    from kvops.doctor.probe.messages import Progress as Step
    from kvops.doctor.probe.messages import Run
    from kvops.doctor.probe.report import Report

# Nothing moves on the screen of a probe that is over before anybody has read it.
_QUIET_SECONDS = 2.0
_STYLE = {"PASS": "bold green", "WARN": "bold yellow", "FAIL": "bold red"}
_ROUTES = {
    "rdma": "RDMA",
    "tcp": "TCP",
    "shared_memory": "shared memory of one host",
    "cuda_ipc": "CUDA IPC between GPUs of one host (NVLink or PCIe)",
    "host_staging": "copies through host memory",
    "unknown": "unknown",
}
_BY = {"log": "by the log of NIXL and UCX", "counters": "by the kernel's counters", "nothing": "nothing said so"}


class ProbeView:
    """Shows each step on a terminal's standard error once the probe has run for two seconds."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._shows = self._progress.console.is_terminal
        self._task = self._progress.add_task("starting", total=None)
        self._began_at = time.monotonic()
        self._live = False

    def __enter__(self) -> ProbeView:
        """Return the view; nothing is shown yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the progress line away."""
        if self._live:
            self._progress.stop()

    def __call__(self, step: Step) -> None:
        """Show ``step``."""
        if not self._shows:
            return
        if not self._live and time.monotonic() - self._began_at > _QUIET_SECONDS:
            self._progress.start()
            self._live = True
        count = f" {step.done}/{step.total}" if step.total else ""
        self._progress.update(self._task, description=step.step + count, completed=step.done, total=step.total or None)


def print_report(report: Report) -> None:
    """Print the result of a probe for people."""
    console = Console()
    console.print(_heading(report))
    if report.runs:
        console.print(_table(report.runs))
    console.print(_facts(report))
    console.print(_verdict(report))


def _heading(report: Report) -> Text:
    where = "two processes of this host" if report.role == "pair" else "this host and its peer"
    what = f"{report.backend}, {'device' if report.memory == 'vram' else 'host'} memory, {where}"
    return Text.assemble(("kvops probe", "bold"), f"  {what}")


def _table(runs: list[Run]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("pattern", no_wrap=True)
    table.add_column("op", no_wrap=True)
    for column in ("descriptors", "on wire", "GB/s", "P50 ms", "P99 ms", "post\nµs/desc", "wire\nµs/desc", "data"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run.pattern,
            run.operation,
            f"{run.descriptors} x {_size(run.descriptor_bytes)}",
            "" if run.wire_descriptors is None else str(run.wire_descriptors),
            _short(run.gb_per_second),
            _short(run.p50_seconds * 1e3),
            _short(run.p99_seconds * 1e3),
            _short(run.post_us_per_descriptor),
            _short(run.wire_us_per_descriptor),
            Text("WRONG", style="bold red") if run.wrong_bytes else Text("ok", style="green"),
        )
    return table


def _facts(report: Report) -> Table:
    evidence = report.evidence
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("way", f"{_ROUTES[evidence.route]} ({_BY[evidence.route_by]})")
    if evidence.rails:
        facts.add_row("rails", ", ".join(f"{rail.transport} on {rail.device}" for rail in evidence.rails))
    if evidence.counters:
        grown = sorted(evidence.counters.items(), key=lambda item: -item[1])[:6]
        facts.add_row("counters", ", ".join(f"{name} +{value}" for name, value in grown))
    for name, side in (("here", report.me), ("peer", report.peer)):
        facts.add_row(name, Text(_side(side.device, side.instance, side.rdma_devices)))
    facts.add_row("NIXL", f"{report.me.nixl or 'version unknown'}, plugins {', '.join(report.me.plugins)}")
    for warning in evidence.warnings:
        facts.add_row("NIXL says", Text(warning, style="yellow"))
    if report.role == "listen":
        facts.add_row("checked", f"{report.checks} times what was written here")
    return facts


def _side(device: str, instance: str, rdma_devices: int) -> str:
    parts = [device, instance, f"{rdma_devices} RDMA device(s)" if rdma_devices else "no RDMA device"]
    return ", ".join(part for part in parts if part)


def _verdict(report: Report) -> Text:
    verdict = report.verdict
    moved = f" ({report.moved_bytes / 1e9:.1f} GB)" if report.moved_bytes else ""
    text = Text.assemble((verdict.state, _STYLE[verdict.state]), f" {verdict.headline}{moved}")
    for reason in verdict.reasons:
        if reason.text != verdict.headline:
            text.append(f"\n  {reason.state} {reason.text}", style="dim")
    return text


def _short(figure: float) -> str:
    return f"{figure:.2f}" if figure < 100 else f"{figure:.0f}"


def _size(size_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.4g} {name}"
    return f"{size_bytes} B"
