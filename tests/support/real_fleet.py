"""A fleet of real vLLM engines on the CPU, brought up the way a user does: ``kvops up -d``."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from kvops.launch.canary import make_prompt
from kvops.launch.plan import Plan, Process
from kvops.launch.rundir import FleetState, RunDir
from kvops.metrics_text import Samples

BLOCK_TOKENS = 32
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# A start takes a minute on two idle cores; CI machines are neither always idle nor always fast.
UP_TIMEOUT_SECONDS = 600


def kvops(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvops.cli.main", *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=UP_TIMEOUT_SECONDS,
    )


class Fleet:
    """A fleet that is up."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.run_dir = RunDir(name)
        self.plan: Plan = self.run_dir.read_plan()

    @property
    def state(self) -> FleetState:
        state = self.run_dir.read_state()
        assert state
        return state

    def process(self, name: str) -> Process:
        return next(process for process in self.plan.processes if process.name == name)

    async def post(self, path: str, body: dict[str, Any], server: str = "router") -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as client,
            client.post(self.process(server).url + path, json={"model": "kvops-tiny"} | body) as answer,
        ):
            return answer.status, await answer.json()

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a streamed answer; the last must be ``[DONE]``."""
        body = {"model": "kvops-tiny", "stream": True} | body
        async with (
            aiohttp.ClientSession() as client,
            client.post(self.process("router").url + path, json=body) as answer,
        ):
            events = [event.removeprefix("data: ") for event in (await answer.text()).strip().split("\n\n")]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    async def metrics(self, name: str) -> Samples:
        async with (
            aiohttp.ClientSession() as client,
            client.get(self.process(name).url + "/metrics") as answer,
        ):
            return Samples(await answer.text())

    async def transferred_tokens(self) -> float:
        """Return the prompt tokens that all decode engines took from prefill so far."""
        scrapes = [await self.metrics(engine.name) for engine in self.plan.role("decode")]
        return sum(
            scrape.total("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") for scrape in scrapes
        )


Up = Callable[..., Fleet]


def kill(pid: int | None, number: int) -> None:
    assert pid
    os.kill(pid, number)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": make_prompt(), "max_tokens": 16, "temperature": 0, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": make_prompt()}]
    return {"messages": messages, "max_tokens": 16, "temperature": 0, **fields}


async def held_blocks_share(fleet: Fleet, *names: str) -> float:
    """Return the largest share of KV blocks that one of the engines holds once all have let go, or after 10 s."""
    for _ in range(100):
        usage = [(await fleet.metrics(name)).total("vllm:kv_cache_usage_perc") for name in names]
        if not any(usage):
            break
        await asyncio.sleep(0.1)
    return max(usage)


def text_of(answer: dict[str, Any]) -> str:
    return texts_of(answer)[0]


def texts_of(answer: dict[str, Any]) -> list[str]:
    assert "choices" in answer, answer
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in answer["choices"]]


def delta_of(event: dict[str, Any]) -> str:
    if not event["choices"]:
        return ""
    choice = event["choices"][0]
    text: str = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
    return text


async def served(fleet: Fleet, name: str) -> float:
    return (await fleet.metrics(name)).total("vllm:request_success_total")


def failed_checks(prefill: str, decode: str) -> dict[str, str]:
    """Return what ``kvops doctor --pair`` says of each check that fails for two running engines."""
    result = kvops("doctor", "--pair", prefill, decode, "--json")
    report = json.loads(result.stdout)
    found = {entry["id"]: entry["message"] for entry in report["findings"] if entry["state"] == "fail"}
    assert result.returncode == bool(found)
    assert {"VL-06", "VL-08", "VL-12"} <= {e["id"] for e in report["findings"] if e["state"] in ("pass", "fail")}
    return found
