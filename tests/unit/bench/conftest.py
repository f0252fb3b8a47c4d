from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvops.bench.results import Leg


class Fleet:
    """A router and its two engines in one server: answers as vLLM streams, counts as vLLM counts."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.behaviour = "ok"
        self.seconds = 0.0
        self.moves_kv = True
        self.late_reads = 0
        self.tokens = 0
        self.aborted = 0
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    def leg(self, name: str = "pull", **fields: Any) -> Leg:
        return Leg(name=name, mode="pull", router=self.url, prefill=(), decode=(self.url,), **fields)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 8192}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        source = "external_kv_transfer" if self.moves_kv else "local_compute"
        text = (
            "# TYPE vllm:prompt_tokens_by_source counter\n"
            f'vllm:prompt_tokens_by_source_total{{source="{source}"}} {self.tokens}\n'
            "# TYPE vllm:nixl_bytes_transferred histogram\n"
            f"vllm:nixl_bytes_transferred_sum {self.tokens * 2048 if self.moves_kv else 0}\n"
            "# TYPE vllm:nixl_num_notifications_after_expiry counter\n"
            f"vllm:nixl_num_notifications_after_expiry_total {self.late_reads if self.tokens else 0}\n"
        )
        return web.Response(text=text)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers.copy())
        if self.behaviour == "status":
            return web.json_response({"error": {"message": "no"}}, status=503)
        self.tokens += len(body["prompt"])
        await asyncio.sleep(self.seconds)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = body["max_tokens"] - (self.behaviour == "short")
        for index in range(count):
            if self.behaviour == "error" and index == 1:
                await _send(response, {"error": {"message": "KV load failed", "code": 500}})
                break
            await _send(response, {"choices": [{"index": 0, "text": "x", "token_ids": [7 + index % 3]}]})
        await _send(
            response, {"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}}
        )
        if self.behaviour != "cut":
            await response.write(b"data: [DONE]\n\n")
        return response


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    await made.server.start_server()
    yield made
    await made.server.close()
