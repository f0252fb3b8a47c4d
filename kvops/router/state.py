"""What the handlers of the public and of the admin port share."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from kvops.router.endpoints import EndpointError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvops.router.endpoints import Sources
    from kvops.router.engines import Engines
    from kvops.router.journal import Journal, Record
    from kvops.router.metrics import RouterMetrics
    from kvops.router.pool import Endpoint, Pool, Role
    from kvops.router.serving import Mode
    from kvops.router.settings import Settings
    from kvops.router.shared import Shared


log = logging.getLogger(__name__)

_FOLLOW_SECONDS = 5.0


class EndpointView(msgspec.Struct):
    """An engine as the admin API shows it."""

    name: str
    role: Literal["prefill", "decode"]
    state: str
    in_flight: int
    waiting: int
    kv_usage: float
    generation: int
    transfer_mode: str | None
    engine_id: str | None


class Router:
    """One router.

    Attributes:
        ready: set once the engines are known.
        engines: the client to the engines; there once the server runs, like the mode.
        serving: the mode.
        exposition_of_all: returns the metrics of all workers; those of this process where it is the only one.
    """

    engines: Engines
    serving: Mode

    def __init__(
        self,
        *,
        settings: Settings,
        sources: Sources,
        prefill: Pool,
        decode: Pool,
        metrics: RouterMetrics,
        journal: Journal,
        shared: Shared,
    ) -> None:
        """Keep the parts."""
        self.settings = settings
        self.sources = sources
        self.prefill = prefill
        self.decode = decode
        self.metrics = metrics
        self.journal = journal
        self.shared = shared
        self.exposition_of_all: Callable[[], Awaitable[bytes]] = self.exposition
        self.ready = asyncio.Event()
        self._dropped_seen = 0

    async def refresh(self) -> None:
        """Bring the pools to what the sources say; requests that are under way notice nothing.

        Raises:
            OSError: a name cannot be resolved; then nothing changes.
        """
        found = [(pool, await self.sources.resolve(pool.role)) for pool in (self.prefill, self.decode)]
        for pool, endpoints in found:
            for gone in pool.set_endpoints(endpoints):
                self.metrics.forget(pool.role, gone.name)

    async def views(self) -> list[EndpointView]:
        """Return the engines as the admin API shows them."""
        return [_view(endpoint) for pool in (self.prefill, self.decode) for endpoint in pool.endpoints]

    async def drain(self, role: Role, name: str, *, draining: bool) -> EndpointView | None:
        """Send an engine no new requests, or requests again; return it, None where there is none of that name."""
        endpoint = (self.prefill if role == "prefill" else self.decode).find(name)
        if endpoint is None:
            return None
        endpoint.draining = draining
        return _view(endpoint)

    def finish(self, record: Record, seconds: float) -> None:
        """Count a request that has ended and write its line."""
        record.ended_at = time.time()
        self.metrics.count("kvops_router_requests_total", record.mode, record.outcome)
        self.metrics.observe("kvops_router_request_seconds", seconds, record.mode)
        if record.first_byte_at is not None:
            self.metrics.observe("kvops_router_first_byte_seconds", record.first_byte_at - record.ts, record.mode)
        self.journal.write(record)

    async def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        metrics = self.metrics
        for pool in (self.prefill, self.decode):
            metrics.set("kvops_router_queued", pool.waiters, pool.role)
            for endpoint in pool.endpoints:
                metrics.set("kvops_router_in_flight", endpoint.in_flight, pool.role, endpoint.name)
                metrics.set("kvops_router_endpoint_up", endpoint.takes_requests(), pool.role, endpoint.name)
        conversations, size_bytes = self.shared.size()
        metrics.set("kvops_router_conversations", conversations)
        metrics.set("kvops_router_conversation_bytes", size_bytes)
        dropped = self.journal.dropped
        metrics.count("kvops_router_journal_dropped_total", amount=dropped - self._dropped_seen)
        self._dropped_seen = dropped
        return metrics.text()


class Follower(Protocol):
    """What has engines that may change."""

    sources: Sources

    async def refresh(self) -> None:
        """Bring the engines to what the sources say."""


async def follow(follower: Follower) -> None:
    """Follow changes of the endpoints file and of DNS, for ever; what is wrong changes nothing."""
    while True:
        await asyncio.sleep(_FOLLOW_SECONDS)
        try:
            if follower.sources.file_changed():
                follower.sources.reload()
            elif not follower.sources.names_dns():
                continue
            await follower.refresh()
        except (EndpointError, OSError) as error:
            log.warning("the engines stay as they were: %s", error)


def _view(endpoint: Endpoint) -> EndpointView:
    return EndpointView(
        name=endpoint.name,
        role=endpoint.role,
        state=endpoint.state,
        in_flight=endpoint.in_flight,
        waiting=endpoint.waiting,
        kv_usage=endpoint.kv_usage,
        generation=endpoint.generation,
        transfer_mode=endpoint.transfer_mode,
        engine_id=endpoint.identity.engine_id if endpoint.identity else None,
    )
