"""``kvops doctor --pair`` on engines that do not fit together; those that fit are in the tests of each mode."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvops.launch.rundir import FleetState, RunDir
from real_fleet import failed_checks, kvops, write

NAME = "e2e-differs"


async def both_started() -> FleetState:
    """Return the fleet's state once prefill and decode have processes, ready or not."""
    for _ in range(600):
        state = RunDir(NAME).read_state()
        if state and all(process.pid for process in state.processes if process.role != "router"):
            return state
        await asyncio.sleep(0.1)
    raise AssertionError("the engines have not started")


async def test_engines_that_differ_are_told_apart_as_soon_as_they_run(tmp_path: Path) -> None:
    config = "preset: cpu-demo\ndecode:\n  args: ['--dtype=bfloat16', '--block-size', '96', '--kv-cache-dtype=fp8']\n"
    file = write(tmp_path / "kvops.yaml", config)
    up = asyncio.create_task(asyncio.to_thread(kvops, "up", "-d", "-f", file, "--name", NAME, "--force"))
    await both_started()
    found = await asyncio.to_thread(failed_checks, f"{NAME}/prefill-0", f"{NAME}/decode-0")
    await asyncio.to_thread(kvops, "down", "--name", NAME)
    await up
    assert found == {
        "VL-06": "prefill and decode differ in --dtype",
        "VL-08": "prefill and decode differ in KV cache type",
    }
