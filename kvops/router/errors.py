"""What goes wrong with a request, and answers of the router itself in the shape that OpenAI clients know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvops.router.response import json_response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvops.router.pool import Endpoint
    from kvops.router.response import Response


class RouterError(Exception):
    """Becomes an OpenAI error body; the text is for the client and names no engine."""

    def __init__(self, status: int, kind: str, message: str, *, retry_after_seconds: int | None = None) -> None:
        """Keep the HTTP status, the error's ``type``, its message, and when to come again."""
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.retry_after_seconds = retry_after_seconds


class EngineFailure(Exception):  # noqa: N818
    """An engine did not do its part; another one may.

    Attributes:
        endpoint: the engine.
        reason: connect, broken, timeout, http_error, overloaded, no_handle, stream_error, restarted or kv_wait.
        status: what the client is told when nothing else helps.
    """

    def __init__(self, endpoint: Endpoint, reason: str, detail: str, status: int = 502) -> None:
        """Keep what happened; ``detail`` is for the log."""
        super().__init__(f"{endpoint.role} engine {endpoint.name}: {detail}")
        self.endpoint = endpoint
        self.reason = reason
        self.status = status

    def for_client(self) -> RouterError:
        """Return what the client is told: which role failed and how, not where."""
        role = self.endpoint.role
        texts = {
            "connect": f"the {role} engine could not be reached",
            "broken": f"the {role} engine broke off",
            "timeout": f"the {role} engine took too long",
            "overloaded": f"the {role} engine has no room for more requests",
            "no_handle": f"the {role} engine gave no usable KV handle",
        }
        message = texts.get(self.reason, f"the {role} engine failed")
        return RouterError(
            self.status, f"{role}_failed", message, retry_after_seconds=1 if self.status == 503 else None
        )


class Refusal(Exception):  # noqa: N818
    """An engine finds fault with the client's request; its own answer goes to the client."""

    def __init__(self, endpoint: Endpoint, status: int, content: bytes) -> None:
        """Keep the engine's answer."""
        super().__init__(f"{endpoint.role} engine answered {status}")
        self.status = status
        self.content = content

    def response(self, headers: Mapping[str, str]) -> Response:
        """Return the engine's answer; ``headers`` go with it."""
        return json_response(self.status, self.content, headers)


def error_content(kind: str, message: str, status: int) -> bytes:
    """Return ``{"error": {"message", "type", "param", "code"}}``."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def error_response(error: RouterError, headers: Mapping[str, str] | None = None) -> Response:
    """Return an OpenAI error body for ``error``.

    Args:
        error: what to tell.
        headers: set on the response.
    """
    sent = dict(headers or {})
    if error.retry_after_seconds is not None:
        sent["Retry-After"] = str(error.retry_after_seconds)
    return json_response(error.status, error_content(error.kind, str(error), error.status), sent)
