"""Giving back KV blocks that nobody will read.

vLLM frees the blocks that one engine holds for another when the reader says that it has them, or when their time is
up: 30 s on P, minutes on D. There is no request "free these". But an engine that refuses a request which carries a
handle tells the holder to free the blocks, so a request that must be refused does it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import TYPE_CHECKING

import aiohttp

from kvops.router import bodies, handles
from kvops.router.handles import Context

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kvops.router.engines import Engines
    from kvops.router.handles import Handle
    from kvops.router.pool import Endpoint

log = logging.getLogger(__name__)

_RELEASE_SECONDS = 10.0
_CLOSE_SECONDS = 2.0
_READERS_TRIED = 3
# Releases are a courtesy: when so many are under way, the blocks are left to their time.
_MOST_AT_ONCE = 64


class Releases:
    """Sends releases beside the requests, and keeps other work that must outlive its request."""

    def __init__(self, engines: Engines) -> None:
        """Keep the client to the engines."""
        self._engines = engines
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[None, None, None]) -> None:
        """Let ``work`` run to its end beside the request that began it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def release(self, handle: Handle, holder: Endpoint, reason: str, *, authorization: str | None = None) -> None:
        """Have ``holder`` free the blocks of ``handle``; returns at once.

        Args:
            handle: what nobody will read.
            holder: the engine that it came from.
            reason: client_gone, not_sent, no_conversation, replaced or evicted.
            authorization: the client's, for engines that want one.
        """
        if len(self._tasks) >= _MOST_AT_ONCE:
            self._engines.metrics.count("kvops_router_releases_total", reason, "skipped")
            return
        self.run(self._release(handle, holder, reason, authorization))

    async def close(self) -> None:
        """End what is under way, after a moment for what is nearly done."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_SECONDS)
        for task in self._tasks:
            task.cancel()

    async def _release(self, handle: Handle, holder: Endpoint, reason: str, authorization: str | None) -> None:
        pool = self._engines.decode if holder.role == "prefill" else self._engines.prefill
        able = [endpoint for endpoint in pool.endpoints if endpoint.takes_requests() or endpoint.state == "draining"]
        context = Context(f"release-{uuid.uuid4().hex}", attempt=1)
        content = bodies.encode(bodies.release_body(handles.for_release(handle, context)))
        headers = {"Content-Type": "application/json", "X-Request-Id": context.router_id}
        if authorization:
            headers["Authorization"] = authorization
        outcome = "failed"
        for reader in sorted(able, key=lambda endpoint: endpoint.load)[:_READERS_TRIED]:
            outcome = await self._send(reader, content, headers)
            if outcome != "failed":
                break
        self._engines.metrics.count("kvops_router_releases_total", reason, outcome)

    async def _send(self, reader: Endpoint, content: bytes, headers: dict[str, str]) -> str:
        if reader.rank is not None:
            headers = headers | {"X-data-parallel-rank": str(reader.rank)}
        try:
            async with (
                asyncio.timeout(_RELEASE_SECONDS),
                self._engines.session.post(f"{reader.url}/v1/completions", data=content, headers=headers) as answer,
            ):
                await answer.read()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            log.warning("%s could not be used to give blocks back: %s %s", reader.name, type(error).__name__, error)
            return "failed"
        return "sent" if answer.status == 404 else "unexpected"
