"""What can be set on the router."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - msgspec reads the annotation in a worker
from typing import Literal

from kvops.router.handles import Identity  # noqa: TC001 - likewise

ModeName = Literal["pull", "push", "bidirectional", "auto"]
MODES: tuple[ModeName, ...] = ("pull", "push", "bidirectional", "auto")


@dataclass(frozen=True)
class Deadlines:
    """How long the router waits, in seconds, before it gives a leg up.

    Attributes:
        connect: for a connection to an engine.
        prefill: for P's whole answer: queue and prompt.
        kv_wait: in push mode, from P's answer to the first event of D's stream: the KV is on its way by then. Above
            the 30 s that P keeps the blocks, so that what can still succeed is not cut off.
        first_token: from sending D's request to the first event of its stream.
        idle: between two chunks of a stream.
        answer: for D's whole answer to a request that does not stream; nothing tells how far such an answer is.
        head: for the head of a client's request, from its first byte on.
        body: for the client's body to arrive.
        queue: for a free place on an engine.
    """

    connect: float = 5.0
    prefill: float = 300.0
    kv_wait: float = 60.0
    first_token: float = 300.0
    idle: float = 120.0
    answer: float = 1800.0
    head: float = 10.0
    body: float = 60.0
    queue: float = 30.0


@dataclass(frozen=True)
class Limits:
    """What one client, and all of them together, may take.

    Attributes:
        connections: of clients, at once; the next one is answered with 503.
        in_flight: requests at work on one engine at a time; the next ones wait.
        queued: requests that wait for an engine; the next one is answered with 429.
        body_bytes: size of a request. A prompt of 128k tokens is under 1 MiB of text; images in a chat take more.
        requests_per_second: rate of one API key (of one address without keys), 0 for no limit.
        conversations: conversations whose handle is kept.
        conversation_bytes: memory for all kept handles.
    """

    connections: int = 16_384
    in_flight: int = 512
    queued: int = 1024
    body_bytes: int = 64 * 1024 * 1024
    requests_per_second: float = 0.0
    conversations: int = 100_000
    conversation_bytes: int = 256 * 1024 * 1024


TTL_MARGIN_SECONDS = 30.0


@dataclass(frozen=True)
class Settings:
    """The router's settings.

    Attributes:
        mode: how KV moves.
        api_keys: bearer tokens that are let in; empty lets everybody in.
        deadlines: how long to wait for what.
        limits: how much to take on.
        decoder_ttl_seconds: what ``decoder_kv_blocks_ttl`` is set to on the decode engines.
        ttl_margin_seconds: a handle this near to its end is not used: P may queue before it reads (``margin_of``).
        probe_seconds: time between two health probes of an engine.
        journal: file to which one line a request is appended, None for no journal.
        identities: by name of a prefill engine, its NIXL side as whoever started it knows it; push asks the others.
    """

    mode: ModeName = "pull"
    api_keys: tuple[str, ...] = ()
    deadlines: Deadlines = Deadlines()
    limits: Limits = Limits()
    decoder_ttl_seconds: float = 480.0
    ttl_margin_seconds: float = TTL_MARGIN_SECONDS
    probe_seconds: float = 5.0
    journal: Path | None = None
    identities: dict[str, Identity] = field(default_factory=dict)


def margin_of(decoder_ttl_seconds: float) -> float:
    """Return how long before its end a handle is no longer used: 30 s, but never more than a quarter of the TTL.

    With a fixed margin, a TTL of that length would leave every handle unused without an error anywhere.
    """
    return min(TTL_MARGIN_SECONDS, decoder_ttl_seconds / 4)
