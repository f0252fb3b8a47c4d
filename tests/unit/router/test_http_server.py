"""Clients that hold a connection without saying what they want, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvops.router import http_server
from kvops.router.app import listen, make_router, served
from kvops.router.endpoints import Sources
from kvops.router.errors import RouterError, error_response
from kvops.router.http_server import Request, Server
from kvops.router.response import Response
from kvops.router.settings import Deadlines, Limits, Settings
from scripted_engines import FakeEngine, FakeFleet, wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"model": "tiny", "prompt": "hi"}'
REQUEST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@asynccontextmanager
async def router(**given: object) -> AsyncIterator[int]:
    fleet = FakeFleet()
    engines = {role: FakeEngine(fleet, role, role) for role in ("prefill", "decode")}
    for engine in engines.values():
        await engine.start()
    sources = Sources({role: [engine.url] for role, engine in engines.items()})  # type: ignore[misc]
    (listener,) = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with served(make_router(sources, Settings(**given)), listener):  # type: ignore[arg-type]
        yield port
    for engine in engines.values():
        await engine.stop()


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for _ in range(200):
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.02)
    raise AssertionError("nobody listens")


async def status_of(reader: asyncio.StreamReader) -> int:
    return int((await reader.readline()).split()[1])


@pytest.mark.parametrize("sent", [b"", b"P", HEAD])
async def test_a_head_that_does_not_come_whole_ends_the_connection(sent):
    async with router(deadlines=Deadlines(head=0.3)) as port:
        reader, writer = await connect(port)
        writer.write(sent)
        content = await reader.read()
        assert content.startswith(b"HTTP/1.1 408")
        writer.close()


async def test_the_head_of_a_later_request_has_its_own_time():
    async with router(deadlines=Deadlines(head=0.3)) as port:
        reader, writer = await connect(port)
        writer.write(REQUEST)
        assert await status_of(reader) == 200
        await reader.readuntil(b"}]}")
        writer.write(b"POST /v1/comp")
        assert b"HTTP/1.1 408" in await reader.read()
        writer.close()


async def test_a_byte_now_and_then_does_not_prolong_the_time():
    async with router(deadlines=Deadlines(head=0.3)) as port:
        reader, writer = await connect(port)
        dripping = asyncio.create_task(drip(writer))
        assert await status_of(reader) == 408
        dripping.cancel()
        writer.close()


async def drip(writer: asyncio.StreamWriter) -> None:
    for byte in HEAD * 100:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.02)


async def test_an_answer_that_takes_longer_than_a_head_may_is_not_cut_off(start):
    setup = await start("pull", deadlines=Deadlines(head=0.2))
    setup.decode[0].script.append("sleep:0.8")
    async with setup.ask() as answer:
        assert answer.status == 200


async def test_a_kept_connection_serves_again_after_resting_longer_than_a_head_may_take():
    async with router(deadlines=Deadlines(head=0.2)) as port:
        reader, writer = await connect(port)
        for _ in range(2):
            writer.write(REQUEST)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            await asyncio.sleep(0.6)
        writer.close()


async def test_connections_beyond_the_limit_are_answered_and_room_comes_back():
    async with router(limits=Limits(connections=2)) as port:
        held = [await connect(port) for _ in range(2)]
        reader, writer = await connect(port)
        content = await reader.read()
        assert content.startswith(b"HTTP/1.1 503")
        assert b"Retry-After" in content
        writer.close()
        held[0][1].close()
        for _ in range(100):
            reader, writer = await connect(port)
            writer.write(REQUEST)
            status = await status_of(reader)
            writer.close()
            if status == 200:
                break
            await asyncio.sleep(0.02)
        assert status == 200
        held[1][1].close()


async def test_a_head_that_is_too_large_is_refused():
    async with router() as port:
        reader, writer = await connect(port)
        writer.write(HEAD + b"X-Large: " + b"a" * 65536 + b"\r\n\r\n")
        assert await status_of(reader) == 431
        writer.close()


def test_the_port_of_another_server_is_not_shared():
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", other.getsockname()[1], workers=2)


class Echo:
    """Answers with what it was sent; ``/stream`` with the body in pieces, ``/slow`` when it is told to."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.cancelled = 0
        self.served = 0

    def refuse(self, request: Request) -> Response | None:
        return error_response(RouterError(404, "x", "no such path")) if request.path == "/nothing" else None

    async def handle(self, request: Request) -> Response:
        self.served += 1
        if request.path == "/fail":
            raise RuntimeError("a bug")
        if request.path == "/slow":
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if request.path == "/large":
            return Response(200, b"x" * 8 * 2**20)
        if request.path == "/stream":
            stream = request.stream(200, {"Content-Type": "text/event-stream"})
            for at in range(0, len(request.content), 3):
                await stream.write(request.content[at : at + 3])
            stream.end()
            return Response(200, None)
        return Response(200, request.method.encode() + b" " + request.content)


@asynccontextmanager
async def echoing(**limits: float) -> AsyncIterator[tuple[Echo, int]]:
    echo = Echo()
    given: dict[str, Any] = {"connections": 8, "body_bytes": 1000, "head_seconds": 5, "body_seconds": 5}
    server = Server(echo, **given | {"sending_seconds": 5} | limits)
    (listener,) = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server.accept_from(listener, None)
    watching = asyncio.create_task(server.watch())
    try:
        yield echo, port
    finally:
        echo.go_on.set()
        await server.close(5)
        watching.cancel()


def post(path: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return status and body of the next answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split()[1])
    if b"transfer-encoding: chunked" not in head:
        return status, await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return status, body


async def test_requests_sent_ahead_are_answered_in_order():
    async with echoing() as (_, port):
        reader, writer = await connect(port)
        writer.write(post("/", b"one") + post("/stream", b"number two") + post("/", b"three"))
        assert [await answer(reader) for _ in range(3)] == [
            (200, b"POST one"),
            (200, b"number two"),
            (200, b"POST three"),
        ]
        writer.close()


async def test_too_many_requests_sent_ahead_end_the_connection():
    async with echoing() as (echo, port):
        reader, writer = await connect(port)
        writer.write(post("/slow", b"") + post("/", b"") * 17)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        assert echo.served == 1
        writer.close()


async def test_a_body_may_come_in_chunks():
    async with echoing() as (_, port):
        reader, writer = await connect(port)
        writer.write(
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n"
        )
        assert await answer(reader) == (200, b"POST abcde")
        writer.close()


async def test_a_trailer_is_passed_over():
    async with echoing() as (_, port):
        reader, writer = await connect(port)
        for _ in range(2):
            writer.write(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nX-Late: 1\r\n\r\n")
            assert await answer(reader) == (200, b"POST ab")
        writer.close()


async def test_a_trailer_without_end_is_not_kept():
    async with echoing() as (echo, port):
        reader, writer = await connect(port)
        writer.write(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nX-Late: ")
        for _ in range(3):
            writer.write(b"a" * 50_000)
            await asyncio.sleep(0.05)
        assert (await answer(reader))[0] == 431
        assert echo.served == 0
        writer.close()


@pytest.mark.parametrize("framing", [b"Content-Length: 1001", b"Transfer-Encoding: chunked"])
async def test_a_body_beyond_the_limit_is_refused_before_it_has_come(framing):
    async with echoing() as (echo, port):
        reader, writer = await connect(port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % framing)
        writer.write(b"3e9\r\n" + b"x" * 1001 if framing.startswith(b"T") else b"x")
        assert (await answer(reader))[0] == 413
        assert echo.served == 0
        writer.close()


async def test_a_refusal_by_the_head_needs_no_body():
    async with echoing() as (echo, port):
        reader, writer = await connect(port)
        writer.write(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\nExpect: 100-continue\r\n\r\n")
        assert (await answer(reader))[0] == 404
        assert echo.served == 0
        writer.close()


async def test_a_refused_request_that_is_whole_leaves_the_connection_open():
    async with echoing() as (_, port):
        reader, writer = await connect(port)
        writer.write(post("/nothing", b"abc"))
        assert (await answer(reader))[0] == 404
        writer.write(post("/", b"more"))
        assert await answer(reader) == (200, b"POST more")
        writer.close()


async def test_a_client_that_asks_first_is_told_to_go_on():
    async with echoing() as (_, port):
        reader, writer = await connect(port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hi")
        assert await answer(reader) == (200, b"POST hi")
        writer.close()


async def test_an_offer_to_upgrade_is_passed_over():
    async with echoing() as (_, port):
        reader, writer = await connect(port)
        for _ in range(2):
            writer.write(
                post("/", b"body", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AA")
            )
            assert await answer(reader) == (200, b"POST body")
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
        b"GET / HTTP/1.1\r\nX : a\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_a_400_and_the_end(sent):
    async with echoing() as (echo, port):
        reader, writer = await connect(port)
        writer.write(sent)
        assert (await answer(reader))[0] == 400
        assert echo.served == 0
        writer.close()


async def test_http_1_0_gets_a_stream_that_ends_with_the_connection():
    async with echoing() as (_, port):
        reader, writer = await connect(port)
        writer.write(post("/stream", b"0123456789", version="1.0"))
        content = await reader.read()
        assert content.endswith(b"\r\n\r\n0123456789")
        assert b"chunked" not in content
        writer.close()


async def test_head_gets_the_head_alone():
    async with echoing() as (_, port):
        reader, writer = await connect(port)
        writer.write(b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        content = await reader.read()
        assert b"Content-Length: 5\r\n" in content
        assert content.endswith(b"\r\n\r\n")
        writer.close()


async def test_a_bug_is_a_500_and_is_logged(caplog):
    async with echoing() as (_, port):
        reader, writer = await connect(port)
        writer.write(post("/fail", b""))
        assert (await answer(reader))[0] == 500
        writer.close()
    assert "a bug" in caplog.text


async def test_a_client_that_leaves_cancels_its_request():
    async with echoing() as (echo, port):
        _, writer = await connect(port)
        writer.write(post("/slow", b""))
        await wait_until(lambda: echo.served)
        writer.close()
        await wait_until(lambda: echo.cancelled)


async def test_a_client_that_reads_nothing_does_not_hold_its_connection():
    async with echoing(sending_seconds=0.3) as (echo, port):
        reader, writer = await connect(port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post("/large", b"") * 2)
        await wait_until(lambda: echo.served)
        await asyncio.sleep(1.0)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        with contextlib.suppress(ConnectionResetError):
            assert len(await reader.read()) < 8 * 2**20
        # The second answer was not begun while the first lay unread.
        assert echo.served == 1
        writer.close()


async def test_a_body_that_stops_coming_ends_the_connection():
    async with echoing(body_seconds=0.3) as (echo, port):
        reader, writer = await connect(port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
        assert (await answer(reader))[0] == 408
        assert echo.served == 0
        writer.close()


async def test_the_head_of_a_request_sent_ahead_has_its_time_once_it_is_its_turn():
    async with echoing(head_seconds=0.3) as (echo, port):
        reader, writer = await connect(port)
        writer.write(post("/slow", b"") + b"POST / HT")
        await wait_until(lambda: echo.served)
        echo.go_on.set()
        assert (await answer(reader))[0] == 200
        assert (await answer(reader))[0] == 408
        writer.close()


async def test_many_new_clients_are_let_in_at_once():
    async with echoing(connections=50) as (echo, port):
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
        for client in clients:
            client.sendall(post("/", b"hello"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert echo.served == 50
        for client in clients:
            client.close()


async def test_a_process_without_descriptors_lets_clients_in_later(monkeypatch):
    monkeypatch.setattr(http_server, "_NO_DESCRIPTOR_SECONDS", 0.05)
    async with echoing() as (_, port):
        accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

        def accept_later(listener):
            if failures:
                raise failures.pop()
            return accept(listener)

        monkeypatch.setattr(socket.socket, "accept", accept_later)
        reader, writer = await connect(port)
        writer.write(post("/", b"hello"))
        assert await answer(reader) == (200, b"POST hello")
        assert not failures
        writer.close()


class Wire(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)

    def close(self) -> None: ...

    def abort(self) -> None: ...


BODIES = st.lists(st.tuples(st.binary(max_size=30), st.booleans()), min_size=1, max_size=4)


@settings(deadline=None)
@given(bodies=BODIES, cuts=st.lists(st.integers(0, 400), max_size=8))
def test_requests_are_the_same_however_their_bytes_arrive(bodies, cuts):
    def written(body: bytes, chunked: bool) -> bytes:
        if not chunked:
            return post("/", body)
        frames = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        return b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + frames + b"0\r\n\r\n"

    async def all_served() -> bytes:
        server = Server(Echo(), connections=1, body_bytes=100, head_seconds=9, body_seconds=9, sending_seconds=9)
        connection, wire = server.protocol(), Wire()
        connection.connection_made(wire)
        whole = b"".join(written(*each) for each in bodies)
        edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
        for start, end in pairwise(edges):
            if end > start:
                connection.data_received(whole[start:end])
        for _ in range(10 * len(bodies)):
            await asyncio.sleep(0)
        return wire.sent

    sent = asyncio.run(all_served())
    assert sent.count(b"HTTP/1.1 200") == len(bodies)
    at = 0
    for body, _ in bodies:
        at = sent.index(b"\r\n\r\nPOST " + body, at) + len(body)
