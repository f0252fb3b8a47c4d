"""Server-sent events as vLLM writes them, looked at without changing what the client gets.

Events are cut at the blank lines between them and passed on as bytes. Only an event that carries a KV handle is
touched: handles are for the router and never reach a client.
"""

from __future__ import annotations

import re

import msgspec

from kvops.router.bodies import KV_TRANSFER_PARAMS, cut_member, is_null

# A handle of a prompt of a million tokens is about 400 KB; an event larger than this is no event of vLLM's.
MAX_EVENT_BYTES = 8 * 1024 * 1024
_MARK = f'"{KV_TRANSFER_PARAMS}"'.encode()
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_PREFIX = b"data:"


class EventTooLargeError(ValueError):
    """The stream holds no blank line for ``MAX_EVENT_BYTES``: it is no event stream."""


class Events:
    """Cuts a byte stream into whole events and takes the handles out.

    Attributes:
        handle: the last handle seen.
        failed: whether an ``error`` event has gone by.
        done: whether ``[DONE]`` has gone by.
    """

    def __init__(self) -> None:
        """Begin at the start of a stream."""
        self.handle: msgspec.Raw | None = None
        self.failed = False
        self.done = False
        self._tail = b""

    def feed(self, chunk: bytes) -> bytes:
        """Return what of the stream up to the end of ``chunk`` may go to the client now: whole events.

        Raises:
            EventTooLargeError: the stream is no event stream.
        """
        data = self._tail + chunk if self._tail else chunk
        if data.endswith(b"\n\n"):
            self._tail = b""
        else:
            end = _end_of_last_event(data)
            data, self._tail = data[:end], data[end:]
            if len(self._tail) > MAX_EVENT_BYTES:
                raise EventTooLargeError(f"no end of an event in {len(self._tail)} bytes")
        self.done = self.done or data.endswith(b"data: [DONE]\n\n")
        # Both searches cost less than a microsecond, against ten for decoding every event.
        self.failed = self.failed or (b'"error"' in data and any(map(is_error, split(data))))
        return b"".join(map(self._without_handle, split(data))) if _MARK in data else data

    def end(self) -> bytes:
        """Return what is left at the end of the stream: nothing, or an event that broke off."""
        tail, self._tail = self._tail, b""
        return b"" if _MARK in tail else tail

    def _without_handle(self, event: bytes) -> bytes:
        if _MARK not in event:
            return event
        text = payload(event)
        try:
            rest, raw = cut_member(text, KV_TRANSFER_PARAMS)
            only_handle = msgspec.json.decode(rest, type=_Chunk)
        except ValueError:
            return event
        if raw is None:
            return event
        if not is_null(raw):
            self.handle = raw
        if not only_handle.choices and only_handle.usage is None:
            # Blank lines before the event belong to what was sent before it.
            return event[: len(event) - len(event.lstrip(b"\r\n"))]
        start = event.index(text)
        return event[:start] + rest + event[start + len(text) :]


def split(data: bytes) -> list[bytes]:
    """Return the events of ``data``, each with the blank line that ends it; the last may have none."""
    ends = [match.end() for match in _BLANK_LINE.finditer(data)]
    starts = [0, *ends]
    return [data[start:end] for start, end in zip(starts, [*ends, len(data)], strict=True) if end > start]


def is_error(event: bytes) -> bool:
    """Return whether an event is vLLM's way of telling, inside a 200, that the request failed."""
    if b'"error"' not in event:
        return False
    try:
        return not is_null(msgspec.json.decode(payload(event), type=dict[str, msgspec.Raw]).get("error"))
    except msgspec.DecodeError:
        return False


def error_status(event: bytes) -> int:
    """Return the HTTP status that an error event would have had, 500 where it does not say."""
    try:
        code = msgspec.json.decode(payload(event), type=_ErrorEvent).error.code
    except msgspec.DecodeError:
        return 500
    return code if isinstance(code, int) and 400 <= code < 600 else 500


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: dict[str, msgspec.Raw] | None = None


class _Error(msgspec.Struct):
    code: int | str | None = None


class _ErrorEvent(msgspec.Struct):
    error: _Error


def _end_of_last_event(data: bytes) -> int:
    ends = [at + len(blank) for blank in (b"\n\n", b"\n\r\n") if (at := data.rfind(blank)) >= 0]
    return max(ends, default=0)


def payload(event: bytes) -> bytes:
    """Return the text after ``data:`` of an event of one line, which is all that vLLM writes."""
    start = event.find(_PREFIX)
    return event[start + len(_PREFIX) :].strip() if start >= 0 else b""
