"""The delay of NIXL's progress thread."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvops_connectors.progress import progress_delay


@pytest.fixture
def agent_class(monkeypatch: pytest.MonkeyPatch) -> type:
    """An agent like NIXL's own, which sets the delay to 0 and then makes the native agent with it."""
    api = ModuleType("fake_nixl_api")
    api.nixlBind = SimpleNamespace(nixlAgent=lambda name, config: (name, config.pthrDelay))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_nixl_api", api)

    class Agent:
        def __init__(self) -> None:
            self.agent: Any = api.nixlBind.nixlAgent("a", SimpleNamespace(pthrDelay=0))

    Agent.__module__ = "fake_nixl_api"
    return Agent


def test_an_agent_made_inside_the_block_sleeps(agent_class: type) -> None:
    with progress_delay(agent_class, 10_000):
        assert agent_class().agent == ("a", 10_000)


def test_an_agent_made_after_the_block_is_as_nixl_makes_it(agent_class: type) -> None:
    with pytest.raises(RuntimeError), progress_delay(agent_class, 10_000):
        raise RuntimeError
    assert agent_class().agent == ("a", 0)


def test_no_delay_changes_nothing(agent_class: type) -> None:
    with progress_delay(agent_class, 0):
        assert agent_class().agent == ("a", 0)


@pytest.mark.parametrize("agent_class", [None, int])
def test_another_nixl_is_left_alone(agent_class: Any, caplog: pytest.LogCaptureFixture) -> None:
    with progress_delay(agent_class, 10_000):
        pass
    assert "no progress delay" in caplog.text
