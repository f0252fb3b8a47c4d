from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.router.http_client import Body, BrokenOffError, ConnectError, Connection, HttpClient, LateError, Response

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Serve = Callable[[Answer], Awaitable[str]]


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = HttpClient(connect_seconds=5)
    yield client
    client.close()


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def begin(answer: Answer) -> str:
            async def answer_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                stack.callback(writer.close)
                await answer(reader, writer)

            server = await asyncio.start_server(answer_and_close, "127.0.0.1", 0)
            stack.callback(server.close)
            return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        yield begin


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


def saying(*parts: bytes) -> Answer:
    """Return a server that answers every request with the same bytes, sent in parts."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await read_request(reader):
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    return answer


async def post(client: HttpClient, url: str, content: bytes = b"{}") -> Response:
    return await client.post(url, "/v1/completions", {"Authorization": "Bearer k"}, Body(content))


async def test_a_request_is_sent_whole(client: HttpClient, serve: Serve) -> None:
    seen = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    url = await serve(answer)
    response = await post(client, url, b'{"prompt": "\xc3\xa9"}')
    assert (response.status, await response.read()) == (200, b"ok")
    host = url.removeprefix("http://")
    assert seen == [
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 16\r\nAuthorization: Bearer k\r\n\r\n".encode()
        + b'{"prompt": "\xc3\xa9"}'
    ]


class Wire(asyncio.Transport):
    """A transport on which nothing moves by itself."""

    def writelines(self, parts: Iterable[bytes]) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        pass


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    chunked=st.booleans(),
)
def test_a_body_is_the_same_however_it_arrives(chunks: list[bytes], cuts: list[int], chunked: bool) -> None:
    content = b"".join(chunks)
    if chunked:
        frames = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
        whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(frames) + b"0\r\n\r\n"
    else:
        whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content
    connection = Connection([])
    connection.connection_made(Wire())
    response = connection.send(b"", b"")
    for start, end in pairwise(sorted({0, *(cut % len(whole) for cut in cuts), len(whole)})):
        assert not response.complete
        connection.data_received(whole[start:end])
    assert (response.complete, response.status) == (True, 200)
    assert asyncio.run(response.read()) == content


async def test_a_connection_is_used_again(client: HttpClient, serve: Serve) -> None:
    connections = 0
    talk = saying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await talk(reader, writer)

    url = await serve(answer)
    for _ in range(3):
        response = await post(client, url)
        await response.read()
        response.close()
    assert connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ],
)
async def test_a_connection_that_the_engine_ends_is_not(client: HttpClient, serve: Serve, answer: bytes) -> None:
    url = await serve(saying(answer))
    for _ in range(2):
        response = await post(client, url)
        assert await response.read() == b"ok"
        response.close()


async def test_an_answer_that_is_left_ends_the_connection(client: HttpClient, serve: Serve) -> None:
    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nbegun")
        await reader.read()
        ended.set()
        writer.close()

    response = await post(client, await serve(answer))
    assert await response.read_any() == b"begun"
    response.close()
    await ended.wait()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: " + b"x" * 70_000 + b"\r\n\r\n",
    ],
)
async def test_an_answer_that_is_not_whole_is_told_from_one_that_is(
    client: HttpClient, serve: Serve, answer: bytes
) -> None:
    async def begin_and_leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        writer.close()

    url = await serve(begin_and_leave)
    with pytest.raises(BrokenOffError):
        await (await post(client, url)).read()


async def test_nobody_there_is_no_connection_and_nothing_is_sent(client: HttpClient) -> None:
    body = Body(b"{}")
    with pytest.raises(ConnectError):
        await client.post("http://127.0.0.1:1", "/", {}, body)
    assert not body.began


async def test_an_engine_is_made_to_wait_for_a_slow_reader(client: HttpClient, serve: Serve) -> None:
    sent = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 * 2**20))
        for _ in range(64):
            writer.write(b"x" * 2**20)
            await writer.drain()
            sent += 1

    response = await post(client, await serve(answer))
    for _ in range(50):
        await asyncio.sleep(0.01)
    assert sent < 32
    assert len(await response.read()) == 64 * 2**20
    response.close()


async def test_an_answer_that_is_not_whole_in_time_is_given_up(client: HttpClient, serve: Serve) -> None:
    url = await serve(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"))
    response = await client.post(url, "/", {}, Body(b"{}"), 0.1)
    with pytest.raises(LateError):
        await response.read()
    response.close()
