"""Push: P and D get the request at the same time, D registers its blocks with P, P writes the KV into them.

The legs are paired by their request id and tied together here, for vLLM does not tie them: a D whose P failed waits for
ever, and a P whose D failed keeps its blocks until their lease ends.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import TYPE_CHECKING, Any, TypeVar

from kvops.router import bodies, handles, http_client
from kvops.router.errors import EngineFailure, Refusal
from kvops.router.relay import relay

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kvops.router.bodies import Body
    from kvops.router.engines import Engines
    from kvops.router.exchange import Attempt
    from kvops.router.handles import Identity
    from kvops.router.identities import Identities
    from kvops.router.pool import Endpoint
    from kvops.router.releases import Releases
    from kvops.router.response import Response

log = logging.getLogger(__name__)

_T = TypeVar("_T")
# The instrumented connectors' gauge; without it nothing is known of an answer that does not stream.
_WAITING_FOR_KV = re.compile(
    rb'^kvops_oldest_waiting_kv_age_seconds\{[^}\n]*direction="p_to_d"[^}\n]*\} (\S+)', re.MULTILINE
)
_SCRAPE_SECONDS = 10.0
_LOOK_AGAIN_SECONDS = 5.0
# Between sending a request and decode's taking it in for KV lies its queue, and the scrape takes a moment.
_SAME_WAIT_SECONDS = 5.0


class PushMode:
    """Serves completions and chat completions in push mode."""

    def __init__(self, engines: Engines, releases: Releases, identities: Identities) -> None:
        """Keep the client to the engines and what is known of P."""
        self._engines = engines
        self._releases = releases
        self._identities = identities
        self._deadlines = engines.settings.deadlines

    async def serve(self, attempt: Attempt) -> Response:
        """Run both legs at once and relay D's answer.

        Raises:
            EngineFailure: an engine failed before the first byte of the answer.
            Refusal: an engine finds fault with the request.
        """
        decode = await self._engines.decode.take(attempt.avoid, wait_seconds=self._deadlines.queue)
        prefill, identity = await self._choose_prefill(attempt)
        params = handles.for_push_decode(identity, attempt.id, attempt.context)
        began = asyncio.Event()

        async def decode_leg() -> Response:
            content = http_client.Body(bodies.encode(bodies.decode_body(attempt.exchange.body, params)))
            async with self._engines.open(attempt, decode, content) as answer:
                began.set()
                return (await relay(attempt.exchange, answer, self._deadlines.idle)).response

        return await self._tie(attempt, attempt.exchange.body, _Pair(prefill, identity, decode, began), decode_leg())

    async def prime(self, attempt: Attempt, body: Body, decode: Endpoint) -> None:
        """Bring the KV of one prompt into D's prefix cache."""
        prefill, identity = await self._choose_prefill(attempt)
        params = handles.for_push_decode(identity, attempt.id, attempt.context)
        content = http_client.Body(bodies.encode(bodies.prefill_body(body, params)))
        pair = _Pair(prefill, identity, decode, asyncio.Event())
        await self._tie(attempt, body, pair, self._engines.ask(attempt, decode, content, self._deadlines.prefill))

    async def _choose_prefill(self, attempt: Attempt) -> tuple[Endpoint, Identity]:
        prefill = await self._engines.prefill.take(attempt.avoid, wait_seconds=self._deadlines.queue)
        return prefill, await self._identities.of(prefill, attempt)

    async def _tie(self, attempt: Attempt, body: Body, pair: _Pair, decode_leg: Coroutine[None, None, _T]) -> _T:
        """Run P's leg beside D's and return what D's returns; when one fails, the other is not waited for."""
        loop = asyncio.get_running_loop()
        prefill_task = loop.create_task(self._prefill_leg(attempt, body, pair))
        decode_task = loop.create_task(decode_leg)
        try:
            await asyncio.wait({prefill_task, decode_task}, return_when=asyncio.FIRST_COMPLETED)
            if not decode_task.done():
                await self._await_decode(attempt, pair, prefill_task, decode_task)
            return await decode_task
        except (EngineFailure, Refusal):
            # D has failed, so nothing will ever read what P computes; or P has, and this does nothing.
            prefill_task.cancel()
            raise
        finally:
            decode_task.cancel()
            self._measure_skew(attempt)
            # When the client leaves, P is left to finish: an aborted D keeps its blocks until P has written them, and
            # a P that is aborted too never writes.
            self._releases.run(_end(prefill_task, decode_task))

    def _measure_skew(self, attempt: Attempt) -> None:
        starts = [leg.started_at for leg in attempt.exchange.record.legs if leg.id == attempt.id]
        if len(starts) == 2:
            self._engines.metrics.observe("kvops_router_leg_skew_seconds", abs(starts[1] - starts[0]))

    async def _prefill_leg(self, attempt: Attempt, body: Body, pair: _Pair) -> None:
        params = handles.for_push_prefill(attempt.id, attempt.context)
        content = http_client.Body(bodies.encode(bodies.prefill_body(body, params)))
        answer = await self._engines.ask(attempt, pair.prefill, content, self._deadlines.prefill)
        if self._identities.learn(pair.prefill, answer) != pair.identity:
            raise EngineFailure(pair.prefill, "restarted", "another engine than before answers at its address")

    async def _await_decode(
        self, attempt: Attempt, pair: _Pair, prefill_task: asyncio.Task[None], decode_task: asyncio.Task[_T]
    ) -> None:
        """Wait, once P is done, until D's stream has begun or its whole answer is there.

        Raises:
            EngineFailure: P failed and D is still waiting for its KV, or the KV does not come.
            Refusal: P finds fault with the request.
        """
        if (failure := prefill_task.exception()) is not None:
            if pair.began.is_set():
                return
            raise failure
        if not attempt.exchange.streams:
            await self._watch_whole_answer(attempt, pair, decode_task)
            return
        began = asyncio.get_running_loop().create_task(pair.began.wait())
        try:
            done, _ = await asyncio.wait(
                {began, decode_task}, timeout=self._deadlines.kv_wait, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            began.cancel()
        if not done:
            raise self._no_kv(pair)

    async def _watch_whole_answer(self, attempt: Attempt, pair: _Pair, decode_task: asyncio.Task[Any]) -> None:
        """Return once D has answered, or has its KV and only decodes.

        An answer that does not stream tells nothing before its end. But D says for how long its oldest request has
        been waiting for KV, and that one is this request when it has been waiting since this request was sent.

        Raises:
            EngineFailure: the KV does not come.
        """
        leg = next(leg for leg in attempt.exchange.record.legs if (leg.id, leg.role) == (attempt.id, "decode"))
        wait_seconds = self._deadlines.kv_wait
        while not (await asyncio.wait({decode_task}, timeout=wait_seconds))[0]:
            scrape = await self._engines.get(attempt, pair.decode, "/metrics", _SCRAPE_SECONDS)
            waiting = _WAITING_FOR_KV.search(scrape)
            younger = time.time() - leg.started_at - float(waiting[1]) if waiting else float("inf")
            if abs(younger) <= _SAME_WAIT_SECONDS:
                raise self._no_kv(pair)
            if younger > 0:
                return
            wait_seconds = _LOOK_AGAIN_SECONDS

    def _no_kv(self, pair: _Pair) -> EngineFailure:
        detail = f"no KV {self._deadlines.kv_wait:g} s after prefill was done"
        return EngineFailure(pair.decode, "kv_wait", detail, 504)


class _Pair:
    """The two engines of an attempt.

    Attributes:
        prefill: P.
        identity: P's NIXL side as D was told.
        decode: D.
        began: set once D's stream has begun, so that D has the KV.
    """

    def __init__(self, prefill: Endpoint, identity: Identity, decode: Endpoint, began: asyncio.Event) -> None:
        """Keep them."""
        self.prefill = prefill
        self.identity = identity
        self.decode = decode
        self.began = began


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for failure in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(failure, Exception):
            log.info("a leg of an ended push request: %s", failure)
