"""Decode's handle in streamed answers.

vLLM up to 0.32 returns ``kv_transfer_params`` only with answers that are not streamed, so that readback does nothing
for streaming clients. Start the API server with ``--middleware kvops_connectors.streaming.StreamedHandles``: for a
request with the header ``X-Kvops-Handle: 1`` the answer gets one more event, without choices, right before ``data:
[DONE]``::

    data: {"id": "...", "object": "...", "created": 0, "model": "...", "choices": [], "kv_transfer_params": {...}}

Only a router should send the header, and it should strip it from what clients send.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]

logger = logging.getLogger("vllm.kvops")

HEADER = b"x-kvops-handle"
DONE = b"data: [DONE]"
LINE_DONE = b"\n" + DONE
# Enough of the stream's first event to learn its id, kind and model.
FIRST_EVENT_BYTES = 64 * 1024
COPIED = ("id", "object", "created", "model")


class Found:
    """The handles of the answers that one HTTP request gives, by vLLM's request id."""

    def __init__(self) -> None:
        self.handles: dict[str, dict[str, Any]] = {}

    @property
    def only(self) -> dict[str, Any] | None:
        """Return the handle if there is exactly one; with several answers (n > 1) nobody could tell whose it is."""
        return next(iter(self.handles.values())) if len(self.handles) == 1 else None


_FOUND: contextvars.ContextVar[Found | None] = contextvars.ContextVar("kvops_found", default=None)


class Splice:
    """Puts one event in front of ``data: [DONE]``, however the stream is cut into chunks.

    Holds back only bytes that may be the beginning of the marker, so a token is never delayed.
    """

    def __init__(self, event: Callable[[bytes], bytes]) -> None:
        self._event = event
        self._held = b""
        self._first = b""
        self._at_start = True
        self._spliced = False

    def feed(self, chunk: bytes, last: bool) -> bytes:
        """Return what to send on for a chunk; everything that is held back if it is the last one."""
        if self._spliced:
            return chunk
        if len(self._first) < FIRST_EVENT_BYTES and b"\n" not in self._first:
            self._first += chunk[:FIRST_EVENT_BYTES]
        body = self._held + chunk
        where = 0 if self._at_start and body.startswith(DONE) else body.find(LINE_DONE) + 1
        if body.startswith(DONE, where) and (where or self._at_start):
            self._spliced, self._held = True, b""
            return body[:where] + self._event(self._first) + body[where:]
        keep = 0 if last else self._possible_start(body)
        self._held = body[len(body) - keep :]
        self._at_start = self._at_start and keep == len(body)
        return body[: len(body) - keep]

    def _possible_start(self, body: bytes) -> int:
        if self._at_start and DONE.startswith(body):
            return len(body)
        longest = min(len(body), len(LINE_DONE) - 1)
        return next((size for size in range(longest, 0, -1) if LINE_DONE.startswith(body[-size:])), 0)


class StreamedHandles:
    """ASGI middleware of vLLM's API server."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._count = _counter()
        _listen_to_answers()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on; watch its answer if the router asked for the handle."""
        if scope["type"] != "http" or (HEADER, b"1") not in scope["headers"]:
            await self._app(scope, receive, send)
            return
        found = Found()
        token = _FOUND.set(found)
        try:
            await self._app(scope, receive, self._watched(send, found))
        finally:
            _FOUND.reset(token)

    def _watched(self, send: Send, found: Found) -> Send:
        splice: Splice | None = None

        async def watched(message: Message) -> None:
            nonlocal splice
            if message["type"] == "http.response.start":
                kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
                if message["status"] == 200 and kinds and kinds[0].startswith(b"text/event-stream"):
                    splice = Splice(lambda first: self._event(first, found))
            elif splice is not None and message["type"] == "http.response.body":
                last = not message.get("more_body", False)
                message = {**message, "body": splice.feed(message.get("body", b""), last)}
            await send(message)

        return watched

    def _event(self, first: bytes, found: Found) -> bytes:
        handle = found.only
        self._count("missing" if handle is None else "sent")
        if handle is None:
            return b""
        event = {"id": None, "object": None, "created": 0, "model": None, **_first_event(first)}
        event |= {"choices": [], "kv_transfer_params": handle}
        return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def _first_event(first: bytes) -> dict[str, Any]:
    try:
        event = json.loads(first.split(b"\n", 1)[0].removeprefix(b"data:"))
        return {name: event[name] for name in COPIED if name in event}
    except (ValueError, TypeError):
        return {}


def _listen_to_answers() -> None:
    """Keep the handle of every answer that is made for a watched request; once in a process."""
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    original = AsyncLLM.generate
    if getattr(original, "kvops", False):
        return

    def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        answers, found = original(self, *args, **kwargs), _FOUND.get()
        return answers if found is None else _kept(answers, found)

    generate.kvops = True  # type: ignore[attr-defined]
    AsyncLLM.generate = generate


async def _kept(answers: AsyncGenerator[Any, None], found: Found) -> AsyncGenerator[Any, None]:
    # Closing matters: vLLM aborts the request when its generator is closed.
    async with contextlib.aclosing(answers):
        async for answer in answers:
            if getattr(answer, "kv_transfer_params", None):
                found.handles[answer.request_id] = answer.kv_transfer_params
            yield answer


def _counter() -> Callable[[str], None]:
    """Return what counts an outcome in kvops_streamed_handles_total; it does nothing where Prometheus is missing."""
    try:
        from prometheus_client import Counter, Gauge, Histogram  # noqa: PLC0415

        from kvops_connectors.catalogue import CATALOGUE  # noqa: PLC0415
        from kvops_connectors.stats import create  # noqa: PLC0415

        classes = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
        counter = create(CATALOGUE["kvops_streamed_handles_total"], classes, [])
        for outcome in CATALOGUE["kvops_streamed_handles_total"].labels[0].values:
            counter.labels(outcome)
    except Exception:
        logger.exception("kvops: streamed handles are not counted")
        return lambda outcome: None  # noqa: ARG005
    return lambda outcome: counter.labels(outcome).inc()
