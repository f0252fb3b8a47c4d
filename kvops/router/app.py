"""The router's public port: which request goes where."""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
import socket
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from kvops.router import bodies, serving
from kvops.router.admin import serve_admin
from kvops.router.auto import AutoMode
from kvops.router.bidirectional import BidirectionalMode
from kvops.router.engines import Engines, make_session
from kvops.router.errors import EngineFailure, RouterError, error_response
from kvops.router.exchange import Attempt, Exchange
from kvops.router.health import Watch
from kvops.router.http_server import ClientGoneError, Server
from kvops.router.identities import Identities
from kvops.router.journal import Journal
from kvops.router.metrics import RouterMetrics
from kvops.router.pool import Pool
from kvops.router.pull import PullMode
from kvops.router.push import PushMode
from kvops.router.releases import Releases
from kvops.router.response import Response, json_response
from kvops.router.shared import Own, Shared
from kvops.router.state import Router, follow

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from kvops.router.endpoints import Sources
    from kvops.router.http_server import Request
    from kvops.router.serving import Mode
    from kvops.router.settings import Settings

log = logging.getLogger(__name__)

# Open to everybody: what load balancers ask.
_OPEN_PATHS = ("/healthz", "/readyz")
# A stream that is under way when the router is stopped may go on for so long.
SHUTDOWN_SECONDS = 30.0
BACKLOG = 4096


def make_router(sources: Sources, settings: Settings, shared: Shared | None = None) -> Router:
    """Return a router that does not run yet.

    Args:
        sources: where the engines come from.
        settings: everything else.
        shared: the state that all workers share; this process's own if left out.
    """
    limits = settings.limits
    return Router(
        settings=settings,
        sources=sources,
        prefill=Pool("prefill", in_flight=limits.in_flight, queued=limits.queued),
        decode=Pool("decode", in_flight=limits.in_flight, queued=limits.queued),
        metrics=RouterMetrics(),
        journal=Journal(settings.journal),
        shared=shared or Own(settings),
    )


@asynccontextmanager
async def _running(router: Router, server: Server) -> AsyncIterator[None]:
    try:
        await router.refresh()
    except OSError as error:
        # A headless service has no addresses before its first pod is ready.
        log.warning("no engine yet: %s", error)
    async with make_session(router.settings) as session:
        engines = Engines(session, router.prefill, router.decode, router.settings, router.metrics)
        releases = Releases(engines)
        router.engines = engines
        router.serving = _mode(router, releases)
        watching = [asyncio.create_task(work) for work in (Watch(engines).run(), follow(router), server.watch())]
        router.ready.set()
        yield
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await releases.close()
        engines.http.close()
        await asyncio.to_thread(router.journal.close)


def _mode(router: Router, releases: Releases) -> Mode:
    engines = router.engines
    pull = PullMode(engines, releases)
    identities = Identities(engines, releases)
    push = PushMode(engines, releases, identities)
    bidirectional = BidirectionalMode(engines, releases, pull, router.shared)
    modes: dict[str, Mode] = {
        "pull": pull,
        "push": push,
        "bidirectional": bidirectional,
        "auto": AutoMode(engines, identities, pull, push, bidirectional),
    }
    return modes[router.settings.mode]


class Front:
    """Answers the requests of the public port."""

    def __init__(self, router: Router) -> None:
        """Keep the router."""
        self._router = router
        self._accepted = [f"Bearer {key}".encode() for key in router.settings.api_keys]
        self._routes = {
            ("POST", "/v1/completions"): self._complete,
            ("POST", "/v1/chat/completions"): self._complete,
            ("GET", "/v1/models"): self._models,
            ("GET", "/healthz"): self._healthz,
            ("GET", "/readyz"): self._readyz,
            ("GET", "/metrics"): self._metrics,
        }
        self._methods = {path: method for method, path in self._routes}

    def refuse(self, request: Request) -> Response | None:
        """Return what a request is refused with, judged by its head."""
        if self._accepted and request.path not in _OPEN_PATHS and not self._is_known(request):
            return error_response(
                RouterError(401, "authentication_error", "the API key is missing or not accepted"),
                {"WWW-Authenticate": "Bearer"},
            )
        allowed = self._methods.get(request.path)
        if allowed is None:
            return error_response(RouterError(404, "invalid_request_error", f"there is no {request.path}"))
        if request.method != allowed and (request.method, allowed) != ("HEAD", "GET"):
            message = f"{request.path} takes {allowed}, not {request.method}"
            return error_response(RouterError(405, "invalid_request_error", message), {"Allow": allowed})
        return None

    def _is_known(self, request: Request) -> bool:
        sent = (request.header("authorization") or "").encode(errors="surrogateescape")
        # Every key is compared, so that the time taken tells nothing about which one came close.
        known = [hmac.compare_digest(sent, key) for key in self._accepted]
        return any(known)

    async def handle(self, request: Request) -> Response:
        """Return the answer to a request that was not refused."""
        try:
            return await self._routes[self._methods[request.path], request.path](request)
        except RouterError as error:
            return error_response(error)
        except bodies.BodyError as error:
            return error_response(RouterError(400, "invalid_request_error", str(error)))

    async def _complete(self, request: Request) -> Response:
        router = self._router
        started = time.perf_counter()
        exchange = Exchange(request, bodies.parse(request.content), router.settings.mode)
        if router.settings.limits.requests_per_second:
            await router.shared.admit(exchange.credential or request.remote)
        record = exchange.record
        try:
            response = await serving.serve(exchange, router.serving, router.engines)
            record.status = response.status
            record.outcome = record.outcome or "ok"
        except RouterError as error:
            record.status, record.outcome = error.status, error.kind
            return error_response(error, exchange.response_headers)
        except (asyncio.CancelledError, ClientGoneError):
            record.outcome = "client_gone"
            raise
        except Exception:
            record.outcome = "router_error"
            raise
        else:
            return response
        finally:
            router.finish(record, time.perf_counter() - started)

    async def _models(self, request: Request) -> Response:
        router = self._router
        attempt = Attempt(Exchange(request, {}, router.settings.mode))
        try:
            content = await router.engines.get(
                attempt, router.decode.choose(), "/v1/models", router.settings.deadlines.connect
            )
        except EngineFailure as failure:
            raise failure.for_client() from None
        return json_response(200, content)

    async def _healthz(self, _: Request) -> Response:
        return json_response(200, b'{"status":"ok"}')

    async def _readyz(self, _: Request) -> Response:
        router = self._router
        able = {
            pool.role: sum(endpoint.has_answered and endpoint.takes_requests() for endpoint in pool.endpoints)
            for pool in (router.prefill, router.decode)
        }
        content = msgspec.json.encode({"mode": router.settings.mode, "engines": able})
        return json_response(200 if all(able.values()) else 503, content)

    async def _metrics(self, _: Request) -> Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return Response(200, await self._router.exposition_of_all(), headers)


def listen(host: str, port: int, *, workers: int = 1) -> list[socket.socket]:
    """Return a listening socket for each worker, all of one address.

    Raises:
        OSError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The first one is bound alone, for with SO_REUSEPORT another router at this port would go unnoticed.
    socket.create_server((host, port), family=family).close()
    return [
        socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=workers > 1)
        for _ in range(workers)
    ]


@asynccontextmanager
async def served(router: Router, listener: socket.socket, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
    """Serve clients on ``listener`` for as long as the block runs; streams that are under way then may end."""
    settings = router.settings
    server = Server(
        Front(router),
        connections=settings.limits.connections,
        body_bytes=settings.limits.body_bytes,
        head_seconds=settings.deadlines.head,
        body_seconds=settings.deadlines.body,
        sending_seconds=settings.deadlines.idle,
    )
    async with _running(router, server):
        server.accept_from(listener, tls)
        try:
            yield
        finally:
            await server.close(SHUTDOWN_SECONDS)


def stopped_by_signal() -> asyncio.Event:
    """Return an event that SIGINT or SIGTERM sets."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def serve(
    router: Router, host: str, port: int, *, admin_port: int | None = None, tls: ssl.SSLContext | None = None
) -> None:
    """Serve ``router`` on ``host:port``, and the admin API on a loopback port, until SIGINT or SIGTERM.

    Raises:
        OSError: an address cannot be listened on.
    """
    import uvloop  # noqa: PLC0415

    async def run() -> None:
        (listener,) = listen(host, port)
        stop = stopped_by_signal()
        async with serve_admin(router, admin_port), served(router, listener, tls):
            await stop.wait()

    uvloop.run(run())
