"""The probe as a check: its verdict is the finding, and not having run is not a failure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from doctor_hosts import p5en

from kvops.doctor.active import bytes_move
from kvops.doctor.check import State
from kvops.doctor.facts import Facts
from kvops.doctor.host import LiveHost
from kvops.doctor.probe import run as probe_run
from kvops.doctor.probe.errors import ProbeTroubleError
from kvops.doctor.run import evaluate
from kvops.errors import KvopsError


def answer(monkeypatch: pytest.MonkeyPatch, outcome: object) -> list[probe_run.Settings]:
    """Let the probe end so; return the settings that it was started with."""
    asked: list[probe_run.Settings] = []

    def probe_pair(settings: probe_run.Settings, show: object) -> object:
        asked.append(settings)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(probe_run, "probe_pair", probe_pair)
    return asked


def report(state: str) -> SimpleNamespace:
    verdict = SimpleNamespace(state=state, headline="1.2 GB/s over shared memory")
    return SimpleNamespace(verdict=verdict, evidence=SimpleNamespace(route="shared_memory"), moved_bytes=402_653_184)


@pytest.mark.parametrize("state", ["PASS", "WARN", "FAIL"])
def test_the_verdict_is_the_finding(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    answer(monkeypatch, report(state))
    found = evaluate(bytes_move, Facts(LiveHost()))
    assert found.state is State(state.lower())
    assert found.message == "1.2 GB/s over shared memory"
    assert "shared_memory, 402653184 bytes" in found.evidence


def test_a_probe_that_found_trouble_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, ProbeTroubleError("bytes were wrong", "look at the backend"))
    found = evaluate(bytes_move, Facts(LiveHost()))
    assert found.state is State.FAIL
    assert "bytes were wrong" in found.message


def test_a_probe_that_could_not_run_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, KvopsError("NIXL is not installed", "pip install nixl"))
    found = evaluate(bytes_move, Facts(LiveHost()))
    assert found.state is State.UNKNOWN
    assert "NIXL is not installed" in found.message


def test_a_captured_machine_moves_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, report("PASS"))
    assert evaluate(bytes_move, Facts(p5en().host())).state is State.SKIP
    assert asked == []


def test_the_probe_uses_the_backend_of_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, report("PASS"))
    engines = Facts(p5en().host()).kv_engines
    evaluate(bytes_move, Facts(LiveHost(), planned=engines))
    assert asked[0].backend == "LIBFABRIC"
