"""Watching the engines: are they alive, are they the same processes as before, how full are they."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    from kvops.router.engines import Engines
    from kvops.router.pool import Endpoint, ProbeOutcome

log = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
_STARTING_SECONDS = 1.0
# Of a scrape of many hundred lines only these are read; parsing all of it would hold up the streams.
_SAMPLE = re.compile(
    rb"^(vllm:num_requests_waiting|vllm:kv_cache_usage_perc|process_start_time_seconds|kvops_connector_info)"
    rb"(?:\{([^}\n]*)\})? (\S+)",
    re.MULTILINE,
)
_ENGINE_LABEL = re.compile(rb'(?:^|,)engine="(\d+)"')


class Watch:
    """Probes every engine of both pools, for as long as it runs."""

    def __init__(self, engines: Engines) -> None:
        """Keep what is to be watched."""
        self._engines = engines

    async def run(self) -> None:
        """Probe for ever; one slow engine does not delay the probes of the others."""
        while True:
            endpoints = [*self._engines.prefill.endpoints, *self._engines.decode.endpoints]
            await asyncio.gather(*map(self._look, endpoints))
            seconds = self._engines.settings.probe_seconds
            if not all(endpoint.has_answered for endpoint in endpoints):
                # Somebody waits for it to come up.
                seconds = min(seconds, _STARTING_SECONDS)
            # Several routers in front of one fleet should not probe in step.
            await asyncio.sleep(seconds * random.uniform(0.8, 1.2))  # noqa: S311

    async def _look(self, endpoint: Endpoint) -> None:
        before = endpoint.state
        outcome: ProbeOutcome = "dead"
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                if await self._is_healthy(endpoint):
                    outcome = "alive"
                    self._take_in(endpoint, await self._get(endpoint, "/metrics"))
        except TimeoutError:
            outcome = "slow"
        except (aiohttp.ClientError, ConnectionError):
            outcome = "dead"
        endpoint.probed(outcome)
        if endpoint.state != before:
            log.warning("%s engine %s: %s -> %s", endpoint.role, endpoint.name, before, endpoint.state)

    async def _is_healthy(self, endpoint: Endpoint) -> bool:
        async with self._engines.session.get(f"{endpoint.url}/health") as answer:
            return answer.status == 200

    async def _get(self, endpoint: Endpoint, path: str) -> bytes:
        async with self._engines.session.get(endpoint.url + path) as answer:
            return await answer.read() if answer.status == 200 else b""

    def _take_in(self, endpoint: Endpoint, scrape: bytes) -> None:
        for name, labels, value in _SAMPLE.findall(scrape):
            rank = _ENGINE_LABEL.search(labels)
            if endpoint.rank is not None and rank is not None and int(rank[1]) != endpoint.rank:
                continue
            if name == b"vllm:num_requests_waiting":
                endpoint.waiting = int(float(value))
            elif name == b"vllm:kv_cache_usage_perc":
                endpoint.kv_usage = float(value)
            elif name == b"kvops_connector_info":
                endpoint.bidirectional = b'bidirectional="true"' in labels
            else:
                self._compare_start(endpoint, float(value))

    def _compare_start(self, endpoint: Endpoint, started_at: float) -> None:
        known, endpoint.started_at = endpoint.started_at, started_at
        if known is not None and known != started_at:
            log.warning("%s engine %s has restarted", endpoint.role, endpoint.name)
            endpoint.restarted()
