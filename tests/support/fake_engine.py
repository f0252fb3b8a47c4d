"""A stand-in for one vLLM engine where a test is about the processes or the router around it, not about KV.

It speaks what kvops reads of vLLM: /health, /metrics, /v1/models, completions and chat, streamed or whole, and the KV
handle of P with what D counts when it is given one. Run as a script it is a process of its own:

    python fake_engine.py --port 8100 --role prefill [--child] [--ignore-term] [--start-seconds S] [--exit-after S]
                          [--log-line TEXT] [--wrong-answer] [--ignore-handles]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import signal
import subprocess
import sys
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

TOKENS_PER_BLOCK = 32
KV_BYTES_PER_TOKEN = 2048


class FakeEngine:
    """One engine; ``requests`` keeps every body it was sent, ``headers`` the headers beside them."""

    def __init__(self, role: str, *, wrong_answer: bool = False, ignore_handles: bool = False) -> None:
        self.role = role
        self.wrong_answer = wrong_answer
        self.ignore_handles = ignore_handles
        self.requests: list[dict[str, Any]] = []
        self.headers: list[CIMultiDict[str]] = []
        self.aborted = 0
        self.stall = asyncio.Event()
        """Clear it to hold answers back."""
        self.stall.set()
        self.status = 200
        self.break_after_chunks: int | None = None
        self.counts = {"transferred": 0, "computed": 0, "bytes": 0, "requests": 0}

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/metrics/", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "kvops-tiny", "object": "model"}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        labels = 'engine="0",model_name="kvops-tiny"'
        lines = [
            "# TYPE vllm:prompt_tokens_by_source counter",
            f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}} {self.counts["computed"]}',
            f'vllm:prompt_tokens_by_source_total{{{labels},source="external_kv_transfer"}} {self.counts["transferred"]}',
            "# TYPE vllm:nixl_bytes_transferred histogram",
            f'vllm:nixl_bytes_transferred_bucket{{{labels},le="+Inf"}} {self.counts["bytes"] and 1}',
            f"vllm:nixl_bytes_transferred_count{{{labels}}} {self.counts['bytes'] and 1}",
            f"vllm:nixl_bytes_transferred_sum{{{labels}}} {self.counts['bytes']}",
            "# TYPE vllm:request_success counter",
            f'vllm:request_success_total{{{labels},finished_reason="length"}} {self.counts["requests"]}',
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(request.headers.copy())
        try:
            await self.stall.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        if self.status != 200:
            error = {"error": {"message": "scripted failure", "type": "Scripted", "param": None, "code": self.status}}
            return web.json_response(error, status=self.status)
        prompt = json.dumps(body.get("messages") or body.get("prompt"))
        self._count(body.get("kv_transfer_params") or {}, len(prompt))
        answer = self._answer(prompt)
        if body.get("stream"):
            return await self._stream(request, answer)
        return web.json_response(self._whole(request, body, prompt, answer))

    def _count(self, handle: dict[str, Any], prompt_tokens: int) -> None:
        self.counts["requests"] += 1
        if handle.get("do_remote_prefill") and not self.ignore_handles:
            self.counts["transferred"] += prompt_tokens
            self.counts["bytes"] += prompt_tokens * KV_BYTES_PER_TOKEN
        else:
            self.counts["computed"] += prompt_tokens

    def _answer(self, prompt: str) -> str:
        return "wrong" if self.wrong_answer else hashlib.sha256(prompt.encode()).hexdigest()[:16]

    def _whole(self, request: web.Request, body: dict[str, Any], prompt: str, answer: str) -> dict[str, Any]:
        message = {"text": answer, "message": {"role": "assistant", "content": answer}}
        handle = None
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            blocks = -(-len(prompt) // TOKENS_PER_BLOCK)
            handle = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [list(range(1, blocks + 1))],
                "remote_engine_id": "fake-prefill-0",
                "remote_request_id": f"cmpl-{request.headers.get('X-Request-Id', '0')}-0-00000000",
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
                "tp_size": 1,
                "remote_num_tokens": len(prompt),
            }
        return {
            "id": f"cmpl-{request.headers.get('X-Request-Id', '0')}",
            "object": "text_completion",
            "model": "kvops-tiny",
            "choices": [{"index": 0, "finish_reason": "length", **message}],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": 16, "total_tokens": len(prompt) + 16},
            "kv_transfer_params": handle,
        }

    async def _stream(self, request: web.Request, answer: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for index, character in enumerate(answer):
            if index == self.break_after_chunks and request.transport:
                request.transport.abort()
                return response
            chunk = {"choices": [{"index": 0, "text": character, "delta": {"content": character}}]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def _run(options: argparse.Namespace) -> None:
    if options.exit_after is not None:
        asyncio.get_running_loop().call_later(options.exit_after, sys.exit, 3)
    await asyncio.sleep(options.start_seconds)
    engine = FakeEngine(options.role, wrong_answer=options.wrong_answer, ignore_handles=options.ignore_handles)
    runner = web.AppRunner(engine.app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    print("Application startup complete.", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--role", required=True)
    parser.add_argument("--start-seconds", type=float, default=0)
    parser.add_argument("--exit-after", type=float)
    parser.add_argument("--child", action="store_true", help="leave a grandchild in a session of its own")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--log-line", default="")
    parser.add_argument("--wrong-answer", action="store_true")
    parser.add_argument("--ignore-handles", action="store_true")
    options = parser.parse_args()
    if options.log_line:
        print(options.log_line, flush=True)
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.child:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    asyncio.run(_run(options))


if __name__ == "__main__":
    main()
