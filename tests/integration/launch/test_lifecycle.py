from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from fake_fleet import FAKE_ENGINE, NAME, FakeFleet, until
from kvops.cli.main import main
from kvops.launch.rundir import RunDir

MakeFleet = Callable[..., FakeFleet]
# What is promised to users: within this time every process of a fleet is gone, whatever ended it.
GONE_SECONDS = 20


def kvops(*args: str) -> Result:
    return CliRunner().invoke(main, [*args])


def is_gone(fleet: FakeFleet) -> bool:
    return fleet.everything_gone() and fleet.ports_free()


def test_a_fleet_that_moves_kv_becomes_ready(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start()
    state = fleet.wait_for("ready", "failed")
    assert state.phase == "ready", state.problem
    assert state.canary
    assert state.canary.passed
    assert state.canary.kv_bytes > 0
    assert [process.phase for process in state.processes] == ["ready"] * 3


def test_every_decode_engine_has_its_part_in_the_canary(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(decodes=3)
    fleet.start()
    state = fleet.wait_for("ready", "failed")
    assert state.phase == "ready", state.problem


def test_a_wrong_answer_fails_the_canary_and_ends_the_fleet(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(decode=["--wrong-answer"])
    fleet.start()
    assert "decode worked on wrong KV" in fleet.wait_for("failed").problem
    until(lambda: is_gone(fleet), GONE_SECONDS)


def test_kv_that_does_not_move_fails_the_canary_with_the_cause(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(
        decode=["--ignore-handles", "--log-line", "WARNING Got kv_transfer_params, but no KVConnector found."]
    )
    fleet.start()
    problem = fleet.wait_for("failed").problem
    assert "no KV moved" in problem
    assert "decode-0: the engine runs without a KV connector" in problem


def test_an_engine_that_dies_while_starting_is_named_with_its_last_words_and_advice(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(
        prefill=["--start-seconds", "60", "--exit-after", "1", "--log-line", "ERROR NIXL is not available"]
    )
    fleet.start()
    problem = fleet.wait_for("failed").problem
    assert problem.splitlines()[:3] == [
        "prefill-0 exited with status 3",
        "NIXL is not installed in this environment: pip install nixl",
        "  ERROR NIXL is not available",
    ]
    until(lambda: is_gone(fleet), GONE_SECONDS)


def test_an_engine_that_hangs_on_a_known_failure_is_ended(make_fleet: MakeFleet) -> None:
    line = "zmq.error.ZMQError: Cannot assign requested address (addr='tcp://203.0.113.9:5690')"
    fleet = make_fleet(decode=["--start-seconds", "600", "--log-line", line])
    fleet.start()
    problem = fleet.wait_for("failed").problem
    assert problem.startswith("decode-0 will never become healthy\nthe side channel cannot listen on 203.0.113.9:5690")


def test_an_engine_of_somebody_else_on_a_planned_port_is_not_taken_for_ours(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(decode=["--start-seconds", "600"])
    port = fleet.plan.role("decode")[0].port
    command = [sys.executable, str(FAKE_ENGINE), "--port", str(port), "--role", "decode"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stranger:
        fleet.start()
        problem = fleet.wait_for("ready", "failed").problem
        stranger.terminate()
    assert problem.startswith(f"port {port} was taken by python")
    assert f"(pid {stranger.pid}) before decode-0 could listen on it" in problem
    until(lambda: is_gone(fleet), GONE_SECONDS)


def test_an_engine_killed_while_serving_is_named_at_once(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(decode=["--child"])
    fleet.start()
    fleet.wait_for("ready")
    os.kill(fleet.pid_of("decode-0"), signal.SIGKILL)
    assert fleet.wait_for("failed").problem.startswith("decode-0 was killed by SIGKILL")
    until(lambda: is_gone(fleet), GONE_SECONDS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_nothing_outlives_a_supervisor_that_gets_a_signal(make_fleet: MakeFleet, number: signal.Signals) -> None:
    fleet = make_fleet(prefill=["--child"], decode=["--child"])
    fleet.start()
    fleet.wait_for("ready")
    assert fleet.supervisor
    os.kill(fleet.supervisor.pid, number)
    until(lambda: is_gone(fleet), GONE_SECONDS)


def test_an_engine_that_ignores_sigterm_is_killed(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(decode=["--child", "--ignore-term"])
    fleet.start()
    fleet.wait_for("ready")
    assert kvops("down", "--name", NAME).exit_code == 0
    assert is_gone(fleet)


def test_down_during_start_leaves_nothing(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(prefill=["--start-seconds", "600", "--child"])
    fleet.start()
    fleet.pid_of("prefill-0")
    assert kvops("down", "--name", NAME).exit_code == 0
    assert is_gone(fleet)
    assert fleet.state.phase == "stopped"


def test_down_twice_is_no_error(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start()
    fleet.wait_for("ready")
    first, second = kvops("down", "--name", NAME), kvops("down", "--name", NAME)
    assert (first.exit_code, first.output) == (0, "fleet f is stopped\n")
    assert (second.exit_code, second.output) == (0, "no fleet named f is running\n")


def test_down_ends_a_fleet_whose_supervisor_does_not_answer(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvops.cli.down._PATIENCE_SECONDS", 0.5)
    fleet = make_fleet()
    fleet.start()
    fleet.wait_for("ready")
    assert fleet.supervisor
    os.kill(fleet.supervisor.pid, signal.SIGSTOP)
    assert kvops("down", "--name", NAME).exit_code == 0
    assert is_gone(fleet)


def test_down_cleans_up_after_a_supervisor_that_is_gone(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start()
    state = fleet.wait_for("ready")
    stray = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env=os.environ | {"KVOPS_RUN_ID": state.run_id},
        start_new_session=True,
    )
    assert fleet.supervisor
    fleet.supervisor.kill()
    fleet.supervisor.wait()
    assert kvops("down", "--name", NAME).exit_code == 0
    stray.wait(timeout=GONE_SECONDS)
    assert is_gone(fleet)


def test_a_stale_fleet_whose_pid_was_reused_is_recognised(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start()
    state = fleet.wait_for("ready")
    assert fleet.supervisor
    fleet.supervisor.kill()
    fleet.supervisor.wait()
    # This very process now stands for an innocent one that was given the old supervisor's id.
    state.supervisor_pid = os.getpid()
    RunDir(NAME).write_state(state)
    shown = kvops("status", "--name", NAME, "--json")
    assert (shown.exit_code, json.loads(shown.output)[0]["phase"]) == (1, "stale")
    assert kvops("down", "--name", NAME).exit_code == 0


def test_a_second_fleet_of_the_same_name_is_refused(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start()
    fleet.wait_for("ready")
    result = kvops("up", "--name", NAME, "--preset", "cpu-demo")
    assert (result.exit_code, "a fleet named f is already running" in result.output) == (2, True)
    assert fleet.state.phase == "ready"


def test_a_name_can_be_used_again_after_down(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start()
    first = fleet.wait_for("ready")
    kvops("down", "--name", NAME)
    fleet.start()
    second = until(lambda: (state := fleet.wait_for("ready")).run_id != first.run_id and state)
    assert second.phase == "ready"


def test_status_of_a_ready_fleet_is_0_and_lists_its_processes(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start()
    fleet.wait_for("ready")
    result = kvops("status")
    assert result.exit_code == 0
    assert all(word in result.output for word in ("prefill-0", "decode-0", "router", "canary ok"))


def test_status_without_any_fleet_is_2() -> None:
    assert kvops("status").exit_code == 2


def test_logs_show_each_process_with_its_name(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start()
    fleet.wait_for("ready")
    assert "prefill-0  | Application startup complete." in kvops("logs", "--name", NAME).output


def test_logs_follow_until_the_fleet_ends(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start()
    state = fleet.wait_for("ready")
    argv = [sys.executable, "-m", "kvops.cli.main", "logs", "decode-0", "-f", "-n", "1", "--name", NAME]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout
        assert follower.stdout.readline() == "Application startup complete.\n"
        log_file = next(process.log_file for process in state.processes if process.name == "decode-0")
        with Path(log_file).open("a") as file:
            file.write("a new line\n")
        assert follower.stdout.readline() == "a new line\n"
        kvops("down", "--name", NAME)
        assert follower.wait(timeout=GONE_SECONDS) == 0


def test_logs_of_an_unknown_process_name_the_known_ones(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start()
    fleet.wait_for("ready")
    result = kvops("logs", "nobody", "--name", NAME)
    assert (result.exit_code, "choose one of prefill-0, decode-0, router" in result.output) == (2, True)


def test_no_process_of_a_fleet_holds_the_supervisors_lock(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.start()
    state = fleet.wait_for("ready")
    for process in state.processes:
        assert process.pid
        assert not any(file.path.endswith("/lock") for file in psutil.Process(process.pid).open_files())
