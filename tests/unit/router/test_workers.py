"""Several workers on one port, as real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from ports import free_port
from scripted_engines import FakeEngine, FakeFleet, wait_until

pytestmark = pytest.mark.heavy
WORKERS = 3


@dataclass
class Running:
    """A router with several workers, in front of scripted engines."""

    fleet: FakeFleet
    prefill: FakeEngine
    decode: FakeEngine
    process: asyncio.subprocess.Process
    port: int
    admin_port: int

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    async def ask(self, **body: Any) -> tuple[int, Any]:
        """Return status and body of a request over a new connection, which the kernel gives to any worker."""
        headers = {"X-Conversation-ID": body.pop("conversation")} if "conversation" in body else {}
        async with (
            aiohttp.ClientSession() as client,
            client.post(
                f"http://127.0.0.1:{self.port}/v1/completions",
                json={"model": "tiny", "prompt": "hi"} | body,
                headers=headers,
            ) as answer,
        ):
            return answer.status, await answer.json()

    async def get(self, path: str, port: int | None = None) -> str:
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"http://127.0.0.1:{port or self.port}{path}") as answer,
        ):
            return await answer.text()

    async def admin(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as client,
            client.request(method, f"http://127.0.0.1:{self.admin_port}{path}", **options) as answer,
        ):
            return answer.status, await answer.json()

    async def sample(self, name: str) -> float:
        """Return the sum of a metric's samples in one scrape."""
        lines = (await self.get("/metrics")).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)

    async def all_serve(self) -> None:
        for _ in range(600):
            try:
                _, engines = await self.admin("GET", "/endpoints")
                answers = [await self.get("/readyz") for _ in range(4 * WORKERS)]
            except aiohttp.ClientConnectionError:
                answers = []
            if answers and all('"prefill":' in answer for answer in answers) and engines:
                return
            await asyncio.sleep(0.1)
        raise AssertionError("the workers do not come up")


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def begin(mode: str = "pull", *more: str) -> Running:
            fleet = FakeFleet(mode=mode)
            engines = [FakeEngine(fleet, role, f"{role}-0") for role in ("prefill", "decode")]
            for engine in engines:
                await engine.start()
                stack.push_async_callback(engine.stop)
            port, admin_port = free_port(), free_port()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvops.cli.main", "router", "--mode", mode, "--workers", str(WORKERS)),
                *("--prefill", engines[0].url, "--decode", engines[1].url, "--journal", str(tmp_path / "router.jsonl")),
                *("--port", str(port), "--admin-port", str(admin_port), *more),
            )
            stack.push_async_callback(end, process)
            running = Running(fleet, engines[0], engines[1], process, port, admin_port)
            await running.all_serve()
            return running

        yield begin


async def end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        await process.wait()


async def test_a_handle_is_found_by_whichever_worker_serves_the_next_turn_and_used_once(start):
    running = await start("bidirectional")
    for _ in range(12):
        assert (await running.ask(conversation="one"))[0] == 200
    assert await running.sample("kvops_router_handles_total") == 12
    lines = (await running.get("/metrics")).splitlines()
    hits = [line for line in lines if line.startswith('kvops_router_handles_total{outcome="hit"}')]
    assert [float(line.rpartition(" ")[2]) for line in hits] == [11]
    assert await running.sample("kvops_router_conversations") == 1


async def test_turns_of_one_conversation_at_the_same_time_share_no_handle(start):
    running = await start("bidirectional")
    assert (await running.ask(conversation="one"))[0] == 200
    answers = await asyncio.gather(*(running.ask(conversation="one") for _ in range(6)))
    assert {status for status, _ in answers} == {200}
    given = [
        call.body["kv_transfer_params"].get("remote_request_id")
        for call in running.prefill.served()
        if call.body["kv_transfer_params"].get("remote_block_ids")
    ]
    assert len(given) == len(set(given))


async def test_one_scrape_has_the_requests_of_all_workers(start):
    running = await start()
    for _ in range(20):
        assert (await running.ask())[0] == 200
    assert await running.sample("kvops_router_requests_total") == 20
    assert await running.sample("kvops_router_request_seconds_count") == 20


async def test_what_the_admin_api_does_reaches_every_worker(start):
    running = await start()
    name = running.decode.url
    assert (await running.admin("POST", f"/endpoints/drain?role=decode&name={name}"))[1]["state"] == "draining"
    assert {(await running.ask())[0] for _ in range(12)} == {503}
    assert (await running.admin("POST", f"/endpoints/undrain?role=decode&name={name}"))[1]["state"] == "up"
    assert {(await running.ask())[0] for _ in range(12)} == {200}
    more = FakeEngine(running.fleet, "decode", "decode-1")
    await more.start()
    status, engines = await running.admin("POST", "/endpoints", json={"role": "decode", "url": more.url})
    assert (status, len(engines)) == (201, 3)
    status, engines = await running.admin("DELETE", f"/endpoints?role=decode&url={name}")
    assert (status, len(engines)) == (200, 2)
    before = len(running.decode.served())
    assert {(await running.ask())[0] for _ in range(12)} == {200}
    assert len(running.decode.served()) == before
    await more.stop()


async def test_a_worker_that_dies_is_replaced_and_its_counts_stay(start):
    running = await start()
    for _ in range(12):
        assert (await running.ask())[0] == 200
    assert await running.sample("kvops_router_requests_total") == 12
    name = running.decode.url
    await running.admin("POST", f"/endpoints/drain?role=decode&name={name}")
    victim = running.workers()[0]
    os.kill(victim.pid, signal.SIGKILL)
    await wait_until(lambda: len([w for w in running.workers() if w.pid != victim.pid]) == WORKERS)
    # The successor knows what the admin API did before its time.
    assert {(await running.ask())[0] for _ in range(12)} == {503}
    await running.admin("POST", f"/endpoints/undrain?role=decode&name={name}")
    assert {(await running.ask())[0] for _ in range(12)} == {200}
    assert await running.sample("kvops_router_requests_total") == 36


async def test_a_stream_under_way_ends_well_when_the_router_is_stopped(start):
    running = await start()
    running.decode.script.append("sleep:1.0")
    asking = asyncio.create_task(running.ask())
    await wait_until(lambda: bool(running.decode.calls))
    running.process.terminate()
    assert (await asking)[0] == 200
    assert await running.process.wait() == 0
    with pytest.raises(aiohttp.ClientConnectionError):
        await running.ask()


async def test_no_worker_outlives_a_router_that_is_killed(start):
    running = await start()
    workers = running.workers()
    running.process.kill()
    await running.process.wait()
    await wait_until(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers))


async def test_a_second_router_at_the_same_port_is_refused(start):
    running = await start()
    engines = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1")
    second = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvops.cli.main", "router", "--workers", "2", *engines, "--port", str(running.port)),
        stderr=asyncio.subprocess.PIPE,
    )
    _, text = await second.communicate()
    assert second.returncode == 2
    assert b"cannot listen" in text
