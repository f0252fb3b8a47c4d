from __future__ import annotations

from pathlib import Path

import pytest

from kvops.errors import KvopsError
from kvops.launch.plan import make_plan
from kvops.launch.rundir import FleetState, ProcessState, RunDir, known_names, state_home
from kvops.topology import load_topology


@pytest.fixture
def run_dir() -> RunDir:
    run_dir = RunDir("f")
    run_dir.prepare(make_plan(load_topology(preset="cpu-demo"), name="f", folder=run_dir.path))
    return run_dir


def a_state() -> FleetState:
    router = ProcessState(name="router", role="router", url="http://127.0.0.1:8000", log_file="/l")
    return FleetState(
        run_id="r", name="f", mode="pull", model="m", supervisor_pid=1, started_at=0.0, processes=[router]
    )


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", "-x", "x" * 64, "a b"])
def test_a_name_that_is_no_folder_name_is_refused(name: str) -> None:
    with pytest.raises(KvopsError, match="cannot be a fleet's name"):
        RunDir(name)


def test_the_folder_is_for_the_user_alone(run_dir: RunDir) -> None:
    assert run_dir.path.stat().st_mode & 0o077 == 0
    assert (run_dir.path / "plan.json").stat().st_mode & 0o077 == 0


def test_the_plan_comes_back_as_written(run_dir: RunDir) -> None:
    assert run_dir.read_plan().name == "f"


def test_the_state_comes_back_as_written(run_dir: RunDir) -> None:
    run_dir.write_state(a_state())
    assert run_dir.read_state() == a_state()


def test_a_state_that_cannot_be_read_is_none(run_dir: RunDir) -> None:
    (run_dir.path / "state.json").write_text('{"run_id": 3')
    assert run_dir.read_state() is None


def test_old_logs_are_gone_when_a_fleet_starts_anew(run_dir: RunDir) -> None:
    (run_dir.log_dir / "prefill-0.log").write_text("old")
    run_dir.prepare(run_dir.read_plan())
    assert list(run_dir.log_dir.iterdir()) == []


def test_a_name_is_running_as_long_as_its_lock_is_held(run_dir: RunDir) -> None:
    lock = run_dir.take_lock()
    assert lock is not None
    assert run_dir.is_running()
    assert run_dir.take_lock() is None
    lock.close()
    assert not run_dir.is_running()


def test_a_name_that_was_never_used_is_not_running() -> None:
    assert not RunDir("never").is_running()


def test_known_names_lists_every_fleet_that_was_started(run_dir: RunDir) -> None:
    (state_home() / "stray").mkdir()
    assert known_names() == ["f"]


def test_the_state_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert state_home() == Path("/somewhere/kvops")
