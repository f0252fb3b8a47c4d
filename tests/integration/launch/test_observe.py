"""A real Prometheus beside a fleet of scripted engines."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Callable

import pytest

from fake_fleet import FakeFleet, until
from kvops.launch import observers

pytestmark = pytest.mark.system("prometheus")
MakeFleet = Callable[..., FakeFleet]


@pytest.fixture
def fleet(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    monkeypatch.setattr(observers, "installed", lambda: ["prometheus"])
    fleet = make_fleet(observe=True)
    observers.write_files(fleet.plan, fleet.run_dir.path)
    fleet.start()
    state = fleet.wait_for("ready", "failed")
    assert state.phase == "ready", state.problem
    return fleet


def phase_of(fleet: FakeFleet, name: str) -> str:
    return next(process.phase for process in fleet.state.processes if process.name == name)


def targets(fleet: FakeFleet) -> list[dict]:
    url = f"{fleet.plan.role('prometheus')[0].url}/api/v1/targets"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["data"]["activeTargets"]
    except OSError:
        return []


def test_prometheus_scrapes_every_process_of_the_fleet(fleet: FakeFleet) -> None:
    until(lambda: phase_of(fleet, "prometheus") == "ready")
    every = {"prefill-0", "decode-0", "router"}
    until(lambda: {each["labels"]["process"] for each in targets(fleet) if each["health"] == "up"} == every)


def test_prometheus_ends_with_the_fleet(fleet: FakeFleet) -> None:
    assert fleet.supervisor
    fleet.supervisor.terminate()
    fleet.wait_for("stopped", "failed")
    assert fleet.everything_gone()
    assert fleet.ports_free()


def test_the_fleet_outlives_prometheus(fleet: FakeFleet) -> None:
    until(lambda: phase_of(fleet, "prometheus") == "ready")
    os.kill(fleet.pid_of("prometheus"), signal.SIGKILL)
    until(lambda: phase_of(fleet, "prometheus") == "died")
    assert fleet.state.phase == "ready"
    assert fleet.state.problem == ""
