"""The router as a client of the engines: one leg at a time, with its deadlines and its record."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp

from kvops.router import sse
from kvops.router.errors import EngineFailure, Refusal
from kvops.router.http_client import BrokenOffError, ConnectError, HttpClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvops.router.exchange import Attempt
    from kvops.router.http_client import Body, Response
    from kvops.router.journal import LegRecord
    from kvops.router.metrics import RouterMetrics
    from kvops.router.pool import Endpoint, Pool
    from kvops.router.settings import Settings

log = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"


class Answer:
    """D's answer, its status and first event already looked at.

    Attributes:
        response: with the rest of the body unread.
        head: what has been read of the body.
        broken: set by its reader when it breaks off in the middle.
    """

    broken = False

    def __init__(self, response: Response, head: bytes) -> None:
        """Keep both."""
        self.response = response
        self.head = head

    @property
    def streams(self) -> bool:
        """Return whether it is an event stream."""
        return self.response.content_type == EVENT_STREAM


class Engines:
    """Sends the legs."""

    def __init__(
        self, session: aiohttp.ClientSession, prefill: Pool, decode: Pool, settings: Settings, metrics: RouterMetrics
    ) -> None:
        """Keep what applies to every leg; the session is for all that is no leg."""
        self.session = session
        self.http = HttpClient(settings.deadlines.connect)
        self.prefill = prefill
        self.decode = decode
        self.settings = settings
        self.metrics = metrics

    def pool_of(self, endpoint: Endpoint) -> Pool:
        """Return the pool to which ``endpoint`` belongs."""
        return self.prefill if endpoint.role == "prefill" else self.decode

    async def ask(
        self, attempt: Attempt, endpoint: Endpoint, content: Body, timeout_seconds: float, *, path: str | None = None
    ) -> bytes:
        """Send a request that does not stream and return the body of the 200.

        Raises:
            EngineFailure: the engine did not answer, or answered with a server error.
            Refusal: the engine finds fault with the client's request.
        """
        async with self._leg(attempt, endpoint, content, timeout_seconds, path=path) as (response, _, _):
            return await response.read()

    async def get(self, attempt: Attempt, endpoint: Endpoint, path: str, timeout_seconds: float) -> bytes:
        """Return the body at ``path`` of an engine, outside of any leg.

        Raises:
            EngineFailure: the engine does not answer with 200.
        """
        try:
            async with (
                asyncio.timeout(timeout_seconds),
                self.session.get(endpoint.url + path, headers=attempt.headers(endpoint)) as response,
            ):
                content = await response.read()
        except TimeoutError:
            raise EngineFailure(endpoint, "timeout", f"no answer to {path}", 504) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineFailure(endpoint, "connect", f"{type(error).__name__} {error}") from None
        if response.status != 200:
            raise EngineFailure(endpoint, "http_error", f"answered {path} with {response.status}")
        return content

    @asynccontextmanager
    async def open(
        self, attempt: Attempt, endpoint: Endpoint, content: Body, *, headers: dict[str, str] | None = None
    ) -> AsyncIterator[Answer]:
        """Send D's request and yield its answer once that has begun well.

        A stream has promised 200 before anything is known; vLLM tells failures in its first event. So that event is
        read before anything is promised to the client.

        Raises:
            EngineFailure: as in ``ask``, or the first event is an error.
            Refusal: as in ``ask``.
        """
        deadlines = self.settings.deadlines
        seconds = deadlines.first_token if attempt.exchange.streams else deadlines.answer
        async with self._leg(attempt, endpoint, content, seconds, headers=headers) as (response, deadline, leg):
            head = await self._first_event(endpoint, response) if response.content_type == EVENT_STREAM else b""
            if head:
                # From here on the time between chunks counts, see relay.py.
                deadline.reschedule(None)
            answer = Answer(response, head)
            yield answer
            if answer.broken:
                leg.outcome = "broken"

    @asynccontextmanager
    async def _leg(
        self,
        attempt: Attempt,
        endpoint: Endpoint,
        content: Body,
        timeout_seconds: float,
        *,
        headers: dict[str, str] | None = None,
        path: str | None = None,
    ) -> AsyncIterator[tuple[Response, asyncio.Timeout, LegRecord]]:
        leg = attempt.leg(endpoint)
        with self.pool_of(endpoint).busy(endpoint), self.metrics.leg(leg):
            try:
                async with asyncio.timeout(timeout_seconds) as deadline:
                    sent = attempt.headers(endpoint) | (headers or {})
                    response = await self.http.post(endpoint.url, path or attempt.exchange.path, sent, content)
                    try:
                        leg.first_byte_at, leg.status = time.time(), response.status
                        if response.status != 200:
                            raise await _rejection(endpoint, response)
                        yield response, deadline, leg
                    finally:
                        # Before the end of the body this closes the connection, which makes vLLM abort the request.
                        response.close()
                if leg.outcome == "broken":
                    endpoint.failed()
                else:
                    endpoint.succeeded()
                    leg.outcome = "ok"
            except ConnectError as error:
                endpoint.failed()
                raise _failed(endpoint, leg, "connect", str(error)) from None
            except TimeoutError:
                raise _failed(endpoint, leg, "timeout", f"no answer within {timeout_seconds:g} s", 504) from None
            except BrokenOffError as error:
                endpoint.failed()
                raise _failed(endpoint, leg, "broken", str(error)) from None
            except EngineFailure as failure:
                leg.outcome = failure.reason
                raise
            except Refusal:
                endpoint.succeeded()
                leg.outcome = "refused"
                raise
            finally:
                leg.ended_at = time.time()

    async def _first_event(self, endpoint: Endpoint, response: Response) -> bytes:
        head = b""
        while chunk := await response.read_any():
            head += chunk
            events = sse.split(head)
            if len(events) > 1 or head.endswith((b"\n\n", b"\r\n\r\n")):
                if sse.is_error(events[0]):
                    raise _failed_inside_200(endpoint, events[0])
                return head
            if len(head) > sse.MAX_EVENT_BYTES:
                break
        raise EngineFailure(endpoint, "broken", f"its stream has no whole event in {len(head)} bytes")


def _failed(endpoint: Endpoint, leg: LegRecord, reason: str, detail: str, status: int = 502) -> EngineFailure:
    leg.outcome = reason
    return EngineFailure(endpoint, reason, detail, status)


def _failed_inside_200(endpoint: Endpoint, event: bytes) -> Exception:
    status, content = sse.error_status(event), sse.payload(event)
    if status < 500:
        return Refusal(endpoint, status, content)
    detail = f"its stream begins with an error: {content[:300].decode(errors='replace')}"
    return EngineFailure(endpoint, "stream_error", detail)


async def _rejection(endpoint: Endpoint, response: Response) -> Exception:
    content = await response.read()
    text = content[:300].decode(errors="replace")
    if response.status in (429, 503):
        return EngineFailure(endpoint, "overloaded", f"answered {response.status}: {text}", 503)
    if response.status >= 500:
        return EngineFailure(endpoint, "http_error", f"answered {response.status}: {text}")
    return Refusal(endpoint, response.status, content)


def make_session(settings: Settings) -> aiohttp.ClientSession:
    """Return the session for probes, releases and the list of models; they are too rare for connections to be kept."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.deadlines.connect),
        auto_decompress=False,
    )
