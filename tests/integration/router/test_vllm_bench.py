"""vLLM's own load generator, as it is, through the router."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from kvops import tiny_model
from kvops.router.app import listen, make_router, served
from kvops.router.endpoints import Sources
from kvops.router.settings import ModeName, Settings
from scripted_engines import FakeEngine, FakeFleet

# The command `vllm bench serve`, without the `vllm` script, which does not start in vLLM's CPU build.
_BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.mark.heavy
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["pull", "push", "bidirectional"])
async def test_vllm_bench_serve_completes_every_request(tmp_path: Path, mode: ModeName) -> None:
    model = tiny_model.ensure_model(tmp_path / "model")
    fleet = FakeFleet(mode=mode)
    engines = [FakeEngine(fleet, role, role) for role in ("prefill", "decode")]
    for engine in engines:
        await engine.start()
    router = make_router(Sources({"prefill": [engines[0].url], "decode": [engines[1].url]}), Settings(mode=mode))
    (listener,) = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with served(router, listener):
        result = await bench(port, model, tmp_path / "result.json")
    for engine in engines:
        await engine.stop()
    assert (result["completed"], result["failed"]) == (40, 0)
    assert result["median_ttft_ms"] > 0
    assert fleet.held == {}


async def bench(port: int, model: Path, file: Path) -> dict[str, float]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _BENCH_SERVE, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--base-url", f"http://127.0.0.1:{port}", "--model", "tiny", "--tokenizer", str(model)),
        *("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "8"),
        *("--num-prompts", "40", "--max-concurrency", "8", "--save-result", "--result-filename", str(file)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    text, _ = await process.communicate()
    assert process.returncode == 0, text.decode()[-3000:]
    found: dict[str, float] = json.loads(await asyncio.to_thread(file.read_text))
    return found
