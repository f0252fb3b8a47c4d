from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvops.router.admin import make_admin_app
from kvops.router.app import listen, make_router, served
from kvops.router.endpoints import Sources
from kvops.router.settings import Settings
from kvops.router.state import Router
from scripted_engines import FakeEngine, FakeFleet


@dataclass
class Setup:
    """A router in front of fake engines, and a client."""

    fleet: FakeFleet
    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    router: Router
    client: aiohttp.ClientSession
    url: str
    admin_url: str
    admin: web.Application
    stack: AsyncExitStack = field(repr=False, default_factory=AsyncExitStack)

    def ask(self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any) -> Any:
        """Return the client's request, to be entered as a context."""
        prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
        return self.client.post(self.url + path, json={"model": "tiny"} | prompt | body, headers=headers)

    def admin_routes(self) -> Any:
        return self.admin.router.routes()

    def metric(self, name: str, **labels: str) -> float:
        return self.router.metrics.registry.get_sample_value(name, labels) or 0.0


Start = Callable[..., Awaitable[Setup]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Return a function that starts a router in a mode in front of P prefill and D decode engines."""
    async with AsyncExitStack() as stack:

        async def begin(mode: str = "pull", **options: Any) -> Setup:
            return await bring_up(stack, mode, **options)

        yield begin


@pytest.fixture(scope="module")
def event_loop_setup() -> Iterator[tuple[asyncio.AbstractEventLoop, Setup]]:
    """Return a loop and a router that runs on it, for tests that are called many times over."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        yield runner.get_loop(), runner.run(bring_up(stack, "pull"))
        runner.run(stack.aclose())


async def bring_up(stack: AsyncExitStack, mode: str, *, prefill: int = 1, decode: int = 1, **settings: Any) -> Setup:
    fleet = FakeFleet(mode=mode)
    engines = {
        role: [FakeEngine(fleet, role, f"{role}-{index}") for index in range(count)]
        for role, count in (("prefill", prefill), ("decode", decode))
    }
    for engine in fleet.engines:
        await engine.start()
        stack.push_async_callback(engine.stop)
    given = {role: [engine.url for engine in of_role] for role, of_role in engines.items()}
    router = make_router(Sources(given), Settings(mode=mode, **({"probe_seconds": 0.05} | settings)))  # type: ignore[arg-type]
    (listener,) = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    await stack.enter_async_context(served(router, listener))
    admin_app = make_admin_app(router)
    admin = await _serve(stack, admin_app)
    client = await stack.enter_async_context(aiohttp.ClientSession())
    return Setup(
        fleet=fleet,
        prefill=engines["prefill"],
        decode=engines["decode"],
        router=router,
        client=client,
        url=url,
        admin_url=str(admin.make_url("")).rstrip("/"),
        admin=admin_app,
    )


async def _serve(stack: AsyncExitStack, app: web.Application) -> TestServer:
    server = TestServer(app)
    await server.start_server(shutdown_timeout=0.1)
    stack.push_async_callback(server.close)
    return server
