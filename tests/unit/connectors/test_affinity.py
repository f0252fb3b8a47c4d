"""A CPU engine that asks for no pinning keeps its cores."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvops_connectors.affinity import kept_affinity

CORES = os.sched_getaffinity(0)
ONE_CORE = {max(CORES)}

pytestmark = pytest.mark.usefixtures("unpinned_afterwards")


@pytest.fixture
def unpinned_afterwards() -> Iterator[None]:
    yield
    os.sched_setaffinity(0, CORES)


@pytest.fixture
def nobind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.mark.usefixtures("nobind")
def test_a_pinning_is_undone() -> None:
    with kept_affinity(wanted=True):
        os.sched_setaffinity(0, ONE_CORE)
    assert os.sched_getaffinity(0) == CORES


@pytest.mark.usefixtures("nobind")
def test_a_pinning_stays_where_the_mend_is_off() -> None:
    with kept_affinity(wanted=False):
        os.sched_setaffinity(0, ONE_CORE)
    assert os.sched_getaffinity(0) == ONE_CORE


def test_a_pinning_stays_where_the_engine_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    with kept_affinity(wanted=True):
        os.sched_setaffinity(0, ONE_CORE)
    assert os.sched_getaffinity(0) == ONE_CORE
