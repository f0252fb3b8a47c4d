"""What the handlers of the public and of the admin port share."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from aiohttp import web

from kvops.router.endpoints import EndpointError

if TYPE_CHECKING:
    from kvops.router.conversations import Conversations
    from kvops.router.endpoints import Sources
    from kvops.router.engines import Engines
    from kvops.router.journal import Journal, Record
    from kvops.router.limits import RateLimit
    from kvops.router.metrics import RouterMetrics
    from kvops.router.pool import Pool
    from kvops.router.serving import Mode
    from kvops.router.settings import Settings


log = logging.getLogger(__name__)

_FOLLOW_SECONDS = 5.0


class Router:
    """One router.

    Attributes:
        engines: the client to the engines; there once the server runs, like the two after it.
        serving: the mode.
        conversations: the handles that are kept.
    """

    engines: Engines
    serving: Mode
    conversations: Conversations

    def __init__(
        self,
        *,
        settings: Settings,
        sources: Sources,
        prefill: Pool,
        decode: Pool,
        metrics: RouterMetrics,
        journal: Journal,
        rate: RateLimit,
    ) -> None:
        """Keep the parts."""
        self.settings = settings
        self.sources = sources
        self.prefill = prefill
        self.decode = decode
        self.metrics = metrics
        self.journal = journal
        self.rate = rate
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

    async def follow_sources(self) -> None:
        """Follow changes of the endpoints file and of DNS, for ever; what is wrong changes nothing."""
        while True:
            await asyncio.sleep(_FOLLOW_SECONDS)
            try:
                if self.sources.file_changed():
                    self.sources.reload()
                elif not self.sources.names_dns():
                    continue
                await self.refresh()
            except (EndpointError, OSError) as error:
                log.warning("the engines stay as they were: %s", error)

    def finish(self, record: Record, seconds: float) -> None:
        """Count a request that has ended and write its line."""
        record.ended_at = time.time()
        self.metrics.count("kvops_router_requests_total", record.mode, record.outcome)
        self.metrics.observe("kvops_router_request_seconds", seconds, record.mode)
        if record.first_byte_at is not None:
            self.metrics.observe("kvops_router_first_byte_seconds", record.first_byte_at - record.ts, record.mode)
        self.journal.write(record)

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        metrics = self.metrics
        for pool in (self.prefill, self.decode):
            metrics.set("kvops_router_queued", pool.waiters, pool.role)
            for endpoint in pool.endpoints:
                metrics.set("kvops_router_in_flight", endpoint.in_flight, pool.role, endpoint.name)
                metrics.set("kvops_router_endpoint_up", endpoint.takes_requests(), pool.role, endpoint.name)
        metrics.set("kvops_router_conversations", len(self.conversations))
        metrics.set("kvops_router_conversation_bytes", self.conversations.bytes)
        dropped = self.journal.dropped
        metrics.count("kvops_router_journal_dropped_total", amount=dropped - self._dropped_seen)
        self._dropped_seen = dropped
        return metrics.text()


STATE = web.AppKey("state", Router)
