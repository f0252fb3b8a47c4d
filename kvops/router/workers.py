"""Several worker processes on one port, and what they share.

Every worker has a listening socket of its own at the same address (SO_REUSEPORT), which this process keeps open too: a
connection that waits in the queue of a worker that dies is served by the worker's successor. Conversations and rate
limits live here, where every worker asks for them; so a handle is taken out once, whichever worker serves the turn.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from kvops.router import expositions
from kvops.router.admin import serve_admin
from kvops.router.app import SHUTDOWN_SECONDS, listen, stopped_by_signal
from kvops.router.conversations import Held
from kvops.router.metrics import RouterMetrics
from kvops.router.peer import Peer, PeerGoneError
from kvops.router.shared import Own
from kvops.router.state import EndpointView, follow
from kvops.router.worker import Orders

if TYPE_CHECKING:
    from pathlib import Path

    from kvops.router.endpoints import Sources
    from kvops.router.pool import Role
    from kvops.router.settings import Settings

log = logging.getLogger(__name__)

# A worker that dies once may have been unlucky; this often within a minute, and the next one will die too.
_DEATHS_TO_END = 5
_DEATHS_SECONDS = 60.0


class WorkersFailedError(Exception):
    """The workers die faster than is worth starting new ones."""


class _Worker:
    """One worker.

    Attributes:
        number: its place; a successor has the same.
        listener: its socket.
        peer: the connection to it, None until it serves.
        process: it.
        exposition: its metrics when they were last asked for.
    """

    def __init__(self, number: int, listener: socket.socket) -> None:
        self.number, self.listener = number, listener
        self.peer: Peer | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.exposition = b""


class Workers:
    """All workers, seen as one router by the admin API."""

    def __init__(self, sources: Sources, settings: Settings, listeners: list[socket.socket], tls: Any) -> None:
        """Keep what every worker is told; the limits are shared out."""
        self.sources = sources
        self._settings = settings
        self._own = Own(settings)
        self._metrics = RouterMetrics()
        self._tls: tuple[Path, Path] | None = tls
        self._drained: set[tuple[Role, str]] = set()
        self._deaths: deque[float] = deque(maxlen=_DEATHS_TO_END)
        self._departed = b""
        self._stopping = False
        self._workers = [_Worker(number, listener) for number, listener in enumerate(listeners)]

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the workers running until ``stop`` is set, then let each finish its streams.

        Raises:
            WorkersFailedError: they die again and again.
        """
        keeping = {asyncio.create_task(self._keep(worker)) for worker in self._workers}
        following = asyncio.create_task(follow(self))
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait({*keeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stopping = True
            following.cancel()
            stopping.cancel()
            await self._stop(keeping)
        for task in done - {stopping}:
            task.result()

    async def _stop(self, keeping: set[asyncio.Task[None]]) -> None:
        for worker in self._workers:
            worker.listener.close()
            if worker.process and worker.process.returncode is None:
                worker.process.terminate()
        # The workers end by themselves when their streams have, or have had their time.
        _, late = await asyncio.wait(keeping, timeout=SHUTDOWN_SECONDS + 10)
        for worker in self._workers:
            if late and worker.process and worker.process.returncode is None:
                worker.process.kill()
        await asyncio.gather(*keeping, return_exceptions=True)

    async def _keep(self, worker: _Worker) -> None:
        while not self._stopping:
            status = await self._run_one(worker)
            if self._stopping:
                return
            self._departed = expositions.merge([self._departed, expositions.totals(worker.exposition)])
            worker.exposition = b""
            log.error("worker %d ended with status %d; starting another one", worker.number, status)
            self._deaths.append(time.monotonic())
            if len(self._deaths) == _DEATHS_TO_END and self._deaths[-1] - self._deaths[0] < _DEATHS_SECONDS:
                raise WorkersFailedError(f"{_DEATHS_TO_END} workers died within {_DEATHS_SECONDS:g} s")

    async def _run_one(self, worker: _Worker) -> int:
        """Start a worker and return its exit status."""
        ours, theirs = socket.socketpair()
        numbers = worker.listener.fileno(), theirs.fileno()
        argv = (sys.executable, "-m", "kvops.router.worker", *map(str, numbers))
        # In a session of its own, so that Ctrl-C reaches it by way of this process alone.
        process = await asyncio.create_subprocess_exec(*argv, pass_fds=numbers, start_new_session=True)
        theirs.close()
        worker.process = process
        if self._stopping:
            process.terminate()
        reader, writer = await asyncio.open_connection(sock=ours)

        async def handle(name: str, value: msgspec.Raw) -> Any:
            if name == "ready":
                worker.peer = peer
                return None
            return await self._handle(worker, name, value)

        peer = Peer(reader, writer, handle)
        serving = asyncio.create_task(peer.run())
        status = await process.wait()
        worker.peer = None
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return status

    async def _handle(self, worker: _Worker, name: str, value: msgspec.Raw) -> Any:
        if name == "begin":
            return self._own.conversations.begin(msgspec.msgpack.decode(value, type=str))
        if name == "keep":
            return self._own.conversations.keep(*msgspec.msgpack.decode(value, type=tuple[str, int, Held]))
        if name == "admit":
            return self._own.rate.admit(msgspec.msgpack.decode(value, type=str))
        if name == "exposition":
            return await self.exposition()
        return self._orders(worker)

    def _orders(self, worker: _Worker) -> Orders:
        share, settings = len(self._workers), self._settings
        limits = replace(
            settings.limits,
            connections=-(-settings.limits.connections // share),
            in_flight=-(-settings.limits.in_flight // share),
            queued=-(-settings.limits.queued // share),
        )
        journal = settings.journal
        if journal is not None and worker.number:
            journal = journal.with_name(f"{journal.stem}-{worker.number}{journal.suffix}")
        return Orders(
            replace(settings, limits=limits, journal=journal), self.sources.specs, [*self._drained], self._tls
        )

    async def refresh(self) -> None:
        """Tell every worker which engines there are."""
        await self._ask_all("sources", self.sources.specs, returns=None)

    async def views(self) -> list[EndpointView]:
        """Return the engines, with the requests of all workers."""
        merged: dict[tuple[str, str], EndpointView] = {}
        for views in await self._ask_all("views", None, returns=list[EndpointView]):
            for view in views:
                known = merged.setdefault((view.role, view.name), view)
                if known is not view:
                    known.in_flight += view.in_flight
                    known.transfer_mode = known.transfer_mode or view.transfer_mode
                    known.engine_id = known.engine_id or view.engine_id
        return list(merged.values())

    async def drain(self, role: Role, name: str, *, draining: bool) -> EndpointView | None:
        """Send an engine no new requests, or requests again; return it, None where there is none of that name."""
        (self._drained.add if draining else self._drained.discard)((role, name))
        answers = await self._ask_all("drain", (role, name, draining), returns=EndpointView | None)
        found: list[EndpointView] = [view for view in answers if view is not None]
        if not found:
            self._drained.discard((role, name))
            return None
        return msgspec.structs.replace(found[0], in_flight=sum(view.in_flight for view in found))

    async def exposition(self) -> bytes:
        """Return the metrics of all workers, those that have ended included, as one router's."""
        conversations, size_bytes = self._own.size()
        self._metrics.set("kvops_router_conversations", conversations)
        self._metrics.set("kvops_router_conversation_bytes", size_bytes)
        await asyncio.gather(*map(self._scrape, self._workers))
        return expositions.merge(
            [*(worker.exposition for worker in self._workers), self._departed, self._metrics.text()]
        )

    async def _scrape(self, worker: _Worker) -> None:
        if worker.peer is not None:
            try:
                worker.exposition = await worker.peer.call("exposition", None, returns=bytes)
            except PeerGoneError:
                log.info("worker %d ended while it was asked for its metrics", worker.number)

    async def _ask_all(self, name: str, value: Any, *, returns: Any) -> list[Any]:
        """Return the answers of all workers that serve; one that starts is told everything as it begins.

        Raises:
            OSError: a worker could not do it.
        """
        peers = [worker.peer for worker in self._workers if worker.peer is not None]
        answers = await asyncio.gather(
            *(peer.call(name, value, returns=returns) for peer in peers), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, PeerGoneError):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def serve(
    sources: Sources,
    settings: Settings,
    host: str,
    port: int,
    *,
    workers: int,
    admin_port: int | None = None,
    tls: tuple[Path, Path] | None = None,
) -> None:
    """Serve with several workers on ``host:port``, and the admin API on a loopback port, until SIGINT or SIGTERM.

    Raises:
        OSError: an address cannot be listened on.
        WorkersFailedError: workers die again and again.
    """

    async def run() -> None:
        fleet = Workers(sources, settings, listen(host, port, workers=workers), tls)
        async with serve_admin(fleet, admin_port):
            await fleet.run(stopped_by_signal())

    import uvloop  # noqa: PLC0415

    uvloop.run(run())
