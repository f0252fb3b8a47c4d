"""A fleet of scripted engines: real processes with real children, only without vLLM's minute of start-up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest

from kvops.launch.plan import Plan, make_plan
from kvops.launch.processes import end_run, pids_of_run
from kvops.launch.rundir import FleetState, RunDir
from kvops.topology import load_topology

FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"
NAME = "f"
T = TypeVar("T")


def until(look: Callable[[], T | None], seconds: float = 30) -> T:
    """Return the first true value of ``look``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := look():
            return value
        time.sleep(0.05)
    pytest.fail(f"it did not happen within {seconds} s")


class FakeFleet:
    """A detached fleet, as ``kvops up -d`` leaves it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.run_dir = RunDir(NAME)
        self.supervisor: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self.supervisor:
            self.supervisor.wait()
        self.supervisor = subprocess.Popen(
            [sys.executable, "-m", "kvops.launch.supervisor", NAME], stdin=subprocess.PIPE, start_new_session=True
        )
        assert self.supervisor.stdin
        self.supervisor.stdin.write(msgspec.json.encode(self.plan))
        self.supervisor.stdin.close()

    @property
    def state(self) -> FleetState:
        return until(self.run_dir.read_state)

    def wait_for(self, *phases: str) -> FleetState:
        def look() -> FleetState | None:
            state = self.run_dir.read_state()
            return state if state and state.phase in phases else None

        return until(look)

    def pid_of(self, name: str) -> int:
        return until(lambda: next(process.pid for process in self.state.processes if process.name == name))

    def end(self) -> None:
        """End whatever is left, whatever state it is in."""
        if self.supervisor:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.supervisor.pid, signal.SIGKILL)
            self.supervisor.wait()
        if state := self.run_dir.read_state():
            end_run(state.run_id, grace_seconds=0)

    def everything_gone(self) -> bool:
        return not pids_of_run(self.state.run_id)

    def ports_free(self) -> bool:
        ports = {process.port for process in self.plan.processes}
        return not any(
            connection.laddr.port in ports and connection.status == psutil.CONN_LISTEN
            for connection in psutil.net_connections("tcp")
            if connection.laddr
        )


def fake_plan(
    *, prefill: list[str] | None = None, decode: list[str] | None = None, decodes: int = 1, observe: bool = False
) -> Plan:
    """Return the plan of a demo fleet with scripted engines that get the extra arguments of their role."""
    extra = {"prefill": prefill or [], "decode": decode or []}
    overrides = {"decode": {"replicas": decodes}, "observability": {"enabled": observe}}
    topology = load_topology(None, overrides, "cpu-demo")
    plan = make_plan(topology, name=NAME, folder=RunDir(NAME).path)
    processes = tuple(
        process
        if process.role not in extra
        else msgspec.structs.replace(
            process,
            argv=(
                *(sys.executable, str(FAKE_ENGINE), "--port", str(process.port), "--role", process.role),
                *extra[process.role],
            ),
        )
        for process in plan.processes
    )
    return msgspec.structs.replace(plan, processes=processes)
