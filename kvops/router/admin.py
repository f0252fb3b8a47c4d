"""The admin API, on a loopback port of its own: see, drain, add and remove engines while requests run."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from aiohttp import web

from kvops.router.endpoints import ROLES, EndpointError
from kvops.router.errors import RouterError, error_response
from kvops.router.pool import Role  # noqa: TC001 - msgspec reads the annotation
from kvops.router.state import EndpointView  # noqa: TC001 - public in the protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp.typedefs import Handler

    from kvops.router.endpoints import Sources

_MAX_BODY_BYTES = 64 * 1024
# A page in a browser on this machine could otherwise reach the port by a name that resolves to loopback.
_OWN_HOSTS = ("127.0.0.1", "localhost", "[::1]")


class Control(Protocol):
    """What the admin API works on: the router of this process, or all of its workers."""

    sources: Sources

    async def refresh(self) -> None:
        """Bring the pools to what the sources say."""

    async def views(self) -> list[EndpointView]:
        """Return the engines."""

    async def drain(self, role: Role, name: str, *, draining: bool) -> EndpointView | None:
        """Send an engine no new requests, or requests again; return it, None where there is none of that name."""

    async def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""


_CONTROL = web.AppKey("control", Control)


class _Added(msgspec.Struct, forbid_unknown_fields=True):
    role: Role
    url: str


def make_admin_app(control: Control) -> web.Application:
    """Return the admin API for ``control``."""
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_answer_errors, _check_host])
    app[_CONTROL] = control
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/openapi.json", _openapi)
    app.router.add_get("/endpoints", _list)
    app.router.add_post("/endpoints", _add)
    app.router.add_delete("/endpoints", _remove)
    app.router.add_post("/endpoints/drain", _drain)
    app.router.add_post("/endpoints/undrain", _drain)
    app.router.add_post("/reload", _reload)
    return app


@asynccontextmanager
async def serve_admin(control: Control, port: int | None) -> AsyncIterator[None]:
    """Serve the admin API on a loopback port for as long as the block runs; without a port do nothing.

    Raises:
        OSError: the port cannot be listened on.
    """
    if port is None:
        yield
        return
    runner = web.AppRunner(make_admin_app(control), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield
    finally:
        await runner.cleanup()


async def _healthz(_: web.Request) -> web.Response:
    return _json({"status": "ok"})


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(
        body=await request.app[_CONTROL].exposition(), headers={"Content-Type": "text/plain; version=0.0.4"}
    )


async def _list(request: web.Request) -> web.Response:
    return _json(await request.app[_CONTROL].views())


async def _add(request: web.Request) -> web.Response:
    control = request.app[_CONTROL]
    try:
        added = msgspec.json.decode(await request.read(), type=_Added)
    except msgspec.DecodeError as error:
        raise RouterError(400, "invalid_request_error", f"send {{role, url}}: {error}") from None
    control.sources.add(added.role, added.url)
    await control.refresh()
    return _json(await control.views(), status=201)


async def _remove(request: web.Request) -> web.Response:
    control = request.app[_CONTROL]
    control.sources.remove(_role(request), _query(request, "url"))
    await control.refresh()
    return _json(await control.views())


async def _drain(request: web.Request) -> web.Response:
    name = _query(request, "name")
    draining = request.path.endswith("/drain")
    view = await request.app[_CONTROL].drain(_role(request), name, draining=draining)
    if view is None:
        raise RouterError(404, "not_found", f"there is no engine {name!r}")
    return _json(view)


async def _reload(request: web.Request) -> web.Response:
    control = request.app[_CONTROL]
    control.sources.reload()
    await control.refresh()
    return _json(await control.views())


async def _openapi(_: web.Request) -> web.Response:
    return _json(OPENAPI)


def _role(request: web.Request) -> Role:
    role = _query(request, "role")
    for known in ROLES:
        if role == known:
            return known
    raise RouterError(400, "invalid_request_error", f"role is {role!r} but should be prefill or decode")


def _query(request: web.Request, name: str) -> str:
    value = request.query.get(name)
    if not value:
        raise RouterError(400, "invalid_request_error", f"the query has no {name}")
    return value


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _error(error: RouterError, headers: dict[str, str] | None = None) -> web.Response:
    response = error_response(error, headers)
    return web.Response(status=response.status, body=response.content, headers=response.headers)


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RouterError as error:
        return _error(error)
    except EndpointError as error:
        return _error(RouterError(error.status, "invalid_request_error", str(error)))
    except OSError as error:
        return _error(RouterError(502, "resolve_failed", f"a name could not be resolved: {error.strerror}"))
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}"
        headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        return _error(RouterError(error.status, "invalid_request_error", message), headers)


@web.middleware
async def _check_host(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.host.rpartition(":")[0] not in _OWN_HOSTS and request.host not in _OWN_HOSTS:
        raise RouterError(403, "forbidden", "the admin API answers to the loopback address only")
    return await handler(request)


def _operation(summary: str, ok: str, *, query: tuple[str, ...] = (), body: bool = False, many: bool = True) -> Any:
    endpoint: Any = {"$ref": "#/components/schemas/Endpoint"}
    schema = {"type": "array", "items": endpoint} if many else endpoint
    failure = {"description": "error", "content": _content({"$ref": "#/components/schemas/Error"})}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            ok: {"description": summary, "content": _content(schema)},
            **dict.fromkeys(("400", "404", "409", "502"), failure),
        },
    }
    if query:
        operation["parameters"] = [
            {
                "name": name,
                "in": "query",
                "required": True,
                "schema": {"type": "string", "minLength": 1}
                | ({"enum": ["prefill", "decode"]} if name == "role" else {}),
            }
            for name in query
        ]
    if body:
        operation["requestBody"] = {"required": True, "content": _content({"$ref": "#/components/schemas/NewEndpoint"})}
    return operation


def _content(schema: Any) -> Any:
    return {"application/json": {"schema": schema}}


_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
_ROLE = {"type": "string", "enum": ["prefill", "decode"]}
OPENAPI: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "kvops router admin API", "version": "1"},
    "paths": {
        "/endpoints": {
            "get": _operation("List the engines", "200"),
            "post": _operation("Add an engine", "201", body=True),
            "delete": _operation("Remove an engine; requests on it run to their end", "200", query=("role", "url")),
        },
        "/endpoints/drain": {
            "post": _operation("Send an engine no new requests", "200", query=("role", "name"), many=False)
        },
        "/endpoints/undrain": {
            "post": _operation("Send an engine requests again", "200", query=("role", "name"), many=False)
        },
        "/reload": {"post": _operation("Read the endpoints file again", "200")},
    },
    "components": {
        "schemas": {
            "Endpoint": {
                "type": "object",
                "required": ["name", "role", "state", "in_flight"],
                "properties": {
                    "name": _TEXT,
                    "role": _ROLE,
                    "state": {"type": "string", "enum": ["up", "half_open", "down", "draining"]},
                    "in_flight": _COUNT,
                    "waiting": _COUNT,
                    "kv_usage": {"type": "number"},
                    "generation": _COUNT,
                    "transfer_mode": {"type": ["string", "null"]},
                    "engine_id": {"type": ["string", "null"]},
                },
            },
            "NewEndpoint": {
                "type": "object",
                "required": ["role", "url"],
                "additionalProperties": False,
                "properties": {"role": _ROLE, "url": _TEXT},
            },
            "Error": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type"],
                        "properties": {"message": _TEXT, "type": _TEXT},
                    }
                },
            },
        }
    },
}
