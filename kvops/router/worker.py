"""One of several processes that serve clients on one port: ``python -m kvops.router.worker LISTEN_FD CONTROL_FD``.

The process that started it keeps what all workers share, and tells it what to serve.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from pathlib import Path  # noqa: TC003 - msgspec reads the annotation
from typing import TYPE_CHECKING, Any

import msgspec

from kvops.router.app import make_router, served, stopped_by_signal
from kvops.router.endpoints import Sources
from kvops.router.peer import Peer
from kvops.router.pool import Role
from kvops.router.settings import Settings  # noqa: TC001 - likewise
from kvops.router.shared import Remote
from kvops.router.tls import server_context

if TYPE_CHECKING:
    from kvops.router.state import Router


class Orders(msgspec.Struct):
    """What a worker is told as it starts.

    Attributes:
        settings: with its share of the limits.
        specs: the engines of each role.
        drained: role and name of engines that get no new requests.
        tls: files of the certificate chain and its key.
    """

    settings: Settings
    specs: dict[Role, list[str]]
    drained: list[tuple[Role, str]]
    tls: tuple[Path, Path] | None


async def run(listener: socket.socket, control: socket.socket) -> None:
    """Serve until told to stop, or until the process that gave the sockets is gone."""
    stop = stopped_by_signal()
    reader, writer = await asyncio.open_connection(sock=control)
    handler = _Handler()
    peer = Peer(reader, writer, handler.handle)
    running = asyncio.create_task(peer.run())
    running.add_done_callback(lambda _: stop.set())
    orders = await peer.call("hello", None, returns=Orders)
    router = make_router(Sources(orders.specs), orders.settings, Remote(peer, orders.settings))

    async def exposition_of_all() -> bytes:
        text: bytes = await peer.call("exposition", None, returns=bytes)
        return text

    async def begin() -> None:
        # The engines are known once it runs.
        await router.ready.wait()
        for role, name in orders.drained:
            await router.drain(role, name, draining=True)
        handler.router = router
        await peer.call("ready", None, returns=None)

    router.exposition_of_all = exposition_of_all
    beginning = asyncio.create_task(begin())
    async with served(router, listener, server_context(*orders.tls) if orders.tls else None):
        await stop.wait()
    beginning.cancel()
    running.cancel()


class _Handler:
    """Does what the other process asks for."""

    router: Router | None = None

    async def handle(self, name: str, value: msgspec.Raw) -> Any:
        if self.router is None:
            raise OSError(0, "the worker is starting")
        if name == "exposition":
            return await self.router.exposition()
        if name == "views":
            return await self.router.views()
        if name == "drain":
            role, engine, draining = msgspec.msgpack.decode(value, type=tuple[Role, str, bool])
            return await self.router.drain(role, engine, draining=draining)
        self.router.sources = Sources(msgspec.msgpack.decode(value, type=dict[Role, list[str]]))
        return await self.router.refresh()


def main() -> None:
    """Run the worker with the file descriptors of its arguments."""
    import uvloop  # noqa: PLC0415

    listener, control = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    uvloop.run(run(listener, control))


if __name__ == "__main__":
    main()
