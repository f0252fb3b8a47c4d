"""The router's HTTP server."""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
import socket
import time
from typing import TYPE_CHECKING, cast

from aiohttp import web

from kvops.router import bodies, serving
from kvops.router.admin import serve_admin
from kvops.router.auto import AutoMode
from kvops.router.bidirectional import BidirectionalMode
from kvops.router.engines import Engines, make_session
from kvops.router.errors import EngineFailure, RouterError, error_response
from kvops.router.exchange import Attempt, Exchange
from kvops.router.gate import Gate
from kvops.router.health import Watch
from kvops.router.identities import Identities
from kvops.router.journal import Journal
from kvops.router.metrics import RouterMetrics
from kvops.router.pool import Pool
from kvops.router.pull import PullMode
from kvops.router.push import PushMode
from kvops.router.relay import ClientGoneError
from kvops.router.releases import Releases
from kvops.router.shared import Own, Shared
from kvops.router.state import STATE, Router, follow

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Sequence

    from aiohttp.typedefs import Handler, Middleware

    from kvops.router.endpoints import Sources
    from kvops.router.serving import Mode
    from kvops.router.settings import Settings

log = logging.getLogger(__name__)

# Open to everybody: what load balancers ask.
_OPEN_PATHS = ("/healthz", "/readyz")
# A stream that is under way when the router is stopped may go on for so long.
SHUTDOWN_SECONDS = 30.0
BACKLOG = 4096
_GATE = web.AppKey("gate", Gate)


def make_app(sources: Sources, settings: Settings, shared: Shared | None = None) -> web.Application:
    """Return the router as an aiohttp application.

    Args:
        sources: where the engines come from.
        settings: everything else.
        shared: the state that all workers share; this process's own if left out.
    """
    app = web.Application(
        client_max_size=settings.limits.body_bytes, middlewares=[_answer_errors, _check_key(settings.api_keys)]
    )
    limits = settings.limits
    app[STATE] = Router(
        settings=settings,
        sources=sources,
        prefill=Pool("prefill", in_flight=limits.in_flight, queued=limits.queued),
        decode=Pool("decode", in_flight=limits.in_flight, queued=limits.queued),
        metrics=RouterMetrics(),
        journal=Journal(settings.journal),
        shared=shared or Own(settings),
    )
    app[_GATE] = Gate(limits.connections, settings.deadlines.head)
    app.cleanup_ctx.append(_running)
    app.router.add_post("/v1/completions", _complete)
    app.router.add_post("/v1/chat/completions", _complete)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/readyz", _readyz)
    app.router.add_get("/metrics", _metrics)
    return app


async def _running(app: web.Application) -> AsyncIterator[None]:
    router = app[STATE]
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
        watching = [asyncio.create_task(work) for work in (Watch(engines).run(), follow(router), app[_GATE].watch())]
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


async def _complete(request: web.Request) -> web.StreamResponse:
    router = request.app[STATE]
    started = time.perf_counter()
    await router.shared.admit(request.headers.get("Authorization") or request.remote or "")
    content = await _read_body(request, router.settings.deadlines.body)
    exchange = Exchange(request, bodies.parse(content), router.settings.mode)
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


async def _read_body(request: web.Request, seconds: float) -> bytes:
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        raise RouterError(408, "invalid_request_error", f"the body did not arrive within {seconds:g} s") from None


async def _models(request: web.Request) -> web.Response:
    router = request.app[STATE]
    attempt = Attempt(Exchange(request, {}, router.settings.mode))
    try:
        content = await router.engines.get(
            attempt, router.decode.choose(), "/v1/models", router.settings.deadlines.connect
        )
    except EngineFailure as failure:
        raise failure.for_client() from None
    return web.Response(body=content, content_type="application/json")


async def _healthz(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _readyz(request: web.Request) -> web.Response:
    router = request.app[STATE]
    able = {pool.role: sum(e.takes_requests() for e in pool.endpoints) for pool in (router.prefill, router.decode)}
    return web.json_response({"mode": router.settings.mode, "engines": able}, status=200 if all(able.values()) else 503)


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(
        body=await request.app[STATE].exposition_of_all(), headers={"Content-Type": "text/plain; version=0.0.4"}
    )


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    gate = request.app[_GATE]
    gate.request_begins(request.protocol)
    try:
        return await handler(request)
    except RouterError as error:
        return error_response(error)
    except bodies.BodyError as error:
        return error_response(RouterError(400, "invalid_request_error", str(error)))
    except ClientGoneError:
        # Nobody reads it; aiohttp wants a response all the same.
        return web.Response(status=499)
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[STATE].settings.limits.body_bytes
        return error_response(RouterError(413, "invalid_request_error", f"the body is larger than {limit} bytes"))
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}"
        return error_response(RouterError(error.status, "invalid_request_error", message))
    finally:
        gate.request_ends(request.protocol)


def _check_key(api_keys: Sequence[str]) -> Middleware:
    accepted = [f"Bearer {key}".encode() for key in api_keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "").encode()
        # Every key is compared, so that the time taken tells nothing about which one came close.
        known = [hmac.compare_digest(sent, key) for key in accepted]
        if accepted and request.path not in _OPEN_PATHS and not any(known):
            raise RouterError(401, "authentication_error", "the API key is missing or not accepted")
        return await handler(request)

    return check


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


async def run_app(
    app: web.Application, listener: socket.socket, *, tls: ssl.SSLContext | None = None, stop: asyncio.Event
) -> None:
    """Serve ``app`` on ``listener`` until ``stop`` is set; streams that are under way then may end."""
    # A client that leaves cancels its handler, and with that the request to the engine.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    make = cast("web.Server", runner.server)
    server = await asyncio.get_running_loop().create_server(
        lambda: app[_GATE].protocol(make), sock=listener, ssl=tls, backlog=BACKLOG
    )
    try:
        await stop.wait()
    finally:
        server.close()
        make.pre_shutdown()
        await make.shutdown(SHUTDOWN_SECONDS)
        await runner.cleanup()


def stopped_by_signal() -> asyncio.Event:
    """Return an event that SIGINT or SIGTERM sets."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def serve(
    app: web.Application, host: str, port: int, *, admin_port: int | None = None, tls: ssl.SSLContext | None = None
) -> None:
    """Serve ``app`` on ``host:port``, and the admin API on a loopback port, until SIGINT or SIGTERM.

    Raises:
        OSError: an address cannot be listened on.
    """
    import uvloop  # noqa: PLC0415

    async def run() -> None:
        (listener,) = listen(host, port)
        async with serve_admin(app[STATE], admin_port):
            await run_app(app, listener, tls=tls, stop=stopped_by_signal())

    uvloop.run(run())
