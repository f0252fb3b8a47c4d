"""Pull: P computes the prompt and keeps its KV, D reads it.

P's answer names the blocks; D is chosen after that, by load, and gets the client's request with that handle.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from kvops.router import bodies
from kvops.router.errors import RouterError
from kvops.router.relay import relay

if TYPE_CHECKING:
    import msgspec

    from kvops.router.bodies import Body
    from kvops.router.pool import Endpoint, Pool

log = logging.getLogger(__name__)

_JSON = {"Content-Type": "application/json"}
# The client's own credential and its trace go on to the engines; everything else stays here.
_FORWARDED_HEADERS = ("Authorization", "traceparent", "tracestate")
# Prompts of one request that P works on at a time.
_PROMPTS_AT_ONCE = 8


class PullMode:
    """Serves completions and chat completions in pull mode."""

    def __init__(self, client: aiohttp.ClientSession, prefill: Pool, decode: Pool) -> None:
        """Keep the session to the engines and the two pools."""
        self._client = client
        self._prefill = prefill
        self._decode = decode

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        """Run both legs and relay D's answer.

        When the client leaves, this coroutine is cancelled, which closes the connection to whichever engine is at
        work; vLLM then aborts the request.

        Raises:
            RouterError: an engine failed before the first byte of the answer.
            bodies.BodyError: the client's body cannot be served.
        """
        if parts := bodies.sequences(body):
            return await self._serve_sequences(request, body, parts)
        headers = _engine_headers(request)
        handle = await self._run_prefill(request, body, headers)
        if isinstance(handle, web.Response):
            return handle
        return await self._run_decode(request, bodies.decode_body(body, handle), headers, self._decode.least_loaded())

    async def _serve_sequences(self, request: web.Request, body: Body, parts: list[Body]) -> web.StreamResponse:
        """Serve a request of several sequences from D's prefix cache, primed with the KV of each prompt."""
        decode = self._decode.least_loaded()
        slots = asyncio.Semaphore(_PROMPTS_AT_ONCE)

        async def prime(part: Body) -> web.Response | None:
            async with slots:
                headers = _engine_headers(request)
                handle = await self._run_prefill(request, part, headers)
                if isinstance(handle, web.Response):
                    return handle
                content = bodies.encode(bodies.priming_body(part, handle))
                with decode.busy():
                    status, answer = await self._post(decode, request.path, content, headers, "decode")
            return None if status == 200 else _passed_on(status, answer)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(prime(part)) for part in parts]
        for refusal in filter(None, (task.result() for task in tasks)):
            return refusal
        return await self._run_decode(request, body, _engine_headers(request), decode)

    async def _run_prefill(
        self, request: web.Request, body: Body, headers: dict[str, str]
    ) -> msgspec.Raw | web.Response:
        """Return P's handle, or P's own answer where it finds fault with the client's request."""
        prefill = self._prefill.least_loaded()
        with prefill.busy():
            content = bodies.encode(bodies.prefill_body(body))
            status, answer = await self._post(prefill, request.path, content, headers, "prefill")
        if status != 200:
            if status < 500:
                return _passed_on(status, answer)
            log.warning("prefill engine %s answered %d: %.300s", prefill.url, status, answer.decode(errors="replace"))
            raise RouterError(502, "prefill_failed", f"the prefill engine answered with HTTP {status}")
        try:
            return bodies.handle_of(answer)
        except bodies.HandleError as error:
            log.warning("prefill engine %s gave no usable handle: %s", prefill.url, error)
            raise RouterError(502, "prefill_failed", f"the prefill engine gave no KV handle: {error}") from None

    async def _run_decode(
        self, request: web.Request, body: Body, headers: dict[str, str], decode: Endpoint
    ) -> web.StreamResponse:
        with decode.busy():
            try:
                async with self._client.post(
                    decode.url + request.path, data=bodies.encode(body), headers=headers
                ) as answer:
                    return await relay(request, answer, _client_headers(request, headers))
            except aiohttp.ClientError as error:
                raise _unreachable(decode, "decode", error) from None

    async def _post(
        self, endpoint: Endpoint, path: str, content: bytes, headers: dict[str, str], role: str
    ) -> tuple[int, bytes]:
        try:
            async with self._client.post(endpoint.url + path, data=content, headers=headers) as answer:
                return answer.status, await answer.read()
        except aiohttp.ClientError as error:
            raise _unreachable(endpoint, role, error) from None


def _engine_headers(request: web.Request) -> dict[str, str]:
    """Return headers for both legs of one attempt, with an id that has never been used.

    Push pairs legs by this id and a registration may outlive its request, so the client's id is never used for it.
    """
    kept = {name: request.headers[name] for name in _FORWARDED_HEADERS if name in request.headers}
    return kept | _JSON | {"X-Request-Id": uuid.uuid4().hex}


def _client_headers(request: web.Request, engine_headers: dict[str, str]) -> dict[str, str]:
    return {"X-Request-Id": request.headers.get("X-Request-Id") or engine_headers["X-Request-Id"]}


def _passed_on(status: int, content: bytes) -> web.Response:
    return web.Response(status=status, body=content, content_type="application/json")


def _unreachable(endpoint: Endpoint, role: str, error: Exception) -> RouterError:
    log.warning("%s engine %s failed: %s %s", role, endpoint.url, type(error).__name__, error)
    return RouterError(502, f"{role}_failed", f"the {role} engine could not be reached or broke off")
