"""The router's HTTP server."""

from __future__ import annotations

import hmac
import logging
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from kvops.router import bodies
from kvops.router.errors import RouterError, error_response
from kvops.router.pool import Pool
from kvops.router.pull import PullMode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from aiohttp.typedefs import Handler, Middleware

log = logging.getLogger(__name__)

# A prompt of 128k tokens is under 1 MiB of text; images in a chat take more.
_MAX_BODY_BYTES = 64 * 1024 * 1024
_CONNECT_SECONDS = 5.0
_MODE = web.AppKey("mode", PullMode)
_PREFILL = web.AppKey("prefill", Pool)
_DECODE = web.AppKey("decode", Pool)
_CLIENT = web.AppKey("client", aiohttp.ClientSession)


def make_app(prefill: Sequence[str], decode: Sequence[str], api_keys: Sequence[str] = ()) -> web.Application:
    """Return the router as an aiohttp application.

    Args:
        prefill: base URLs of the prefill engines.
        decode: base URLs of the decode engines.
        api_keys: bearer tokens that are let in; empty lets everybody in.
    """
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_answer_errors, _check_key(api_keys)])
    app[_PREFILL], app[_DECODE] = Pool(prefill), Pool(decode)
    app.cleanup_ctx.append(_engine_client)
    app.router.add_post("/v1/completions", _complete)
    app.router.add_post("/v1/chat/completions", _complete)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/healthz", _healthz)
    return app


async def _engine_client(app: web.Application) -> AsyncIterator[None]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as client:
        app[_CLIENT] = client
        app[_MODE] = PullMode(client, app[_PREFILL], app[_DECODE])
        yield


async def _complete(request: web.Request) -> web.StreamResponse:
    return await request.app[_MODE].serve(request, bodies.parse(await request.read()))


async def _models(request: web.Request) -> web.Response:
    decode = request.app[_DECODE].least_loaded()
    try:
        async with request.app[_CLIENT].get(f"{decode.url}/v1/models") as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
    except aiohttp.ClientError:
        raise RouterError(502, "decode_failed", "the decode engine could not be reached") from None


async def _healthz(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RouterError as error:
        return error_response(error.status, error.kind, str(error))
    except bodies.BodyError as error:
        return error_response(400, "invalid_request_error", str(error))
    except web.HTTPRequestEntityTooLarge:
        return error_response(413, "invalid_request_error", f"the body is larger than {_MAX_BODY_BYTES} bytes")
    except web.HTTPException as error:
        return error_response(error.status, "invalid_request_error", f"{request.method} {request.path}: {error.reason}")


def _check_key(api_keys: Sequence[str]) -> Middleware:
    accepted = [f"Bearer {key}".encode() for key in api_keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "").encode()
        # Every key is compared, so that the time taken tells nothing about which one came close.
        known = [hmac.compare_digest(sent, key) for key in accepted]
        if accepted and request.path != "/healthz" and not any(known):
            return error_response(401, "authentication_error", "the API key is missing or not accepted")
        return await handler(request)

    return check


def serve(app: web.Application, host: str, port: int) -> None:
    """Serve ``app`` on ``host:port`` until SIGINT or SIGTERM."""
    import uvloop  # noqa: PLC0415

    web.run_app(
        app,
        host=host,
        port=port,
        print=lambda *_: None,
        access_log=None,
        # A client that leaves cancels its handler, and with that the request to the engine.
        handler_cancellation=True,
        loop=uvloop.new_event_loop(),
    )
