from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from doctor_cases import BY_ID, PASS, UNKNOWN, Case, scene_of
from doctor_tables import CASES, GONE

from kvops.doctor.check import State

if TYPE_CHECKING:
    from kvops.doctor.check import Check


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_broken_host_is_noticed(case: Case) -> None:
    case.judge()


@pytest.mark.parametrize("check_id", BY_ID)
def test_a_healthy_host_passes(check_id: str) -> None:
    found = scene_of(check_id)().find(check_id)
    assert found.state is PASS, found


@pytest.mark.parametrize("check_id", GONE)
def test_missing_evidence_is_unknown(check_id: str) -> None:
    scene = scene_of(check_id)()
    scene.host.without(*GONE[check_id])
    found = scene.find(check_id)
    assert found.state is UNKNOWN, found


def test_every_check_has_a_broken_and_an_uncaptured_case() -> None:
    assert {case.check_id for case in CASES} == set(BY_ID)
    assert set(GONE) == set(BY_ID)


@pytest.mark.parametrize("check", BY_ID.values(), ids=lambda check: check.id)
def test_every_state_that_a_rule_names_has_a_case(check: Check) -> None:
    named = {State(word.lower()) for word in re.findall(r"\b(?:FAIL|WARN)\b", check.rule)}
    assert named <= {case.state for case in CASES if case.check_id == check.id}
