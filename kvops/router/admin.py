"""The admin API, on a loopback port of its own: see, drain, add and remove engines while requests run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from kvops.router.endpoints import EndpointError
from kvops.router.errors import RouterError, error_response
from kvops.router.pool import Role  # noqa: TC001 - msgspec reads the annotation
from kvops.router.state import STATE, Router

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler

    from kvops.router.pool import Endpoint, Pool

_MAX_BODY_BYTES = 64 * 1024
# A page in a browser on this machine could otherwise reach the port by a name that resolves to loopback.
_OWN_HOSTS = ("127.0.0.1", "localhost", "[::1]")


class EndpointView(msgspec.Struct):
    """An engine as the admin API shows it."""

    name: str
    role: Role
    state: str
    in_flight: int
    waiting: int
    kv_usage: float
    generation: int
    transfer_mode: str | None
    engine_id: str | None


class _Added(msgspec.Struct, forbid_unknown_fields=True):
    role: Role
    url: str


def make_admin_app(router: Router) -> web.Application:
    """Return the admin API for ``router``."""
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_answer_errors, _check_host])
    app[STATE] = router
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


async def _healthz(_: web.Request) -> web.Response:
    return _json({"status": "ok"})


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[STATE].exposition(), headers={"Content-Type": "text/plain; version=0.0.4"})


async def _list(request: web.Request) -> web.Response:
    return _json(_views(request.app[STATE]))


async def _add(request: web.Request) -> web.Response:
    router = request.app[STATE]
    try:
        added = msgspec.json.decode(await request.read(), type=_Added)
    except msgspec.DecodeError as error:
        raise RouterError(400, "invalid_request_error", f"send {{role, url}}: {error}") from None
    router.sources.add(added.role, added.url)
    await router.refresh()
    return _json(_views(router), status=201)


async def _remove(request: web.Request) -> web.Response:
    router = request.app[STATE]
    pool, spec = _pool(request), _query(request, "url")
    router.sources.remove(pool.role, spec)
    await router.refresh()
    return _json(_views(router))


async def _drain(request: web.Request) -> web.Response:
    name = _query(request, "name")
    endpoint = _pool(request).find(name)
    if endpoint is None:
        raise RouterError(404, "not_found", f"there is no engine {name!r}")
    endpoint.draining = request.path.endswith("/drain")
    return _json(_view(endpoint))


async def _reload(request: web.Request) -> web.Response:
    router = request.app[STATE]
    router.sources.reload()
    await router.refresh()
    return _json(_views(router))


async def _openapi(_: web.Request) -> web.Response:
    return _json(OPENAPI)


def _views(router: Router) -> list[EndpointView]:
    return [_view(endpoint) for pool in (router.prefill, router.decode) for endpoint in pool.endpoints]


def _view(endpoint: Endpoint) -> EndpointView:
    return EndpointView(
        name=endpoint.name,
        role=endpoint.role,
        state=endpoint.state,
        in_flight=endpoint.in_flight,
        waiting=endpoint.waiting,
        kv_usage=endpoint.kv_usage,
        generation=endpoint.generation,
        transfer_mode=endpoint.transfer_mode,
        engine_id=endpoint.identity.engine_id if endpoint.identity else None,
    )


def _pool(request: web.Request) -> Pool:
    router, role = request.app[STATE], _query(request, "role")
    for pool in (router.prefill, router.decode):
        if pool.role == role:
            return pool
    raise RouterError(400, "invalid_request_error", f"role is {role!r} but should be prefill or decode")


def _query(request: web.Request, name: str) -> str:
    value = request.query.get(name)
    if not value:
        raise RouterError(400, "invalid_request_error", f"the query has no {name}")
    return value


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RouterError as error:
        return error_response(error)
    except EndpointError as error:
        return error_response(RouterError(400, "invalid_request_error", str(error)))
    except OSError as error:
        return error_response(RouterError(502, "resolve_failed", f"a name could not be resolved: {error.strerror}"))
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}"
        headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        return error_response(RouterError(error.status, "invalid_request_error", message), headers)


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
            **dict.fromkeys(("400", "404", "502"), failure),
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
