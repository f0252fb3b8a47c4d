"""Fleets of real engines, one per mode for the whole run: starting them takes most of its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from e2e.connectors.pair import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

# vLLM reads nothing back in the last 5 seconds of decode's TTL.
TTL_SECONDS = 13
LEASE_SECONDS = 12
PUSH_TIMEOUT_SECONDS = 4
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


@pytest.fixture(scope="session")
def bidirectional_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """Prefill and decode with our connectors, and a stock pair beside them."""
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
            Engine("stock-prefill", folder, extra=extra, stock=True),
            Engine("stock-decode", folder, extra=extra, stock=True),
        ]
    )


@pytest.fixture(scope="session")
def push_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """Prefill and decode in push mode with our connectors, and a stock decode beside them."""
    folder = tmp_path_factory.mktemp("push")
    extra = {
        "push_registration_timeout": PUSH_TIMEOUT_SECONDS,
        "kv_lease_duration": LEASE_SECONDS,
        "kvops": {"push_cancel_grace_seconds": 1},
    }
    yield from start(
        [
            Engine("prefill", folder, "NixlPushConnector", "kv_producer", extra),
            Engine("decode", folder, "NixlPushConnector", "kv_consumer", extra),
            Engine("stock-decode", folder, "NixlPushConnector", "kv_consumer", extra, stock=True),
        ]
    )
