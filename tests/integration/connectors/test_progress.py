"""The delay of NIXL's progress thread, on a real agent."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: the threads of other tests' agents would count.
IDLE_AGENT = """
import sys, time
from nixl._api import nixl_agent, nixl_agent_config
from kvops_connectors.progress import progress_delay
with progress_delay(nixl_agent, int(sys.argv[1])):
    agent = nixl_agent("idle", nixl_agent_config(num_threads=4))
before = time.process_time()
time.sleep(1)
print(time.process_time() - before)
"""


def idle_cpu_seconds(delay_microseconds: int) -> float:
    """Return the CPU time that a process spends while its idle agent lives for a second."""
    command = [sys.executable, "-c", IDLE_AGENT, str(delay_microseconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return float(done.stdout.splitlines()[-1])


def test_an_idle_agent_with_a_delay_leaves_the_cpu_to_others() -> None:
    assert idle_cpu_seconds(10_000) < idle_cpu_seconds(0) / 4
