"""One scene of the scripted hour under a real Prometheus: what fires, and what the dashboards show of it."""

from __future__ import annotations

import contextlib

import pytest

import scripted_hour
from kvops_dashboards.checking import Answer

SCENE = "push"

pytestmark = [pytest.mark.slow, pytest.mark.system("prometheus"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def played(
    stage: contextlib.ExitStack, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], dict[str, list[Answer]]]:
    stage.close()
    wrong, answers = scripted_hour.play_scene(tmp_path_factory.mktemp("hour"), SCENE)
    boards: dict[str, list[Answer]] = {}
    for answer in answers:
        boards.setdefault(answer.source.removeprefix("kvops / "), []).append(answer)
    return wrong, boards


def test_the_alerts_that_should_fire_do_and_no_others(played: tuple[list[str], dict[str, list[Answer]]]) -> None:
    assert played[0] == []


def test_every_query_is_understood(played: tuple[list[str], dict[str, list[Answer]]]) -> None:
    assert [answer for answers in played[1].values() for answer in answers if answer.state == "error"] == []


def test_every_panel_about_push_has_data(played: tuple[list[str], dict[str, list[Answer]]]) -> None:
    assert scripted_hour.empty(played[1]["Push"]) == []
