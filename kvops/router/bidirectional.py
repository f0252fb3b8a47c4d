"""Bidirectional: pull, and on a conversation's next turn P reads the history's KV back from D.

D's answer carries the handle of the blocks that it keeps. On the next turn it goes to P instead of an ordinary prefill;
whenever it is missing, late or declined, the turn is served as in pull mode and the reason is counted.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from kvops.router import handles
from kvops.router.conversations import Held, Turn, Unused, key_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvops.router.bodies import Body
    from kvops.router.engines import Engines
    from kvops.router.exchange import Attempt
    from kvops.router.handles import Handle
    from kvops.router.pool import Endpoint
    from kvops.router.pull import Prefilled, PullMode
    from kvops.router.relay import Relayed
    from kvops.router.releases import Releases
    from kvops.router.response import Response
    from kvops.router.shared import Shared

log = logging.getLogger(__name__)

# Asks the instrumented decode engine for its handle as one more event at the end of the stream.
_WANT_HANDLE = {"X-Kvops-Handle": "1"}


class BidirectionalMode:
    """Serves completions and chat completions in bidirectional mode."""

    def __init__(self, engines: Engines, releases: Releases, pull: PullMode, shared: Shared) -> None:
        """Keep what serves an ordinary turn, and where the conversations are."""
        self._engines = engines
        self._releases = releases
        self._pull = pull
        self._shared = shared

    async def serve(self, attempt: Attempt) -> Response:
        """Run both legs, relay D's answer and keep its handle for the next turn.

        Raises:
            EngineFailure: an engine failed before the first byte of the answer.
            Refusal: an engine finds fault with the request.
            BodyError: the conversation's id cannot be used.
        """
        turn = await self._begin(attempt)
        holder = self._holder(turn.held)
        prefilled = await self._prefill(attempt, turn, holder)
        relayed = await self._pull.decode(attempt, prefilled, prefer=holder, headers=_WANT_HANDLE)
        await self._end(attempt, turn, relayed)
        return relayed.response

    async def prime(self, attempt: Attempt, body: Body, decode: Endpoint) -> None:
        """Bring the KV of one prompt into D's prefix cache."""
        await self._pull.prime(attempt, body, decode)

    async def _begin(self, attempt: Attempt) -> Turn:
        """Return the turn; a second attempt gets no handle, for the first one may have used it up."""
        record, metrics = attempt.exchange.record, self._engines.metrics
        if attempt.number == 1:
            record.conversation = key_of(attempt.exchange)
            turn = await self._take_turn(record.conversation) if record.conversation else Turn(1, "no_conversation")
            record.turn, record.handle = (turn.number, turn.outcome) if record.conversation else (None, turn.outcome)
            metrics.count("kvops_router_handles_total", turn.outcome)
        else:
            if record.handle == "hit" and attempt.avoid is not None and attempt.avoid.role == "prefill":
                record.handle = "declined"
                metrics.count("kvops_router_handles_total", record.handle)
            turn = Turn(record.turn or 1, record.handle or "used")
        attempt.conversation, attempt.turn = record.conversation, record.turn
        return turn

    async def _take_turn(self, conversation: str) -> Turn:
        turn = await self._shared.begin(conversation)
        self._give_back(turn.unused)
        if turn.outcome == "hit" and self._holder(turn.held) is None:
            return Turn(turn.number, "restarted")
        return turn

    def _holder(self, held: Held | None) -> Endpoint | None:
        """Return the engine that keeps the blocks, None if it is gone or another process answers at its address."""
        holder = self._engines.decode.find(held.holder) if held else None
        if holder is None or held is None:
            return None
        # Unknown until the first probe; should it be another process after all, P fails and is asked again without it.
        known = None not in (holder.started_at, held.started_at)
        return None if known and holder.started_at != held.started_at else holder

    async def _prefill(self, attempt: Attempt, turn: Turn, holder: Endpoint | None) -> Prefilled:
        body = attempt.exchange.body
        if turn.held is None or turn.held.handle is None or holder is None:
            return await self._pull.prefill(attempt, body)
        handle = _decoded(turn.held.handle, holder)
        params = handles.for_readback(handle, attempt.context)
        try:
            return await self._pull.prefill(attempt, body, params)
        except BaseException:
            # P frees D's blocks once it has read them. One that never got the request, or was aborted before it began
            # to read, does not; telling D twice does no harm.
            self._releases.release(handle, holder, "not_read", authorization=attempt.authorization)
            raise

    async def _end(self, attempt: Attempt, turn: Turn, relayed: Relayed) -> None:
        record = attempt.exchange.record
        if not relayed.whole:
            return
        handle = None
        try:
            handle = handles.read(relayed.handle, relayed.decode.host)
        except handles.HandleError as error:
            log.debug("decode engine %s: %s", relayed.decode.name, error)
            streamed = "true" if attempt.exchange.streams else "false"
            self._engines.metrics.count("kvops_router_turns_without_handle_total", streamed)
        if record.conversation:
            self._give_back(await self._shared.keep(record.conversation, turn.number, _held(handle, relayed.decode)))
            record.handle_kept = handle is not None
        elif handle:
            self._releases.release(handle, relayed.decode, "no_conversation", authorization=attempt.authorization)

    def _give_back(self, unused: Sequence[Unused]) -> None:
        for each in unused:
            if each.held.handle is not None and (holder := self._holder(each.held)) is not None:
                self._releases.release(_decoded(each.held.handle, holder), holder, each.reason)


def _held(handle: Handle | None, decode: Endpoint) -> Held:
    if handle is None:
        return Held(None, decode.name, decode.started_at)
    return Held(handle.encoded(), decode.name, decode.started_at, handle.has_digests, handle.ttl_seconds)


def _decoded(handle: bytes, holder: Endpoint) -> Handle:
    return handles.read(msgspec.Raw(handle), holder.host)
