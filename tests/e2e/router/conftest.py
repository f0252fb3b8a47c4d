"""One fleet a mode for all modules here: starting four engines takes longer than most tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from real_fleet import LooseFleet

FAULTS = ("test_faults", "test_openai_client")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What pull does with a request bidirectional does with every first turn.
    for item in items:
        if item.path.stem in FAULTS and item.path.parent == Path(__file__).parent and "[pull" in item.name:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", params=["pull", "push", "bidirectional"])
def fleet(stage: contextlib.ExitStack, request: pytest.FixtureRequest) -> LooseFleet:
    stage.close()
    fleet = LooseFleet(request.param)
    stage.callback(fleet.end)
    asyncio.run(fleet.start())
    return fleet


@pytest.fixture(autouse=True)
async def _no_engine_dies(fleet: LooseFleet) -> AsyncIterator[None]:
    yield
    assert fleet.dead() == []
    for engine in fleet.plan.engines:
        await fleet.until_healthy(engine.name)
