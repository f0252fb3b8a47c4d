"""A run from start to end: fleets up, workload, journals, verdict, files."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
import msgspec
import uvloop

from kvops.bench import counters, environment, fleets
from kvops.bench.client import Client
from kvops.bench.progress import Progress
from kvops.bench.results import CellCounters, RequestResult, Run, RunWriter, Verdict
from kvops.bench.running import Runner, Server, expected_requests
from kvops.bench.workload import Sweep, Turns
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from pathlib import Path

    from kvops.bench.fleets import Target
    from kvops.launch.plan import Plan

_MOST_PROBLEMS = 20
# Beyond this the client's own work shows in the latencies.
_MOST_CLIENT_CPU = 0.8


class Session:
    """One run; also the sink of its results."""

    def __init__(
        self,
        kind: Literal["turns", "sweep"],
        workload: Sweep | Turns,
        targets: list[Target],
        out: Path,
        *,
        key: str | None,
        side_by_side: bool,
    ) -> None:
        """Prepare; nothing is started or written.

        Args:
            kind: of the run.
            workload: what to send.
            targets: the legs.
            out: folder to write.
            key: API key for the routers.
            side_by_side: all fleets at once; else one after the other.
        """
        self._kind, self._workload, self._targets, self._out = kind, workload, targets, out
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._side_by_side = side_by_side
        self._counters: list[CellCounters] = []
        self._windows: fleets.Windows = {}
        self._problems: list[str] = []
        self._failed: dict[str, int] = {}
        self._first_errors: dict[str, str] = {}
        self._models: dict[str, str] = {}
        self.results: list[RequestResult] = []

    def run(self, *, quiet: bool) -> Run:
        """Do it all and return what ``run.json`` holds.

        Raises:
            KvopsError: a fleet does not come up, or a leg cannot be reached.
        """
        try:
            return uvloop.run(self._run(quiet=quiet))
        except asyncio.CancelledError:
            raise KvopsError("the run was interrupted before anything was measured") from None

    def request(self, result: RequestResult) -> None:
        """Take a request that was measured."""
        self._writer.add(result)
        self.results.append(result)
        if result.outcome == "failed":
            self._failed[result.leg] = self._failed.get(result.leg, 0) + 1
            self._first_errors.setdefault(result.leg, result.error or "")
        self._progress.request(result)

    def cell(self, counted: CellCounters) -> None:
        """Take what the engines counted."""
        self._counters.append(counted)
        self._windows.setdefault(counted.leg, []).append((counted.started, time.time()))
        self._progress.cell(counted)

    async def _run(self, *, quiet: bool) -> Run:
        started = time.time()
        with RunWriter(self._out) as self._writer, Progress(quiet=quiet) as self._progress:
            self._progress.expect(expected_requests(self._workload, len(self._targets)))
            try:
                for group in [self._targets] if self._side_by_side else [[target] for target in self._targets]:
                    await self._run_group(group)
            except (KvopsError, asyncio.CancelledError) as problem:
                # What was measured so far is kept, under a verdict that says what is missing.
                if not self.results:
                    raise
                self._problems.append(f"the run ended early: {str(problem) or 'it was interrupted'}")
            run = self._summary(started)
            self._writer.finish(run)
        return run

    async def _run_group(self, targets: list[Target]) -> None:
        """Run some legs whose engines are up together."""
        async with fleets.running(_distinct_plans(targets), self._progress.fleet), aiohttp.ClientSession() as session:
            _let_interrupts_end_us()
            for target in targets:
                self._models[target.leg.name] = await fleets.model_of(
                    session, target.leg, self._headers, self._workload.longest_tokens
                )
            servers = [
                Server(target.leg, Client(target.leg.router, self._models[target.leg.name], self._headers))
                for target in targets
            ]
            runner = Runner(session, servers, self)
            try:
                if isinstance(self._workload, Sweep):
                    await runner.sweep(self._workload)
                else:
                    await runner.turns(self._workload)
            finally:
                for server in servers:
                    server.client.close()
                await fleets.copy_journals(targets, self._windows, self._writer.journal_folder)

    def _summary(self, started: float) -> Run:
        legs = {target.leg.name: target.leg for target in self._targets}
        continues = isinstance(self._workload, Turns) and self._workload.turns > 1
        problems = list(self._problems)
        for counted in self._counters:
            problems += counters.problems(counted, legs[counted.leg], continues=continues)
        problems += [
            f"{leg}: {count} requests failed, the first with {self._first_errors[leg]}"
            for leg, count in self._failed.items()
        ]
        problems += [
            f"{counted.leg}, round {counted.round + 1}: the client was busy {counted.client_cpu_share:.0%} of the time "
            "and so the limit"
            for counted in self._counters
            if counted.client_cpu_share > _MOST_CLIENT_CPU
        ]
        return Run(
            kind=self._kind,
            started=started,
            ended=time.time(),
            command=["kvops", *sys.argv[1:]],
            seed=self._workload.seed,
            environment=environment.describe(),
            workload=_parameters(self._workload),
            legs=[
                msgspec.structs.replace(target.leg, model=self._models.get(target.leg.name, ""))
                for target in self._targets
            ],
            counters=self._counters,
            verdict=Verdict(ok=not problems, problems=problems[:_MOST_PROBLEMS]),
        )


def _parameters(workload: Sweep | Turns) -> dict[str, Any]:
    parameters: dict[str, Any] = msgspec.to_builtins(workload)
    return parameters


def _distinct_plans(targets: list[Target]) -> list[Plan]:
    """Return the fleets to start; two legs may share one."""
    plans = {target.plan.name: target.plan for target in targets if target.plan}
    return list(plans.values())


def _let_interrupts_end_us() -> None:
    """Make Ctrl-C end the run in order; each supervisor has taken the signals for itself when it started."""
    task = asyncio.current_task()
    if task is None:
        raise KvopsError("a run needs a task of its own")
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
