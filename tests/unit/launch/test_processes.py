from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvops.launch.processes import RUN_ID_VARIABLE, unpin

RUN_ID = "unpinned"
PINNED_THREADS = """
import os, threading
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(flush=True)
threading.Event().wait()
"""


@pytest.fixture
def pinned() -> Iterator[int]:
    """Yield a process of the run whose two threads may use one core only."""
    with subprocess.Popen(
        [sys.executable, "-c", PINNED_THREADS], env=os.environ | {RUN_ID_VARIABLE: RUN_ID}, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.readline()
        yield process.pid
        process.kill()


def cores_of_threads(pid: int) -> list[set[int]]:
    return [os.sched_getaffinity(int(thread.name)) for thread in Path(f"/proc/{pid}/task").iterdir()]


def test_every_thread_of_a_run_is_freed(pinned: int) -> None:
    unpin(RUN_ID)
    assert cores_of_threads(pinned) == [os.sched_getaffinity(0)] * 2


def test_another_runs_threads_stay_pinned(pinned: int) -> None:
    unpin("another")
    assert cores_of_threads(pinned) == [{min(os.sched_getaffinity(0))}] * 2
