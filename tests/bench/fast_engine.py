"""Prefill and decode engines that cost next to nothing, so that a router in front of them is the limit.

    python fast_engine.py PORT [--tokens N] [--gap-seconds S]

A bare protocol on uvloop: it looks at the request line, the length of the body, and two words in the body.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from typing import cast

import uvloop

HANDLE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(1, 65))],
    "remote_engine_id": "fast-0",
    "remote_request_id": "cmpl-0123456789abcdef0123456789abcdef-0-01234567",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 2048,
    "transfer_mode": "pull",
}
_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
_CHOICE = {"index": 0, "text": "a" * 700, "message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}
_USAGE = {"prompt_tokens": 2048, "completion_tokens": 1, "total_tokens": 2049}
_CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1764450000,'
    b'"model":"tiny","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)
_DONE = b"data: [DONE]\n\n"


def _whole(body: object) -> bytes:
    content = json.dumps(body, separators=(",", ":")).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def _frame(content: bytes) -> bytes:
    return b"%x\r\n" % len(content) + content + b"\r\n"


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_PREFILLED = _whole({"id": "cmpl-1", "choices": [_CHOICE], "usage": _USAGE, "kv_transfer_params": HANDLE})
_DECODED = _whole({"id": "cmpl-1", "object": "text_completion", "model": "tiny", "choices": [_CHOICE], "usage": _USAGE})
_READBACK = HANDLE | {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    # 128 digests of 8 bytes in base64, what the instrumented connectors send with a long prompt.
    "kvops": {"prefix": {"tokens": 2048, "block_tokens": 32, "step": 32, "digests": "A" * 1368}, "ttl_seconds": 480},
}
_DECODED_WITH_HANDLE = _whole({"id": "cmpl-1", "choices": [_CHOICE], "usage": _USAGE, "kv_transfer_params": _READBACK})
_OTHER = _whole({"object": "list", "data": [{"id": "tiny", "object": "model"}]})


class Engine(asyncio.Protocol):
    """One connection."""

    tokens = 64
    gap_seconds = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._received = b""
        self._left = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._received, 0, end)
        whole = end + 4 + (int(length[1]) if length else 0)
        if len(self._received) < whole:
            return
        request, self._received = self._received[:whole], self._received[whole:]
        self._answer(request, request[end + 4 :])

    def _answer(self, request: bytes, body: bytes) -> None:
        if not request.startswith(b"POST /v1/"):
            self._transport.write(_OTHER)
        elif b'"do_remote_decode":true' in body or b'"do_remote_decode": true' in body:
            self._transport.write(_PREFILLED)
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._left = self.tokens
            self._transport.write(_STREAM_HEAD)
            self._next()
        else:
            self._transport.write(_DECODED_WITH_HANDLE if b"conversation" in body else _DECODED)

    def _next(self) -> None:
        if self._left == 0:
            self._transport.write(_frame(_DONE) + b"0\r\n\r\n")
            return
        self._left -= 1
        self._transport.write(_frame(_CHUNK))
        loop = asyncio.get_running_loop()
        # Each token is sent on its own turn of the loop, as an engine step would.
        self._timer = loop.call_later(self.gap_seconds, self._next)


async def _run(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--gap-seconds", type=float, default=0.0)
    options = parser.parse_args()
    Engine.tokens, Engine.gap_seconds = options.tokens, options.gap_seconds
    uvloop.run(_run(options.port))


if __name__ == "__main__":
    main()
