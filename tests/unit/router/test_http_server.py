"""Clients that hold a connection without saying what they want, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvops.router.app import listen, make_router, served
from kvops.router.endpoints import Sources
from kvops.router.settings import Deadlines, Limits, Settings
from scripted_engines import FakeEngine, FakeFleet

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"model": "tiny", "prompt": "hi"}'
REQUEST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@asynccontextmanager
async def router(**settings: object) -> AsyncIterator[int]:
    fleet = FakeFleet()
    engines = {role: FakeEngine(fleet, role, role) for role in ("prefill", "decode")}
    for engine in engines.values():
        await engine.start()
    sources = Sources({role: [engine.url] for role, engine in engines.items()})  # type: ignore[misc]
    (listener,) = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with served(make_router(sources, Settings(**settings)), listener):  # type: ignore[arg-type]
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
        assert await status_of(reader) == 400
        writer.close()


def test_the_port_of_another_server_is_not_shared():
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", other.getsockname()[1], workers=2)
