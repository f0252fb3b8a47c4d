"""The router as a client of the engines: one leg at a time, with its deadlines and its record."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import aiohttp

from kvops.router import sse
from kvops.router.errors import EngineFailure, Refusal
from kvops.router.http_client import BrokenOffError, ConnectError, HttpClient, LateError

if TYPE_CHECKING:
    from kvops.router.exchange import Attempt
    from kvops.router.http_client import Body, Response
    from kvops.router.metrics import RouterMetrics
    from kvops.router.pool import Endpoint, Pool
    from kvops.router.settings import Settings

log = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"


class Leg:
    """One request to an engine, as a context: from its sending until its answer is done with.

    It ends with an EngineFailure or a Refusal, whatever has gone wrong with the engine.

    Attributes:
        response: status and headers are there, the rest of the body is unread.
        head: what has been read of the body: the first event of a stream, where that was asked for.
        broken: set by the reader when a stream breaks off after some of it has gone to the client.
    """

    response: Response

    def __init__(
        self,
        engines: Engines,
        attempt: Attempt,
        endpoint: Endpoint,
        content: Body,
        timeout_seconds: float,
        *,
        path: str | None = None,
        headers: dict[str, str] | None = None,
        looks_at_first_event: bool = False,
    ) -> None:
        """Send nothing yet; see ``Engines.ask`` and ``Engines.open``."""
        self.head = b""
        self.broken = False
        self._engines, self._attempt, self._endpoint = engines, attempt, endpoint
        self._content, self._timeout_seconds, self._path, self._headers = content, timeout_seconds, path, headers
        self._looks_at_first_event = looks_at_first_event

    @property
    def streams(self) -> bool:
        """Return whether the answer is an event stream."""
        return self.response.content_type == EVENT_STREAM

    async def __aenter__(self) -> Leg:
        self._pool = self._engines.pool_of(self._endpoint)
        self._pool.begin(self._endpoint)
        self._started = time.perf_counter()
        self._record = self._attempt.leg(self._endpoint)
        try:
            await self._send()
        except BaseException as error:
            self._end(error)
            raise
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._end(error)

    async def _send(self) -> None:
        endpoint, attempt = self._endpoint, self._attempt
        headers = attempt.headers(endpoint)
        if self._headers:
            headers |= self._headers
        path = self._path or attempt.exchange.path
        self.response = response = await self._engines.http.post(
            endpoint.url, path, headers, self._content, self._timeout_seconds
        )
        self._record.first_byte_at, self._record.status = time.time(), response.status
        if response.status != 200:
            raise await _rejection(endpoint, response)
        if self._looks_at_first_event and self.streams:
            self.head = await _first_event(endpoint, response)
            # From here on the time between chunks counts, see relay.py.
            response.lift_deadline()

    def _end(self, error: BaseException | None) -> None:
        if hasattr(self, "response"):
            # Before the end of the body this closes the connection, which makes vLLM abort the request.
            self.response.close()
        record, metrics = self._record, self._engines.metrics
        failure = self._judge(error)
        record.ended_at = time.time()
        self._pool.end(self._endpoint)
        metrics.observe("kvops_router_leg_seconds", time.perf_counter() - self._started, record.role, record.engine)
        metrics.count("kvops_router_legs_total", record.role, record.engine, record.outcome)
        if failure is not None:
            raise failure from None

    def _judge(self, error: BaseException | None) -> EngineFailure | None:
        """Note how the leg has ended; return the failure that ``error`` stands for where it is none itself."""
        endpoint, record = self._endpoint, self._record
        if error is None:
            (endpoint.failed if self.broken else endpoint.succeeded)()
            record.outcome = "broken" if self.broken else "ok"
        elif isinstance(error, Refusal):
            endpoint.succeeded()
            record.outcome = "refused"
        elif isinstance(error, EngineFailure):
            record.outcome = error.reason
        elif isinstance(error, LateError):
            record.outcome = "timeout"
            return EngineFailure(endpoint, "timeout", f"no answer within {self._timeout_seconds:g} s", 504)
        elif isinstance(error, ConnectError | BrokenOffError):
            endpoint.failed()
            record.outcome = "connect" if isinstance(error, ConnectError) else "broken"
            return EngineFailure(endpoint, record.outcome, str(error))
        return None


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
        async with Leg(self, attempt, endpoint, content, timeout_seconds, path=path) as leg:
            return await leg.response.read()

    def open(
        self, attempt: Attempt, endpoint: Endpoint, content: Body, *, headers: dict[str, str] | None = None
    ) -> Leg:
        """Return D's leg, as a context that is entered once its answer has begun well.

        A stream has promised 200 before anything is known; vLLM tells failures in its first event. So that event is
        read before anything is promised to the client.

        Raises:
            EngineFailure: as in ``ask``, or the first event is an error.
            Refusal: as in ``ask``.
        """
        deadlines = self.settings.deadlines
        seconds = deadlines.first_token if attempt.exchange.streams else deadlines.answer
        return Leg(self, attempt, endpoint, content, seconds, headers=headers, looks_at_first_event=True)

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


async def _first_event(endpoint: Endpoint, response: Response) -> bytes:
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
