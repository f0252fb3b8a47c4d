"""Fake prefill and decode engines: real HTTP servers that answer as vLLM 0.32 with a NIXL connector does.

They keep account of blocks: what P holds until D has read it, and, with bidirectional on, what D holds for the next
turn. ``fleet.held`` is empty again when nothing is stranded.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from multidict import CIMultiDict

RELEASE_MODEL = "kvops-release-blocks"
NEVER = 3600.0


@dataclass
class Call:
    """One request that an engine got."""

    engine: FakeEngine
    path: str
    headers: CIMultiDict[str]
    body: dict[str, Any]
    ended: str = "running"
    """answered, aborted (the router closed the connection) or running."""

    @property
    def id(self) -> str:
        return self.headers["X-Request-Id"]

    @property
    def params(self) -> dict[str, Any]:
        return self.body.get("kv_transfer_params") or {}


@dataclass
class FakeFleet:
    """What the engines of one test know of each other."""

    mode: str = "pull"
    digests: bool = True
    streamed_handles: bool = True
    held: dict[str, str] = field(default_factory=dict)
    """Request id on the holder -> name of the holder."""
    released: list[str] = field(default_factory=list)
    prefilled: dict[str, asyncio.Event] = field(default_factory=dict)
    engines: list[FakeEngine] = field(default_factory=list)

    def calls(self, role: str | None = None) -> list[Call]:
        return [call for engine in self.engines for call in engine.calls if role in (None, engine.role)]

    def written(self, request_id: str) -> asyncio.Event:
        """Return the event "P has written the KV of this request", in push mode."""
        return self.prefilled.setdefault(request_id, asyncio.Event())


class FakeEngine:
    """One engine.

    Attributes:
        script: what to do with the next requests, in order; ``ok`` when empty. See ``_misbehave``.
        seconds: how long an ordinary answer takes.
        tokens: texts of the generated tokens.
    """

    def __init__(self, fleet: FakeFleet, role: str, name: str) -> None:
        self.fleet, self.role, self.name = fleet, role, name
        self.engine_id = f"engine-{name}"
        self.calls: list[Call] = []
        self.script: deque[str] = deque()
        self.seconds = 0.0
        self.tokens = [" to", " be", " or", ' "kv_transfer_params":', " not"]
        self.healthy = True
        self.started_at = 1000.0
        self.oldest_wait_seconds = 0.0
        self.transfer_mode = "push" if fleet.mode == "push" else "pull"
        self.side_channel_host = "127.0.0.1"
        self._count = 0
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/completions", self._serve)
        app.router.add_post("/v1/chat/completions", self._serve)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        self.server = TestServer(app)
        fleet.engines.append(self)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    async def start(self) -> None:
        await self.server.start_server(shutdown_timeout=0.1)

    async def stop(self) -> None:
        await self.server.close()

    def served(self) -> list[Call]:
        """Return the calls that are not releases."""
        return [call for call in self.calls if call.body.get("model") != RELEASE_MODEL]

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        call = Call(self, request.path, request.headers.copy(), await request.json())
        self.calls.append(call)
        try:
            response = await self._answer(call, request)
        except asyncio.CancelledError:
            call.ended = "aborted"
            self._aborted(call)
            raise
        call.ended = "answered"
        return response

    async def _answer(self, call: Call, request: web.Request) -> web.StreamResponse:
        if call.body["model"] == RELEASE_MODEL:
            self._read_remote(call)
            self.fleet.released.append(call.params["remote_request_id"])
            return _error(404, "The model does not exist.")
        behaviour = self.script.popleft() if self.script else "ok"
        if (misbehaved := await self._misbehave(behaviour, call, request)) is not None:
            return misbehaved
        if call.params.get("do_remote_decode"):
            return await self._prefill(call, behaviour)
        return await self._decode(call, request, behaviour)

    async def _misbehave(self, behaviour: str, call: Call, request: web.Request) -> web.StreamResponse | None:
        name, _, value = behaviour.partition(":")
        if name == "status":
            if call.params.get("do_remote_prefill"):
                self._read_remote(call)
            return _error(int(value), "scripted")
        if name == "hang":
            await asyncio.sleep(NEVER)
        if name == "drop":
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(NEVER)
        if name == "sleep":
            await asyncio.sleep(float(value))
        return None

    async def _prefill(self, call: Call, behaviour: str) -> web.Response:
        if call.params.get("remote_block_ids"):
            # P has read back what D held.
            self._read_remote(call)
        await asyncio.sleep(self.seconds)
        params: dict[str, Any] | None = self._handle(call, do_remote_prefill=True, do_remote_decode=False)
        assert params is not None
        if behaviour == "no_handle":
            params = None
        elif behaviour.startswith("without:"):
            params.pop(behaviour.partition(":")[2])
        elif behaviour.startswith("with:"):
            params |= json.loads(behaviour.partition(":")[2])
        elif self.fleet.mode == "push":
            self.fleet.written(call.id).set()
        else:
            self.fleet.held[params["remote_request_id"]] = self.name
        answer = _completion(call, [" x"]) | {"kv_transfer_params": params}
        if call.body.get("return_token_ids"):
            answer["prompt_token_ids"] = [5, 6, 7]
        return web.json_response(answer)

    async def _decode(self, call: Call, request: web.Request, behaviour: str) -> web.StreamResponse:
        if call.params.get("do_remote_prefill"):
            if self.fleet.mode == "push":
                await self.fleet.written(call.params["remote_request_id"]).wait()
            else:
                self._read_remote(call)
        await asyncio.sleep(self.seconds)
        params = None
        if self.fleet.mode == "bidirectional" and call.params and behaviour != "no_handle":
            params = self._handle(call, do_remote_prefill=False, do_remote_decode=True)
        if call.body.get("stream"):
            return await self._stream(call, request, behaviour, params)
        self._hold(params)
        return web.json_response(_completion(call, self.tokens) | {"kv_transfer_params": params})

    async def _stream(
        self, call: Call, request: web.Request, behaviour: str, params: dict[str, Any] | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if behaviour.startswith("error_event"):
            code = int(behaviour.partition(":")[2] or 500)
            await response.write(_event({"error": {"message": "KV load failed", "type": "x", "code": code}}))
            await response.write(b"data: [DONE]\n\n")
            return response
        for index, token in enumerate(self.tokens):
            if behaviour == "die_mid_stream" and index == 2:
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(NEVER)
            if behaviour == "stall_mid_stream" and index == 2:
                await asyncio.sleep(NEVER)
            await response.write(_event(_chunk(call, token)))
            await asyncio.sleep(self.seconds)
        if params and self.fleet.streamed_handles and call.headers.get("X-Kvops-Handle") == "1":
            await response.write(_event(_chunk(call, None) | {"kv_transfer_params": params}))
        self._hold(params)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _hold(self, params: dict[str, Any] | None) -> None:
        if params:
            self.fleet.held[params["remote_request_id"]] = self.name

    def _handle(self, call: Call, **polarity: bool) -> dict[str, Any]:
        self._count += 1
        handle = polarity | {
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": f"{call.id}-{self._count:08x}",
            "remote_host": self.side_channel_host,
            "remote_port": 5600,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": 96,
            "remote_blocks_expiry_time": None,
            "transfer_mode": self.transfer_mode,
        }
        if self.fleet.digests and self.role == "decode":
            handle["kvops"] = {"prefix": {"tokens": 96}, "ttl_seconds": 480}
        return handle

    def _read_remote(self, call: Call) -> None:
        self.fleet.held.pop(call.params.get("remote_request_id", ""), None)

    def _aborted(self, call: Call) -> None:
        # vLLM gives P's blocks back when a D that knew of them is aborted.
        if call.params.get("do_remote_prefill"):
            self._read_remote(call)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            text=(
                f"process_start_time_seconds {self.started_at}\n"
                'vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0\n'
                'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25\n'
                'kvops_oldest_waiting_kv_age_seconds{direction="p_to_d",engine="0"} '
                f"{self.oldest_wait_seconds}\n"
                f'kvops_connector_info{{bidirectional="{str(self.fleet.mode == "bidirectional").lower()}"}} 1.0\n'
            )
        )


def _completion(call: Call, tokens: list[str]) -> dict[str, Any]:
    text = "".join(tokens)
    choice = {"message": {"content": text}} if "chat" in call.path else {"text": text}
    return {"id": f"cmpl-{call.id}", "choices": [{"index": 0, "finish_reason": "length"} | choice]}


def _chunk(call: Call, token: str | None) -> dict[str, Any]:
    choices = [] if token is None else [{"index": 0, "delta": {"content": token}}]
    return {"id": f"chatcmpl-{call.id}", "object": "chat.completion.chunk", "choices": choices}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "x", "code": status}}, status=status)


async def wait_until(condition: Callable[[], Any]) -> None:
    """Return once ``condition()`` is true; the test fails if that does not come."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")
