"""Passing an engine's answer on to the client, byte for byte as it arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Mapping

EVENT_STREAM = "text/event-stream"


async def relay(request: web.Request, answer: aiohttp.ClientResponse, headers: Mapping[str, str]) -> web.StreamResponse:
    """Send status, content type and body of ``answer`` to the client and return the finished response.

    An engine that dies in the middle of a stream has already promised 200, so the client learns of it as vLLM itself
    would tell: an ``error`` event, then ``[DONE]``. Any other body is cut off, which no client takes for a whole one.

    Args:
        request: the client's request.
        answer: the engine's answer, its body unread.
        headers: set on the response.
    """
    response = web.StreamResponse(status=answer.status, headers=headers)
    response.content_type = answer.content_type
    response.charset = answer.charset
    if answer.content_length is not None:
        response.content_length = answer.content_length
    await response.prepare(request)
    try:
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    except aiohttp.ClientError:
        if answer.content_type != EVENT_STREAM:
            if request.transport is not None:
                request.transport.abort()
            return response
        error = {"message": "the decode engine broke off", "type": "decode_failed", "param": None, "code": 502}
        await response.write(b"data: " + msgspec.json.encode({"error": error}) + b"\n\ndata: [DONE]\n\n")
    await response.write_eof()
    return response
