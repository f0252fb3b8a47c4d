"""An answer to a client, and how HTTP/1.1 writes it."""

from __future__ import annotations

import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_REASONS = {status.value: status.phrase for status in HTTPStatus}


class Response:
    """An answer.

    Attributes:
        status: HTTP status.
        content: the body, None for a stream that has been sent already.
        headers: apart from those that say how the body is sent.
    """

    def __init__(self, status: int, content: bytes | None, headers: Mapping[str, str] | None = None) -> None:
        """Keep them."""
        self.status = status
        self.content = content
        self.headers = headers or {}


def json_response(status: int, content: bytes, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer whose content is JSON."""
    return Response(status, content, {"Content-Type": "application/json", **(headers or {})})


def head_of(status: int, headers: Mapping[str, str], *, length: int | None, keep_alive: bool) -> bytes:
    """Return the head of an answer.

    Args:
        status: HTTP status.
        headers: those that do not say how the body is sent.
        length: bytes of the body, None where its end is marked otherwise.
        keep_alive: whether the connection serves another request after it.
    """
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '-')}\r\nDate: {_date(int(time.time()))}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    if not keep_alive:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape")


@lru_cache(maxsize=2)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
