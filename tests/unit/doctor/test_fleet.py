"""Engines of a running fleet are found by name, and only those."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from kvops.doctor.fleet import pids_of
from kvops.errors import KvopsError
from kvops.launch.rundir import FleetState, ProcessState, RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def fleets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Two fleets that run, and one that has ended."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    locks = [describe(name, pid).take_lock() for name, pid in (("default", 100), ("canary", 200))]
    describe("ended", 300)
    yield
    for lock in locks:
        lock.close()


def describe(name: str, pid: int) -> RunDir:
    roles = {"prefill-0": "prefill", "decode-0": "decode", "router": "router", f"{name}-only": "decode"}
    processes = [
        ProcessState(name=own, role=role, url="", log_file="", pid=pid + number)
        for number, (own, role) in enumerate(roles.items())
    ]
    state = FleetState(
        run_id=name, name=name, mode="pull", model="m", supervisor_pid=1, started_at=time.time(), processes=processes
    )
    run_dir = RunDir(name)
    run_dir.path.mkdir(parents=True)
    run_dir.write_state(state)
    (run_dir.path / "plan.json").touch()
    return run_dir


def test_engines_are_found_in_the_order_they_are_asked_for() -> None:
    assert pids_of(["canary/decode-0", "default/prefill-0"]) == {201: "canary/decode-0", 100: "default/prefill-0"}


def test_a_name_that_one_fleet_has_needs_no_fleet() -> None:
    assert pids_of(["canary-only"]) == {203: "canary-only"}


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["prefill-0", "decode-0"], "'prefill-0' runs in several fleets"),
        (["default/router", "default/decode-0"], "neither a snapshot nor an engine"),
        (["ended/prefill-0", "ended/decode-0"], "neither a snapshot nor an engine"),
        (["default/decode-0", "default/decode-0"], "not compared with itself"),
    ],
)
def test_what_names_no_two_running_engines_is_refused(names: list[str], problem: str) -> None:
    with pytest.raises(KvopsError, match=problem):
        pids_of(names)
