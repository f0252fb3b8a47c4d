"""The router follows headless services: what DNS says now is what it sends to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from fake_engine import FakeEngine
from kvops.router.app import make_router
from kvops.router.endpoints import Sources
from kvops.router.settings import Settings
from ports import free_port
from scripted_engines import wait_until


class Dns:
    """Answers for ``*.kvops.svc`` with what the cluster's DNS would say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.records = {"prefill.kvops.svc": ["10.0.0.1"], "decode.kvops.svc": ["10.0.0.2", "10.0.0.3"]}
        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", self._answer)

    async def _answer(self, host: str, port: int, **__: Any) -> list[Any]:
        if not self.records[host]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.records[host]]


SPECS = {"prefill": ["dns+http://prefill.kvops.svc:8100"], "decode": ["dns+http://decode.kvops.svc:8100"]}


async def resolved(role: Any) -> list[str]:
    return [endpoint.url for endpoint in await Sources(SPECS).resolve(role)]  # type: ignore[arg-type]


async def test_an_engine_that_is_ready_is_found_and_one_that_ends_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    dns = Dns(monkeypatch)
    assert await resolved("decode") == ["http://10.0.0.2:8100", "http://10.0.0.3:8100"]
    dns.records["decode.kvops.svc"] = ["10.0.0.3", "10.0.0.4"]
    assert await resolved("decode") == ["http://10.0.0.3:8100", "http://10.0.0.4:8100"]


async def test_a_service_without_a_ready_pod_is_an_error_that_the_router_outlives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dns = Dns(monkeypatch)
    dns.records["decode.kvops.svc"] = []
    with pytest.raises(OSError, match="not known"):
        await resolved("decode")


async def test_what_stays_keeps_its_state_and_handles_of_what_goes_are_void(monkeypatch: pytest.MonkeyPatch) -> None:
    dns = Dns(monkeypatch)
    router = make_router(Sources(SPECS), Settings())
    await router.refresh()
    gone, stays = router.decode.endpoints
    generation = gone.generation
    dns.records["decode.kvops.svc"] = ["10.0.0.3"]
    await router.refresh()
    assert router.decode.endpoints == [stays]
    assert gone.generation != generation


async def test_a_router_that_is_told_to_end_finishes_what_it_serves() -> None:
    engines = {role: FakeEngine(role) for role in ("prefill", "decode")}
    engines["decode"].stall.clear()
    servers = {role: TestServer(engine.app()) for role, engine in engines.items()}
    for server in servers.values():
        await server.start_server()
    port = free_port()
    argv = [arg for role, server in servers.items() for arg in (f"--{role}", str(server.make_url("")).rstrip("/"))]
    router = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvops.cli.main", "router", *argv, "--port", str(port),
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    async with aiohttp.ClientSession() as client:
        await wait_until_ready(client, f"http://127.0.0.1:{port}/readyz")
        request = asyncio.create_task(
            client.post(f"http://127.0.0.1:{port}/v1/completions", json={"model": "kvops-tiny", "prompt": "hi"})
        )
        await wait_until(lambda: engines["decode"].requests)
        router.terminate()
        await wait_until(lambda: not accepts(port))
        engines["decode"].stall.set()
        answer = await request
        assert (answer.status, await router.wait()) == (200, 0)
    for server in servers.values():
        await server.close()


async def wait_until_ready(client: aiohttp.ClientSession, url: str) -> None:
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with client.get(url) as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.05)


def accepts(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
