"""From a client's request to its answer: attempts, requests of several sequences, and what goes around P."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from kvops.router import bodies, http_client
from kvops.router.errors import EngineFailure, Refusal
from kvops.router.exchange import Attempt
from kvops.router.relay import relay

if TYPE_CHECKING:
    from kvops.router.bodies import Body
    from kvops.router.engines import Engines
    from kvops.router.exchange import Exchange
    from kvops.router.pool import Endpoint
    from kvops.router.response import Response

log = logging.getLogger(__name__)

_ATTEMPTS = 2
# Prompts of one request that P works on at a time.
_PROMPTS_AT_ONCE = 8
# The client has waited as long as anybody should; another attempt would double that.
_NOT_AGAIN = ("timeout",)


class Mode(Protocol):
    """A way of moving KV from P to D."""

    async def serve(self, attempt: Attempt) -> Response:
        """Serve a request of one sequence."""

    async def prime(self, attempt: Attempt, body: Body, decode: Endpoint) -> None:
        """Bring the KV of one prompt into D's prefix cache."""


async def serve(exchange: Exchange, mode: Mode, engines: Engines) -> Response:
    """Return the finished answer to ``exchange``; a failed attempt is repeated once, on other engines.

    Raises:
        RouterError: no attempt worked.
        bodies.BodyError: the client's body cannot be served.
    """
    avoid = None
    for number in range(1, _ATTEMPTS + 1):
        attempt = Attempt(exchange, number, avoid)
        exchange.record.attempts, exchange.record.router_id = number, attempt.id
        try:
            return await _serve_once(attempt, mode, engines)
        except Refusal as refusal:
            exchange.record.outcome = "refused"
            return refusal.response(exchange.response_headers)
        except EngineFailure as failure:
            log.warning("attempt %d of %s: %s", number, attempt.id, failure)
            exchange.record.error = failure.reason
            if number == _ATTEMPTS or failure.reason in _NOT_AGAIN:
                raise failure.for_client() from None
            engines.metrics.count("kvops_router_retries_total", failure.endpoint.role, failure.reason)
            avoid = failure.endpoint
    raise AssertionError("the last attempt returns or raises")


async def _serve_once(attempt: Attempt, mode: Mode, engines: Engines) -> Response:
    body = attempt.exchange.body
    if bodies.needs_whole_prompt(body):
        return await _decode_alone(attempt, engines, await _decode_engine(attempt, engines))
    if parts := bodies.sequences(body):
        decode = await _decode_engine(attempt, engines)
        await _prime_all(attempt, parts, decode, mode)
        return await _decode_alone(attempt, engines, decode)
    return await mode.serve(attempt)


async def _decode_engine(attempt: Attempt, engines: Engines) -> Endpoint:
    return await engines.decode.take(attempt.avoid, wait_seconds=engines.settings.deadlines.queue)


async def _decode_alone(attempt: Attempt, engines: Engines, decode: Endpoint) -> Response:
    """Serve from D, without a handle: from its prefix cache, or by its own prefill."""
    content = http_client.Body(bodies.encode(attempt.exchange.body))
    async with engines.open(attempt, decode, content) as answer:
        return (await relay(attempt.exchange, answer, engines.settings.deadlines.idle)).response


async def _prime_all(attempt: Attempt, parts: list[Body], decode: Endpoint, mode: Mode) -> None:
    """Bring the KV of each prompt into D's prefix cache, as pairs of legs with ids of their own.

    A handle is good for one sequence only, so D serves the several sequences of one request from its prefix cache.
    """
    slots = asyncio.Semaphore(_PROMPTS_AT_ONCE)

    async def prime(part: Body) -> None:
        async with slots:
            await mode.prime(Attempt(attempt.exchange, attempt.number, attempt.avoid), part, decode)

    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(prime(part))
    except* (EngineFailure, Refusal) as failures:
        first = failures.exceptions[0]
    else:
        return
    raise first
