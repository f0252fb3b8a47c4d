from __future__ import annotations

import psutil
import pytest

from kvops.launch.processes import pids_of_run
from real_fleet import (
    CHAT,
    COMPLETIONS,
    Fleet,
    Up,
    chat,
    completion,
    kvops,
    served,
    text_of,
)


@pytest.fixture(scope="module")
def fleet(up: Up) -> Fleet:
    return up("e2e-2p1d", "--prefill", "2", "--stock-connectors")


async def test_both_prefills_work_and_answers_are_right(fleet: Fleet) -> None:
    before = [await served(fleet, name) for name in ("prefill-0", "prefill-1")]
    requests = [chat() for _ in range(6)]
    routed = [await fleet.post(CHAT, request) for request in requests]
    after = [await served(fleet, name) for name in ("prefill-0", "prefill-1")]
    assert [late - early for late, early in zip(after, before, strict=True)] == [3, 3]
    for request, (_, answer) in zip(requests, routed, strict=True):
        _, alone = await fleet.post(CHAT, request, "prefill-1")
        assert text_of(answer) == text_of(alone)


async def test_every_prompt_token_came_from_prefill(fleet: Fleet) -> None:
    before = await fleet.transferred_tokens()
    events = await fleet.stream(COMPLETIONS, completion(stream_options={"include_usage": True}))
    assert await fleet.transferred_tokens() - before == events[-1]["usage"]["prompt_tokens"]


async def test_down_ends_every_process_within_its_time(fleet: Fleet) -> None:
    run_id = fleet.state.run_id
    ports = {process.port for process in fleet.plan.processes}
    assert kvops("down", "--name", fleet.name).returncode == 0
    assert pids_of_run(run_id) == []
    listening = [each.laddr.port for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert not ports & set(listening)
