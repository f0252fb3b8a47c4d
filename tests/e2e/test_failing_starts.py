from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from pathlib import Path

import pytest

from kvops.launch.processes import pids_of_run
from kvops.launch.rundir import RunDir
from real_fleet import kill, kvops, write


@pytest.fixture(autouse=True, scope="module")
def _alone(stage: contextlib.ExitStack) -> None:
    stage.close()


def test_a_prefill_that_fails_to_start_is_explained(tmp_path: Path) -> None:
    file = write(tmp_path / "kvops.yaml", "preset: cpu-demo\nmodel: /nonexistent/model\n")
    result = kvops("up", "-f", file, "--name", "e2e-fails")
    assert result.returncode == 1
    assert "exited with status 1\nthere is no model at /nonexistent/model" in result.stderr


async def test_a_prefill_killed_while_starting_ends_the_fleet() -> None:
    up = asyncio.create_task(asyncio.to_thread(kvops, "up", "-d", "--preset", "cpu-demo", "--name", "e2e-killed"))
    state = None
    for _ in range(300):
        state = RunDir("e2e-killed").read_state()
        if state and state.processes[0].pid:
            break
        await asyncio.sleep(0.1)
    assert state
    await asyncio.sleep(3)
    kill(state.processes[0].pid, signal.SIGKILL)
    result = await up
    assert (result.returncode, "prefill-0 was killed by SIGKILL" in result.stderr) == (1, True)
    assert pids_of_run(state.run_id) == []


def test_an_occupied_port_is_named_and_nothing_is_started(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        file = write(tmp_path / "kvops.yaml", f"preset: cpu-demo\ndecode:\n  port: {port}\n")
        result = kvops("up", "-f", file, "--name", "e2e-port")
    assert (result.returncode, f"port {port} for decode-0 is in use" in result.stderr) == (2, True)


def test_engines_that_refuse_each_other_fail_the_canary_with_the_cause(tmp_path: Path) -> None:
    push = '{"kv_connector":"NixlPushConnector","kv_role":"kv_consumer","kv_buffer_device":"cpu"}'
    file = write(tmp_path / "kvops.yaml", f"preset: cpu-demo\ndecode:\n  args: ['--kv-transfer-config={push}']\n")
    refused = kvops("up", "-d", "-f", file, "--name", "e2e-mismatch")
    assert (refused.returncode, "VL-12: prefill and decode differ in transfer mode" in refused.stderr) == (2, True)
    result = kvops("up", "-d", "-f", file, "--name", "e2e-mismatch", "--force")
    kvops("down", "--name", "e2e-mismatch")
    assert result.returncode == 1
    assert "prefill and decode refuse each other's KV" in result.stderr
