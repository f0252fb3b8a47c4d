"""Fleets of real engines, one per module: starting them takes most of its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engine_pair import LEASE_SECONDS, PUSH_TIMEOUT_SECONDS, TTL_SECONDS, Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAMED = ("--middleware", "kvops_connectors.streaming.StreamedHandles")


def start(engines: list[Engine]) -> Iterator[dict[str, Engine]]:
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
        yield {engine.name: engine for engine in engines}
    finally:
        for engine in engines:
            engine.stop()


@pytest.fixture(scope="module")
def bidirectional_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """Prefill and decode with our connectors, and a stock engine that plays either."""
    folder = tmp_path_factory.mktemp("bidirectional")
    extra = {
        "bidirectional_kv_xfer": True,
        "decoder_kv_blocks_ttl": TTL_SECONDS,
        "kv_lease_duration": LEASE_SECONDS,
    }
    yield from start(
        [
            Engine("prefill", folder, extra=extra),
            Engine("decode", folder, extra=extra, args=STREAMED),
            Engine("stock", folder, extra=extra, stock=True),
        ]
    )


@pytest.fixture(scope="module")
def push_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """Prefill and decode in push mode, a decode that soon gives up, and a stock engine that plays either."""
    folder = tmp_path_factory.mktemp("push")
    extra = {"kv_lease_duration": 2 * LEASE_SECONDS, "push_registration_timeout": 90}
    hasty = {"push_registration_timeout": PUSH_TIMEOUT_SECONDS, "kvops": {"push_cancel_grace_seconds": 1}}
    yield from start(
        [
            Engine("prefill", folder, "NixlPushConnector", "kv_producer", extra),
            Engine("decode", folder, "NixlPushConnector", "kv_consumer", extra),
            Engine("hasty-decode", folder, "NixlPushConnector", "kv_consumer", extra | hasty),
            Engine("stock", folder, "NixlPushConnector", "kv_both", extra | hasty, stock=True),
        ]
    )


@pytest.fixture(scope="module")
def many_ranks_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """Prefill with two data-parallel ranks inside a MultiConnector, decode with two ranks and two API servers.

    Neither has a prefix cache.
    """
    folder = tmp_path_factory.mktemp("ranks")
    extra = {"bidirectional_kv_xfer": True}
    uncached = "--no-enable-prefix-caching"
    ranks = ("--data-parallel-size", "2", uncached)
    halves = ("--tensor-parallel-size", "2", uncached)
    yield from start(
        [
            Engine("prefill", folder, extra=extra, args=ranks, multi=True, nixl_port=0),
            Engine("decode", folder, extra=extra, args=halves, api_servers=2, nixl_port=0),
        ]
    )
