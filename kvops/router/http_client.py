"""A small HTTP/1.1 client for the legs: POST a body, get the status, read the body as it comes.

A request of a client is two requests to engines, so this is where the router's time goes; with aiohttp's client a
request cost half as much again. It does what the legs need and no more: keep-alive connections, bodies with a length or
in chunks, back pressure, and a clear difference between "never sent" and "broke off".
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import httptools

if TYPE_CHECKING:
    from collections.abc import Mapping

# Below the 5 s after which vLLM's server closes an idle connection: a request must not meet the closing.
_KEEP_ALIVE_SECONDS = 3.0
# Read ahead of a slow client at most so much, then let the engine wait.
_HIGH_WATER_BYTES = 256 * 1024
_MAX_HEAD_BYTES = 64 * 1024


class ConnectError(Exception):
    """No connection came about: nothing was sent."""


class BrokenOffError(Exception):
    """The connection ended, or what came is no HTTP, before the answer was whole."""


class LateError(Exception):
    """The answer was not whole in time."""


class Body:
    """The body of a request.

    Attributes:
        data: its bytes.
        began: whether any of it may have left: before that the engine cannot know the request.
    """

    def __init__(self, data: bytes) -> None:
        """Keep the bytes."""
        self.data = data
        self.began = False


class Response:
    """An answer, readable from its first byte on.

    Attributes:
        status: HTTP status.
        headers: names in lower case.
        complete: whether all of the body has arrived.
    """

    def __init__(self, connection: Connection) -> None:
        """Wait for the head."""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self._connection = connection
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._head_bytes = 0
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._has_head = False
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def content_type(self) -> str:
        """Return the media type without parameters."""
        return self.headers.get("content-type", "application/octet-stream").partition(";")[0].strip().lower()

    @property
    def charset(self) -> str | None:
        """Return the charset parameter of the content type."""
        _, _, charset = self.headers.get("content-type", "").lower().partition("charset=")
        return charset.partition(";")[0].strip(' "') or None

    @property
    def is_awaited(self) -> bool:
        """Return whether somebody waits for the next byte."""
        return self._waiter is not None

    async def read(self) -> bytes:
        """Return all of the body that has not been read.

        Raises:
            BrokenOffError: it does not come to its end.
            LateError: it has not come to its end in time.
        """
        parts = []
        while chunk := await self.read_any():
            parts.append(chunk)
        return b"".join(parts)

    async def read_any(self) -> bytes:
        """Return what has arrived of the body, waiting for the first byte of it; nothing at the end.

        Raises:
            BrokenOffError: it broke off.
            LateError: as in ``read``.
        """
        while not self._chunks:
            if self._failure:
                raise self._failure
            if self.complete:
                return b""
            await self._wait()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        if self._buffered > _HIGH_WATER_BYTES:
            self._connection.resume()
        self._buffered = 0
        return data

    def close(self) -> None:
        """End the connection unless the answer is whole; vLLM then aborts the request."""
        self.lift_deadline()
        self._connection.finish(self)

    def set_deadline(self, seconds: float) -> None:
        """Fail the answer unless it is whole in time."""
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.fail, LateError())

    def lift_deadline(self) -> None:
        """Let the rest of the answer take as long as it wants."""
        if self._deadline is not None:
            self._deadline.cancel()

    async def wait_for_head(self) -> None:
        """Return once status and headers are there.

        Raises:
            BrokenOffError: they do not come.
            LateError: they have not come in time.
        """
        while not self._has_head:
            if self._failure:
                raise self._failure
            await self._wait()

    def fail(self, error: Exception) -> None:
        """Make whoever reads get ``error`` after what has arrived."""
        if not self.complete and self._failure is None:
            self._failure = error
            self._wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; called by httptools, like the methods below."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _MAX_HEAD_BYTES:
            raise BrokenOffError("its headers are too long")
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Take the end of the head."""
        self.status = self._connection.status
        self._has_head = True
        self._wake()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._chunks.append(body)
        self._buffered += len(body)
        if self._buffered > _HIGH_WATER_BYTES:
            self._connection.pause()
        self._wake()

    def on_message_complete(self) -> None:
        """Take the end of the body."""
        self.complete = True
        self._connection.answered()
        self._wake()


class Connection(asyncio.Protocol):
    """One connection, with at most one answer under way."""

    def __init__(self, idle: list[Connection]) -> None:
        """Remember the list of idle connections to which it returns."""
        self.closed = False
        self.idle_since = 0.0
        self._idle = idle
        self._keep = False
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._response: Response | None = None

    @property
    def status(self) -> int:
        """Return the status of the answer under way."""
        return int(self._parser.get_status_code())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse what has come."""
        if self._response is None:
            # Nobody has asked for anything.
            self._transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, BrokenOffError) as error:
            if self._response is not None:
                self._response.fail(BrokenOffError(f"its answer is no HTTP: {error}"))
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell the reader of an answer that is not whole."""
        self.closed = True
        if self._response is not None:
            self._response.fail(BrokenOffError(f"it closed the connection: {error or 'end of stream'}"))

    def send(self, head: bytes, content: bytes) -> Response:
        """Send a request and return its answer, of which nothing is there yet."""
        self._response = Response(self)
        self._parser = httptools.HttpResponseParser(self._response)
        self._keep = False
        self._transport.writelines((head, content))
        return self._response

    def answered(self) -> None:
        """Note the end of the answer."""
        self._keep = bool(self._parser.should_keep_alive())

    def pause(self) -> None:
        """Let the engine wait."""
        self._transport.pause_reading()

    def resume(self) -> None:
        """Let the engine go on."""
        if not self.closed:
            self._transport.resume_reading()

    def finish(self, response: Response) -> None:
        """Take the connection back once ``response`` is done with; once is enough."""
        if response is not self._response:
            return
        self._response = None
        if response.complete and self._keep and not self.closed:
            self.resume()
            self.idle_since = time.monotonic()
            self._idle.append(self)
        else:
            self._transport.abort()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()


class _Target:
    """An engine's address, and the connections to it that are idle."""

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        self.secure = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if self.secure else 80)
        self.host_header = parts.netloc
        self.idle: list[Connection] = []

    def take_idle(self) -> Connection | None:
        """Return a connection that the engine will not close at this moment."""
        connections = self.idle
        while connections:
            connection = connections.pop()
            if connection.closed:
                continue
            if time.monotonic() - connection.idle_since < _KEEP_ALIVE_SECONDS:
                return connection
            # The one used last stands last: the others are older still.
            for old in (connection, *connections):
                old.abort()
            connections.clear()
        return None


class HttpClient:
    """Connections to any number of engines."""

    def __init__(self, connect_seconds: float) -> None:
        """Start without a connection."""
        self._connect_seconds = connect_seconds
        self._targets: dict[str, _Target] = {}
        self._tls: ssl.SSLContext | None = None

    async def post(
        self, base_url: str, path: str, headers: Mapping[str, str], content: Body, timeout_seconds: float | None = None
    ) -> Response:
        """Send a request and return its answer as soon as the head is there; the caller closes it.

        Args:
            base_url: such as ``http://10.0.0.1:8100``.
            path: such as ``/v1/completions``.
            headers: the request's, apart from host and length.
            content: the body.
            timeout_seconds: for the whole answer, once there is a connection; None for no limit.

        Raises:
            ConnectError: there is no connection.
            BrokenOffError: the connection ended before the head was there.
            LateError: the head was not there in time.
        """
        target = self._targets.get(base_url) or self._targets.setdefault(base_url, _Target(base_url))
        connection = target.take_idle() or await self._connect(target)
        lines = [f"POST {path} HTTP/1.1\r\nHost: {target.host_header}\r\nContent-Length: {len(content.data)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape")
        content.began = True
        response = connection.send(head, content.data)
        if timeout_seconds is not None:
            response.set_deadline(timeout_seconds)
        try:
            await response.wait_for_head()
        except BaseException:
            response.close()
            raise
        return response

    def close(self) -> None:
        """Close what is idle."""
        for target in self._targets.values():
            for connection in target.idle:
                connection.abort()
        self._targets.clear()

    async def _connect(self, target: _Target) -> Connection:
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(target.idle),
                    target.host,
                    target.port,
                    ssl=self._context() if target.secure else None,
                )
        except TimeoutError:
            raise ConnectError(f"no connection within {self._connect_seconds:g} s") from None
        except OSError as error:
            raise ConnectError(str(error)) from None
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls
