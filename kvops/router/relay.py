"""Passing D's answer on to the client, byte for byte as it arrives, without the KV handle."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from kvops.router import sse
from kvops.router.bodies import KV_TRANSFER_PARAMS, cut_member
from kvops.router.errors import error_content
from kvops.router.http_client import BrokenOffError
from kvops.router.response import Response

if TYPE_CHECKING:
    import msgspec

    from kvops.router.engines import Leg
    from kvops.router.exchange import Exchange
    from kvops.router.http_server import Stream
    from kvops.router.pool import Endpoint

log = logging.getLogger(__name__)


class Relayed:
    """What came of passing an answer on.

    Attributes:
        response: the finished response.
        handle: D's handle, None where the answer carried none.
        whole: whether D's answer came to its end without an error.
        decode: the D that answered.
    """

    decode: Endpoint

    def __init__(self, response: Response, handle: msgspec.Raw | None, *, whole: bool) -> None:
        """Keep them."""
        self.response = response
        self.handle = handle
        self.whole = whole


async def relay(exchange: Exchange, answer: Leg, idle_seconds: float) -> Relayed:
    """Send ``answer`` to the client.

    Raises:
        ClientGoneError: the client left (http_server.py).
        BrokenOffError: D broke off before anything was sent to the client.
    """
    if answer.streams:
        return await _relay_stream(exchange, answer, idle_seconds)
    return await _relay_body(exchange, answer)


async def _relay_body(exchange: Exchange, answer: Leg) -> Relayed:
    content = await answer.response.read()
    try:
        content, handle = cut_member(content, KV_TRANSFER_PARAMS)
    except ValueError:
        # What is no JSON object has no top level to carry a handle.
        handle = None
    exchange.record.first_byte_at = time.time()
    response = Response(answer.response.status, content, _headers(exchange, answer))
    return Relayed(response, handle, whole=True)


async def _relay_stream(exchange: Exchange, answer: Leg, idle_seconds: float) -> Relayed:
    events = sse.Events()
    watch = _Watch(exchange, answer, idle_seconds)
    try:
        stream = exchange.request.stream(answer.response.status, _headers(exchange, answer))
        exchange.record.first_byte_at = time.time()
        broken = await _pump(answer, events, stream, watch)
        if broken:
            answer.broken = True
            exchange.record.outcome = "broken_off"
            log.warning("decode broke off in the middle of the stream of %s: %s", exchange.record.router_id, broken)
            error = error_content("decode_failed", "the decode engine broke off", 502)
            await stream.write(b"data: " + error + b"\n\ndata: [DONE]\n\n")
        stream.end()
    finally:
        watch.end()
    if events.failed:
        exchange.record.outcome = "stream_error"
    return Relayed(Response(answer.response.status, None), events.handle, whole=not broken and not events.failed)


def _headers(exchange: Exchange, answer: Leg) -> dict[str, str]:
    kind = answer.response.headers.get("content-type", "application/octet-stream")
    return {"Content-Type": kind, **exchange.response_headers}


async def _pump(answer: Leg, events: sse.Events, stream: Stream, watch: _Watch) -> str:
    """Write D's events to the client and return what broke them off, or nothing.

    An engine that dies in the middle of a stream has already promised 200, so the client learns of it as vLLM itself
    would tell: an ``error`` event, then ``[DONE]``.
    """
    chunk = answer.head
    try:
        while chunk:
            if ready := events.feed(chunk):
                await stream.write(ready)
            watch.progress()
            chunk = await answer.response.read_any()
            watch.progress()
    except (BrokenOffError, sse.EventTooLargeError) as error:
        return str(error)
    if rest := events.end():
        await stream.write(rest)
    return "" if events.done else "it ended without [DONE]"


class _Watch:
    """Ends a stream in which nothing has moved for a while: fails D's answer, or lets a client go that reads nothing.

    One timer a stream, for a deadline on every chunk would cost as much as passing the chunk on.
    """

    def __init__(self, exchange: Exchange, answer: Leg, idle_seconds: float) -> None:
        """Begin to watch."""
        self._exchange, self._answer, self._idle_seconds = exchange, answer, idle_seconds
        self._loop = asyncio.get_running_loop()
        self._moved_at = self._loop.time()
        self._timer = self._loop.call_later(idle_seconds, self._look)

    def progress(self) -> None:
        """Note that something has moved."""
        self._moved_at = self._loop.time()

    def end(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _look(self) -> None:
        left = self._moved_at + self._idle_seconds - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        elif self._answer.response.is_awaited:
            self._answer.response.fail(BrokenOffError(f"it sent nothing for {self._idle_seconds:g} s"))
        else:
            self._exchange.request.abort()
