"""The supervisor: starts a plan's processes, waits until they serve, proves that KV moves, and ends them all together.

It runs inside ``kvops up`` in the foreground, or alone (``python -m kvops.launch.supervisor NAME``) when detached. One
dead engine ends the fleet: a router in front of half a fleet answers, only slower or wrong, and nobody notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from kvops.errors import KvopsError
from kvops.launch import observers
from kvops.launch.advice import explain_log
from kvops.launch.canary import run_canary
from kvops.launch.plan import Plan, holder_of
from kvops.launch.processes import RUN_ID_VARIABLE, end_run, listens, unpin
from kvops.launch.rundir import FleetState, ProcessState, RunDir

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvops.launch.plan import Process

# Large models load for tens of minutes and Neuron compiles for longer; a fleet that takes more than this is stuck.
READY_TIMEOUT_SECONDS = 3 * 3600
_HEALTH_POLL_SECONDS = 0.25
_POLLS_PER_LOG_LOOK = 8
_HEALTH_PATH = {"prefill": "/health", "decode": "/health", "router": "/readyz", **observers.HEALTH_PATH}
_LAST_LINES = 12


class _NeverServesError(Exception):
    """A process lives but will never serve; the text is the obituary."""


class Supervisor:
    """Runs one fleet from start to end."""

    def __init__(self, plan: Plan, run_dir: RunDir, on_change: Callable[[FleetState], None] = lambda _: None) -> None:
        """Prepare; nothing is started.

        Args:
            plan: what to start.
            run_dir: where the fleet's files go.
            on_change: called with the state whenever it changed.
        """
        self._plan = plan
        self._run_dir = run_dir
        self._on_change = on_change
        self._stopping = False
        self._over = asyncio.Event()
        self._watchers: list[asyncio.Task[None]] = []
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self.state = FleetState(
            run_id=uuid.uuid4().hex,
            name=plan.name,
            mode=plan.mode,
            model=plan.served_model_name,
            supervisor_pid=os.getpid(),
            started_at=time.time(),
            processes=[
                ProcessState(name=process.name, role=process.role, url=process.url, log_file=process.log_file)
                for process in plan.processes
            ],
        )

    def stop(self) -> None:
        """Ask the fleet to end; ``run`` returns once everything is gone."""
        self._stopping = True
        self._over.set()

    async def run(self) -> FleetState:
        """Start the fleet, keep it until it is stopped or fails, and return its last state.

        Raises:
            KvopsError: a supervisor of the same name is already running.
        """
        lock = self._run_dir.take_lock()
        if lock is None:
            raise already_running(self._run_dir.name)
        with lock:
            await asyncio.to_thread(clean_up_stale, self._run_dir)
            self._run_dir.prepare(self._plan)
            self._install_signal_handlers()
            watchdog = _start_watchdog(self.state.run_id)
            try:
                await self._supervise()
            finally:
                await self._end_all()
                if watchdog.stdin:
                    watchdog.stdin.close()
                await asyncio.to_thread(watchdog.wait)
        return self.state

    def _install_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)

    async def _supervise(self) -> None:
        """Start everything and return when the fleet is over: stopped, failed, or one of its processes dead."""
        self._changed()
        for process in self._plan.engines:
            if self._stopping:
                return
            await self._start(process)
        bring_up = asyncio.create_task(self._bring_up())
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait([bring_up, over], return_when=asyncio.FIRST_COMPLETED)
            if not over.done() and await bring_up:
                await over
        finally:
            tasks = [bring_up, over, *self._watchers]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, process: Process) -> None:
        log = os.open(process.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            child = await asyncio.create_subprocess_exec(
                *process.argv,
                env=os.environ | process.env | {RUN_ID_VARIABLE: self.state.run_id, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(log)
        self._children[process.name] = child
        self._watchers.append(asyncio.create_task(self._await_death(process)))
        state = self._process(process.name)
        state.pid, state.phase = child.pid, "starting"
        self._changed()

    async def _await_death(self, process: Process) -> None:
        child = self._children[process.name]
        code = await child.wait()
        state = self._process(process.name)
        state.exit_code, state.phase = code, "died"
        if process.role in observers.ROLES:
            # Nobody's request needs it.
            self._changed()
            return
        if not self._stopping:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
            self._fail(_obituary(process, how))
        self._over.set()

    async def _bring_up(self) -> bool:
        """Wait until everything serves and run the canary; return whether the fleet may stay."""
        problem = ""
        async with aiohttp.ClientSession() as session:
            try:
                async with asyncio.timeout(READY_TIMEOUT_SECONDS), asyncio.TaskGroup() as group:
                    for process in self._plan.engines:
                        group.create_task(self._await_health(session, process))
                # Last, so that its very first look at the engines finds them serving.
                await self._start(self._plan.router)
                await self._await_health(session, self._plan.router)
                await self._start_observers()
            except* TimeoutError:
                late = [state.name for state in self.state.processes if state.phase == "starting"]
                problem = f"{', '.join(late)} did not become healthy in {READY_TIMEOUT_SECONDS} s; see kvops logs"
            except* _NeverServesError as errors:
                problem = str(errors.exceptions[0])
            if problem:
                self._fail(problem)
                return False
            self.state.phase = "checking"
            self._changed()
            self.state.canary = await run_canary(session, self._plan)
        if not self.state.canary.passed:
            self._fail("; ".join(filter(None, (self.state.canary.verdict, self.state.canary.cause))))
            return False
        self.state.phase = "ready"
        self._changed()
        return True

    async def _start_observers(self) -> None:
        """Start Prometheus and Grafana where the plan has them; the fleet waits for neither."""
        for role in observers.ROLES:
            for process in self._plan.role(role):
                await self._start(process)
                self._watchers.append(asyncio.create_task(self._await_observer(process)))

    async def _await_observer(self, process: Process) -> None:
        async with aiohttp.ClientSession() as session:
            await self._await_health(session, process)

    async def _await_health(self, session: aiohttp.ClientSession, process: Process) -> None:
        started = time.monotonic()
        state = self._process(process.name)
        for attempt in itertools.count(1):
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                url = process.url + _HEALTH_PATH[process.role]
                async with session.get(url, timeout=aiohttp.ClientTimeout(total=2)) as answer:
                    if answer.status == 200 and (
                        process.role != "router" or _reaches_all(await answer.json(), self._plan)
                    ):
                        await asyncio.to_thread(self._take_charge, process)
                        state.phase = "ready"
                        state.ready_seconds = time.monotonic() - started
                        self._changed()
                        return
            if attempt % _POLLS_PER_LOG_LOOK == 0 and explain_log(process.log_file, only_hanging=True):
                raise _NeverServesError(_obituary(process, "will never become healthy"))
            await asyncio.sleep(_HEALTH_POLL_SECONDS)

    def _take_charge(self, process: Process) -> None:
        """Make sure that it is ``process`` that has answered, and free it from vLLM's pinning.

        Raises:
            _NeverServesError: something else listens on its port.
        """
        if not listens(self.state.run_id, process.port):
            taken = f"port {process.port} was taken{holder_of(process.port)} before {process.name} could listen on it"
            raise _NeverServesError(f"{taken}\nstop that, or start the fleet again: kvops then finds another port")
        # The instrumented connectors keep the cores by themselves (kvops_connectors.affinity).
        if self._plan.connectors == "stock" and process.env.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
            unpin(self.state.run_id)

    async def _end_all(self) -> None:
        failed = self.state.phase == "failed"
        if not failed:
            self.state.phase = "stopping"
            self._changed()
        all_gone = await asyncio.to_thread(end_run, self.state.run_id)
        await asyncio.gather(*(child.wait() for child in self._children.values()))
        for state in self.state.processes:
            if state.phase != "died":
                state.phase = "stopped"
        if not all_gone:
            self._fail(f"some processes of run {self.state.run_id} could not be ended; look at them with ps")
        elif not failed:
            self.state.phase = "stopped"
        self._changed()

    def _fail(self, problem: str) -> None:
        if self.state.phase != "failed":
            self.state.phase, self.state.problem = "failed", problem
        self._changed()

    def _process(self, name: str) -> ProcessState:
        return next(state for state in self.state.processes if state.name == name)

    def _changed(self) -> None:
        self._run_dir.write_state(self.state)
        self._on_change(self.state)


def _reaches_all(readiness: dict[str, Any], plan: Plan) -> bool:
    """Return whether the router's /readyz counts every engine of the plan (every rank of it) as able to serve."""
    ranks = {role: sum(len(engine.side_channel_ports) for engine in plan.role(role)) for role in ("prefill", "decode")}
    return bool(readiness.get("engines") == ranks)


def already_running(name: str) -> KvopsError:
    """Return the error for a second fleet of the same name."""
    return KvopsError(
        f"a fleet named {name} is already running", f"stop it with 'kvops down --name {name}' or choose another --name"
    )


def clean_up_stale(run_dir: RunDir) -> None:
    """End what a supervisor that is gone has left running. The caller holds the folder's lock."""
    state = run_dir.read_state()
    if state is not None and state.phase not in ("stopped", "failed"):
        end_run(state.run_id)
        state.phase, state.problem = "failed", "its supervisor died; what it had started was ended"
        run_dir.write_state(state)


def last_lines(log_file: str | Path, count: int = _LAST_LINES) -> list[str]:
    """Return up to ``count`` last lines of a log file, reading no more than its last 64 KiB."""
    try:
        with Path(log_file).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def _obituary(process: Process, how: str) -> str:
    lines = [f"{process.name} {how}"]
    if advice := explain_log(process.log_file):
        lines.append(advice)
    lines += [f"  {line}" for line in last_lines(process.log_file)]
    return "\n".join(lines)


def _start_watchdog(run_id: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvops.launch.watchdog", run_id], stdin=subprocess.PIPE, start_new_session=True
    )


def main(name: str) -> int:
    """Run the plan that comes on standard input as the fleet ``name``; the detached form of ``kvops up``."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    state = asyncio.run(Supervisor(plan, RunDir(name)).run())
    return 1 if state.phase == "failed" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
