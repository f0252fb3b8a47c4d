"""Pull: P computes the prompt and keeps its KV, D reads it.

P's answer names the blocks; D is chosen after that, by load, and gets the client's request with that handle.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from kvops.router import bodies, handles, http_client
from kvops.router.errors import EngineFailure
from kvops.router.relay import relay

if TYPE_CHECKING:
    import msgspec

    from kvops.router.bodies import Body
    from kvops.router.engines import Engines
    from kvops.router.exchange import Attempt
    from kvops.router.handles import Handle
    from kvops.router.pool import Endpoint
    from kvops.router.relay import Relayed
    from kvops.router.releases import Releases
    from kvops.router.response import Response

log = logging.getLogger(__name__)

# P keeps the blocks for 30 s unless told otherwise, so a place on D must be found well before.
_PLACE_ON_DECODE_SECONDS = 10.0


class Prefilled:
    """What P has computed and keeps.

    Attributes:
        handle: where it lies.
        holder: P.
        prompt_token_ids: the prompt as P tokenized it, None where P was not asked.
    """

    def __init__(self, handle: Handle, holder: Endpoint, prompt_token_ids: msgspec.Raw | None) -> None:
        """Keep them."""
        self.handle = handle
        self.holder = holder
        self.prompt_token_ids = prompt_token_ids


class PullMode:
    """Serves completions and chat completions in pull mode."""

    def __init__(self, engines: Engines, releases: Releases) -> None:
        """Keep the client to the engines."""
        self._engines = engines
        self._releases = releases
        self._deadlines = engines.settings.deadlines

    async def serve(self, attempt: Attempt) -> Response:
        """Run both legs and relay D's answer.

        When the client leaves, this coroutine is cancelled, which closes the connection to whichever engine is at
        work; vLLM then aborts the request.

        Raises:
            EngineFailure: an engine failed before the first byte of the answer.
            Refusal: an engine finds fault with the request.
        """
        prefilled = await self.prefill(attempt, attempt.exchange.body)
        return (await self.decode(attempt, prefilled)).response

    async def prime(self, attempt: Attempt, body: Body, decode: Endpoint) -> None:
        """Bring the KV of one prompt into D's prefix cache."""
        prefilled = await self.prefill(attempt, body)
        params = handles.for_decode(prefilled.handle, attempt.context)
        content = http_client.Body(bodies.encode(bodies.prefill_body(body, params)))
        try:
            answer = await self._engines.ask(attempt, decode, content, self._deadlines.prefill)
        except BaseException as error:
            self._release_unless_sent(error, content, prefilled.handle, prefilled.holder, attempt)
            raise
        # A bidirectional D now keeps the blocks for a next turn that this prompt does not have.
        if left := handle_or_none(answer, decode):
            self._releases.release(left, decode, "no_conversation", authorization=attempt.authorization)

    async def prefill(self, attempt: Attempt, body: Body, params: msgspec.Raw | None = None) -> Prefilled:
        """Run P's leg and return what P keeps.

        Args:
            attempt: the attempt.
            body: the client's body, or one prompt of it.
            params: P's ``kv_transfer_params``; those of an ordinary prefill if left out.
        """
        engines = self._engines
        # D's part of the admission: while no D has room, P's blocks would only wait.
        await engines.decode.room(self._deadlines.queue)
        prefill = await engines.prefill.take(attempt.avoid, wait_seconds=self._deadlines.queue)
        leg = bodies.prefill_body(body, params or handles.for_prefill(attempt.context))
        if attempt.exchange.path.endswith("/chat/completions"):
            leg = bodies.with_token_ids(leg)
        content = http_client.Body(bodies.encode(leg))
        answer = await engines.ask(attempt, prefill, content, self._deadlines.prefill)
        return _prefilled(answer, prefill)

    async def decode(
        self,
        attempt: Attempt,
        prefilled: Prefilled,
        *,
        prefer: Endpoint | None = None,
        headers: dict[str, str] | None = None,
    ) -> Relayed:
        """Run D's leg, relay its answer and return what came of it.

        Args:
            attempt: the attempt.
            prefilled: what P keeps.
            prefer: the D to choose if its load allows.
            headers: more headers for D.
        """
        engines, metrics = self._engines, self._engines.metrics
        params = handles.for_decode(prefilled.handle, attempt.context, prefilled.prompt_token_ids)
        content = http_client.Body(bodies.encode(bodies.decode_body(attempt.exchange.body, params)))
        prefilled_at = time.perf_counter()
        metrics.handed_over(attempt.id)
        try:
            decode = await engines.decode.take(attempt.avoid, prefer, wait_seconds=_PLACE_ON_DECODE_SECONDS)
            metrics.observe("kvops_router_handover_seconds", time.perf_counter() - prefilled_at)
            async with engines.open(attempt, decode, content, headers=headers) as answer:
                metrics.taken_over(attempt.id)
                relayed = await relay(attempt.exchange, answer, self._deadlines.idle)
        except BaseException as error:
            self._release_unless_sent(error, content, prefilled.handle, prefilled.holder, attempt)
            raise
        finally:
            metrics.taken_over(attempt.id)
        relayed.decode = decode
        return relayed

    def _release_unless_sent(
        self, error: BaseException, content: http_client.Body, handle: Handle, holder: Endpoint, attempt: Attempt
    ) -> None:
        """Give blocks back if ``error`` came before the request that would read them has left."""
        if not content.began:
            reason = "client_gone" if isinstance(error, asyncio.CancelledError) else "not_sent"
            self._releases.release(handle, holder, reason, authorization=attempt.authorization)


def _prefilled(answer: bytes, prefill: Endpoint) -> Prefilled:
    try:
        members = bodies.members(answer)
        handle = handles.read(members.get(bodies.KV_TRANSFER_PARAMS), prefill.host)
    except (handles.HandleError, bodies.BodyError) as error:
        raise EngineFailure(prefill, "no_handle", str(error)) from None
    if handle.fields.transfer_mode == "push":
        raise EngineFailure(prefill, "no_handle", "it runs the push connector; start the router with --mode push")
    token_ids = members.get("prompt_token_ids")
    return Prefilled(handle, prefill, None if bodies.is_null(token_ids) else token_ids)


def handle_or_none(content: bytes, endpoint: Endpoint) -> Handle | None:
    """Return the handle at the top level of a whole answer, None where there is none to use."""
    try:
        return handles.read(bodies.members(content).get(bodies.KV_TRANSFER_PARAMS), endpoint.host)
    except (handles.HandleError, bodies.BodyError):
        return None
