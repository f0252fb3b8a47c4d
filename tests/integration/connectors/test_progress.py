"""The delay of NIXL's progress thread, on a real agent."""

from __future__ import annotations

import time
import uuid

from nixl._api import nixl_agent, nixl_agent_config

from kvops_connectors.progress import progress_delay


def idle_cpu_seconds(delay_microseconds: int) -> float:
    """Return the CPU time that this process spends while an idle agent lives for a second."""
    with progress_delay(nixl_agent, delay_microseconds):
        agent = nixl_agent(uuid.uuid4().hex, nixl_agent_config(num_threads=4))
    before = time.process_time()
    time.sleep(1)
    spent = time.process_time() - before
    del agent
    return spent


def test_an_idle_agent_with_a_delay_leaves_the_cpu_to_others() -> None:
    assert idle_cpu_seconds(10_000) < idle_cpu_seconds(0) / 4
