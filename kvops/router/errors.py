"""Answers of the router itself, in the shape that OpenAI clients know."""

from __future__ import annotations

import msgspec
from aiohttp import web


class RouterError(Exception):
    """Becomes an OpenAI error body; the text is for the client and names no engine."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        """Keep the HTTP status, the error's ``type`` and its message."""
        super().__init__(message)
        self.status = status
        self.kind = kind


def error_response(status: int, kind: str, message: str) -> web.Response:
    """Return ``{"error": {"message", "type", "param", "code"}}`` with ``status``."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return web.Response(status=status, body=msgspec.json.encode({"error": error}), content_type="application/json")
