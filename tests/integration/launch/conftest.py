from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fake_fleet import FakeFleet, fake_plan


@pytest.fixture
def make_fleet() -> Iterator[Callable[..., FakeFleet]]:
    fleets: list[FakeFleet] = []

    def make(**options: Any) -> FakeFleet:
        fleets.append(FakeFleet(fake_plan(**options)))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.end()
