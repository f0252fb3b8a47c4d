"""vLLM's own connectors, to compare with: the launcher frees their engines from the one core that they pin themselves to."""

from __future__ import annotations

import os

import psutil
import pytest

from kvops.launch.processes import pids_of_run
from real_fleet import COMPLETIONS, Fleet, Up, completion, kvops, text_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fleet(up: Up) -> Fleet:
    return up("e2e-stock", "--mode", "push", "--stock-connectors")


def test_no_engine_is_left_on_one_core(fleet: Fleet) -> None:
    cores = {pid: os.sched_getaffinity(pid) for pid in pids_of_run(fleet.state.run_id)}
    assert len(cores) > 4
    assert set(map(frozenset, cores.values())) == {frozenset(os.sched_getaffinity(0))}


async def test_every_prompt_token_comes_from_prefill_and_the_answer_is_right(fleet: Fleet) -> None:
    request = completion()
    _, alone = await fleet.post(COMPLETIONS, request, "prefill-0")
    before = await fleet.transferred_tokens()
    _, routed = await fleet.post(COMPLETIONS, request)
    assert text_of(routed) == text_of(alone)
    assert await fleet.transferred_tokens() - before == alone["usage"]["prompt_tokens"]


def test_down_ends_every_process_within_its_time(fleet: Fleet) -> None:
    run_id = fleet.state.run_id
    ports = {process.port for process in fleet.plan.processes}
    assert kvops("down", "--name", fleet.name).returncode == 0
    assert pids_of_run(run_id) == []
    listening = [each.laddr.port for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert not ports & set(listening)
