"""A small HTTP/1.1 server for the router's clients: reads a request whole, has it answered, sends the answer.

It is on the way of every request, and with a server for applications of all kinds a request cost twice the CPU. It does
what the router needs and no more: keep-alive, bodies with a length or in chunks, answers that are whole or streams. So
many connections at once, each part of a request within its time, and the head and body of bounded size.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from typing import TYPE_CHECKING, Literal, Protocol, cast

import httptools

from kvops.router.errors import RouterError, error_response
from kvops.router.response import head_of

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from kvops.router.response import Response

log = logging.getLogger(__name__)

# What a connection is at: idle between requests, its client sending a head or a body, its request being answered, its
# answer waiting for the client to read, or an answer given early while the client is still sending.
At = Literal["idle", "head", "body", "answer", "sending", "lingering"]

_MAX_HEAD_BYTES = 64 * 1024
# Requests that a client may send ahead of their answers on one connection.
_MOST_AHEAD = 16
# Longer than the 600 s for which load balancers keep a connection: so the end of it never crosses a request of theirs.
_KEEP_ALIVE_SECONDS = 620.0
# A client that gets an error while it sends reads it only if the connection is not reset under it.
_LINGER_SECONDS = 5.0
_LOOK_SECONDS = 0.5
# Connections taken in before the others have their turn; and the pause when the process has no file descriptor left.
_ACCEPTS_AT_ONCE = 64
_NO_DESCRIPTOR_SECONDS = 1.0


class ClientGoneError(Exception):
    """The client has closed the connection."""


class Handler(Protocol):
    """What answers requests."""

    def refuse(self, request: Request) -> Response | None:
        """Return what a request is refused with, judged by its head before its body is read, or None."""

    async def handle(self, request: Request) -> Response:
        """Return the answer; one whose content is None has been streamed already.

        It is cancelled when the client leaves.
        """


class Request:
    """A request.

    Attributes:
        method: such as ``POST``.
        path: without the query.
        content: the body.
        keep_alive: whether the connection may serve another one.
        refusal: what it is refused with.
        began: whether some of its answer has been sent.
    """

    def __init__(self, connection: Connection, method: str, target: bytes, headers: dict[bytes, bytes]) -> None:
        """Keep the head; ``headers`` has its names in lower case."""
        self.method = method
        self.path = _path(target)
        self.content = b""
        self.keep_alive = True
        self.refusal: Response | None = None
        self.began = False
        self._connection = connection
        self._headers = headers

    def header(self, name: str) -> str | None:
        """Return the first header of that name, which is given in lower case."""
        value = self._headers.get(name.encode())
        return None if value is None else value.decode("utf-8", "surrogateescape")

    @property
    def remote(self) -> str:
        """Return the client's address."""
        return self._connection.remote

    def abort(self) -> None:
        """Close the connection at once."""
        self._connection.abort()

    def stream(self, status: int, headers: Mapping[str, str]) -> Stream:
        """Send the head of an answer that is a stream and return that."""
        return Stream(self._connection, self, status, headers)


class Stream:
    """The body of an answer, sent as it comes about."""

    def __init__(self, connection: Connection, request: Request, status: int, headers: Mapping[str, str]) -> None:
        """Send the head."""
        self._connection = connection
        self._chunked = connection.speaks_1_1
        request.keep_alive = request.keep_alive and self._chunked
        request.began = True
        sent = {**headers, "Transfer-Encoding": "chunked"} if self._chunked else headers
        connection.write(head_of(status, sent, length=None, keep_alive=request.keep_alive))

    async def write(self, data: bytes) -> None:
        """Send ``data``, waiting while the client reads more slowly than it is written.

        Raises:
            ClientGoneError: the client has left.
        """
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        await self._connection.drain()

    def end(self) -> None:
        """Send the end."""
        if self._chunked:
            self._connection.write(b"0\r\n\r\n")


class Connection(asyncio.Protocol):
    """One client's connection; its requests are answered one after the other.

    Attributes:
        at: what it is at, since ``since`` on the loop's clock.
        speaks_1_1: whether the client understands chunks.
        task: the handler at work.
    """

    def __init__(self, server: Server) -> None:
        """Wait for the connection."""
        self.at: At = "head"
        self.speaks_1_1 = True
        self.task: asyncio.Task[None] | None = None
        self._server = server
        self._loop = asyncio.get_running_loop()
        self.since = self._loop.time()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._in_head = False
        self._arriving: Request | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._whole: deque[Request] = deque()
        self._is_last = False
        self._gone = False
        self._readable: asyncio.Future[None] | None = None

    @property
    def remote(self) -> str:
        """Return the client's address."""
        peer = self._transport.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the client in, if there is room."""
        self._transport = cast("asyncio.Transport", transport)
        if not self._server.enter(self):
            self._give_up(
                RouterError(503, "overloaded", "the router has as many connections as it takes", retry_after_seconds=1)
            )

    def connection_lost(self, _: Exception | None) -> None:
        """Stop working for a client that has left."""
        self._gone = True
        self._server.leave(self)
        if self.task is not None:
            self.task.cancel()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        """Take in what the client sends."""
        if self._is_last:
            return
        if self.at == "idle":
            self._be("head")
        self._head_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse(error_response(RouterError(400, "invalid_request_error", f"this is no HTTP request: {error}")))
            return
        # Chunks of one byte take eight; what is more is a head without end, or a trailer.
        if self._head_bytes > _MAX_HEAD_BYTES + 8 * self._body_bytes and (self._in_head or self._arriving):
            self._refuse(_head_too_large())
        elif self._arriving is not None and self._arriving.refusal is not None and self.task is None:
            # It need not send a body that nobody will read.
            self._answer_last(self._arriving.refusal)

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError("CONNECT to a server that is no proxy") from None
            # Nothing is upgraded to here, so the request is an ordinary one; but the parser has left out its body.
            head = [b"%b %b HTTP/1.1" % (self._parser.get_method(), self._target)]
            head += [b"%b: %b" % item for item in self._headers.items() if item[0] not in (b"upgrade", b"connection")]
            rest = data[upgrade.args[0] :]
            self._parser = httptools.HttpRequestParser(self)
            self._feed(b"\r\n".join([*head, b"", b""]) + rest)

    def pause_writing(self) -> None:
        """Note that the client reads too slowly."""
        if self._readable is None:
            self._readable = self._loop.create_future()

    def resume_writing(self) -> None:
        """Note that the client has caught up, or left."""
        if self._readable is not None and not self._readable.done():
            self._readable.set_result(None)
        self._readable = None

    # What the parser calls.

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._in_head = True
        self._target, self._headers, self._body, self._body_bytes = b"", {}, [], 0

    def on_url(self, url: bytes) -> None:
        """Take a part of the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; what comes behind a body is none."""
        if self._in_head:
            self._headers.setdefault(name.lower(), value)

    def on_headers_complete(self) -> None:
        """Judge the head."""
        is_large = self._head_bytes > _MAX_HEAD_BYTES and sum(map(len, self._headers.values())) > _MAX_HEAD_BYTES
        self._in_head, self._head_bytes = False, 0
        parser = self._parser
        if parser.should_upgrade():
            return
        request = Request(self, parser.get_method().decode("latin-1"), self._target, self._headers)
        self.speaks_1_1 = parser.get_http_version() != "1.0"
        request.keep_alive = parser.should_keep_alive()
        request.refusal = _head_too_large() if is_large else self._server.refuse(request)
        self._arriving = request
        if self.at == "head":
            self._be("body")
        if b"expect" in self._headers and request.refusal is None and self.task is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        request = self._arriving
        if request is None or request.refusal is not None:
            return
        self._body_bytes += len(body)
        self._head_bytes -= len(body)
        if self._body_bytes > self._server.body_bytes:
            request.refusal = self._server.too_large()
            self._body.clear()
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """Answer the request, or keep it until those before it are answered."""
        request, self._arriving, self._head_bytes = self._arriving, None, 0
        if request is None:
            return
        request.content = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        if self.task is None:
            self._begin(request)
        elif len(self._whole) < _MOST_AHEAD:
            self._whole.append(request)
        else:
            self.abort()

    # Answering.

    def _begin(self, request: Request) -> None:
        self._be("answer")
        self.task = self._loop.create_task(self._answer(request))

    async def _answer(self, request: Request) -> None:
        try:
            response = request.refusal or await self._server.handle(request)
            if response.content is not None:
                self._send(response, request)
            if self._readable is not None:
                self._be("sending")
                await self.drain()
        except ClientGoneError:
            return
        except Exception:
            log.exception("a request failed")
            self._fail(request)
            return
        self.task = None
        self._end(request)

    def _fail(self, request: Request) -> None:
        if request.began:
            self.abort()
        else:
            self._answer_last(error_response(RouterError(500, "router_error", "the router failed")))

    def _end(self, request: Request) -> None:
        if self._is_last or self._server.closing or not request.keep_alive:
            self._is_last = True
            self._transport.close()
        elif self._whole:
            self._begin(self._whole.popleft())
        else:
            self._be("body" if self._arriving else "head" if self._in_head else "idle")

    def _send(self, response: Response, request: Request) -> None:
        content = response.content or b""
        keep_alive = request.keep_alive and not self._server.closing
        head = head_of(response.status, response.headers, length=len(content), keep_alive=keep_alive)
        self.write(head if request.method == "HEAD" else head + content)

    def _refuse(self, response: Response) -> None:
        """Read nothing any more; answer what cannot be read as a request unless another one is being answered."""
        if self.task is None:
            self._answer_last(response)
        self._is_last = True

    def _answer_last(self, response: Response) -> None:
        """Answer, read nothing any more, and close when the client has had time to see the answer."""
        self._is_last = True
        content = response.content or b""
        self.write(head_of(response.status, response.headers, length=len(content), keep_alive=False) + content)
        self._be("lingering")

    def _give_up(self, error: RouterError) -> None:
        self._answer_last(error_response(error))
        self._transport.close()

    def write(self, data: bytes) -> None:
        """Send ``data``.

        Raises:
            ClientGoneError: the client has left.
        """
        if self._gone:
            raise ClientGoneError
        self._transport.write(data)

    async def drain(self) -> None:
        """Return once the client has read most of what was sent to it.

        Raises:
            ClientGoneError: the client has left.
        """
        if self._readable is not None:
            await self._readable
        if self._gone:
            raise ClientGoneError

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def end_when_idle(self) -> None:
        """Close now, or when the request that is being answered is."""
        if self.at == "idle" or (self.at == "head" and not self._in_head):
            self._transport.close()

    def too_late(self) -> None:
        """End it, for what it is at has taken too long."""
        if self.at == "head":
            self._give_up(RouterError(408, "invalid_request_error", "no whole request head came in time"))
        elif self.at == "body":
            self._give_up(RouterError(408, "invalid_request_error", "the body did not arrive in time"))
        else:
            self.abort()

    def _be(self, at: At) -> None:
        self.at, self.since = at, self._loop.time()


class Server:
    """All connections of clients.

    Attributes:
        body_bytes: the most that a body may have.
        closing: whether no further request is taken.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        connections: int,
        body_bytes: int,
        head_seconds: float,
        body_seconds: float,
        sending_seconds: float,
    ) -> None:
        """Let in ``connections`` at once, and give each so long for each part of a request."""
        self.body_bytes = body_bytes
        self.closing = False
        self.handle = handler.handle
        self._handler = handler
        self._most = connections
        self._seconds: dict[At, float] = {
            "head": head_seconds,
            "body": body_seconds,
            "sending": sending_seconds,
            "idle": _KEEP_ALIVE_SECONDS,
            "lingering": _LINGER_SECONDS,
        }
        self._connections: set[Connection] = set()
        self._listeners: list[socket.socket] = []
        self._greeting: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()

    def protocol(self) -> Connection:
        """Return the protocol of a new connection."""
        return Connection(self)

    def accept_from(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Let clients in by ``listener``.

        libuv's own listening handles take in one connection each time the loop goes round, so that under load the
        last of a few hundred new clients would wait for a second.
        """
        listener.setblocking(False)
        self._listeners.append(listener)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener, tls)

    def _accept(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                client, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("no connection can be taken in: %s", error)
                loop.remove_reader(listener)
                loop.call_later(_NO_DESCRIPTOR_SECONDS, self._accept_again, listener, tls)
                return
            task = loop.create_task(self._greet(client, tls))
            self._greeting.add(task)
            task.add_done_callback(self._greeting.discard)

    def _accept_again(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        if not self.closing:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener, tls)

    async def _greet(self, client: socket.socket, tls: ssl.SSLContext | None) -> None:
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self.protocol, client, ssl=tls)
        except OSError as error:
            # It has left again, or its TLS is none; ssl.SSLError is an OSError too.
            log.debug("a client came to nothing: %s", error)

    def enter(self, connection: Connection) -> bool:
        """Take the connection in if there is room for it."""
        if self.closing or len(self._connections) >= self._most:
            return False
        self._connections.add(connection)
        return True

    def leave(self, connection: Connection) -> None:
        """Forget the connection."""
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def refuse(self, request: Request) -> Response | None:
        """Return what a request is refused with, judged by its head, or None."""
        length = request.header("content-length")
        if length is not None and int(length) > self.body_bytes:
            return self.too_large()
        return self._handler.refuse(request)

    def too_large(self) -> Response:
        """Return the answer to a body that is too large."""
        return error_response(
            RouterError(413, "invalid_request_error", f"the body is larger than {self.body_bytes} bytes")
        )

    async def watch(self) -> None:
        """End connections that take too long, for ever."""
        while True:
            # One look at all of them costs less than a timer for every request.
            await asyncio.sleep(min(_LOOK_SECONDS, *(seconds / 2 for seconds in self._seconds.values())))
            now = asyncio.get_running_loop().time()
            for connection in list(self._connections):
                if now - connection.since > self._seconds.get(connection.at, float("inf")):
                    connection.too_late()

    async def close(self, seconds: float) -> None:
        """Let nobody in and end all connections; requests that are being answered have ``seconds`` to end."""
        self.closing = True
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        if self._greeting:
            await asyncio.wait(self._greeting, timeout=_LOOK_SECONDS)
        for task in self._greeting:
            task.cancel()
        for connection in list(self._connections):
            connection.end_when_idle()
        if self._connections:
            self._empty.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), seconds)
        tasks = [connection.task for connection in self._connections if connection.task is not None]
        for connection in list(self._connections):
            connection.abort()
        await asyncio.gather(*tasks, return_exceptions=True)


def _head_too_large() -> Response:
    return error_response(RouterError(431, "invalid_request_error", f"the head is larger than {_MAX_HEAD_BYTES} bytes"))


def _path(target: bytes) -> str:
    if not target.startswith(b"/"):
        # A proxy's client names the whole URL.
        try:
            target = httptools.parse_url(target).path or b"/"
        except httptools.HttpParserInvalidURLError:
            target = b""
    return target.partition(b"?")[0].decode("latin-1")
