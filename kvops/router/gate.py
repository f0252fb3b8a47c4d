"""Who may hold a connection: so many at once, and none that does not say what it wants.

aiohttp bounds the size of a head but not the time in which it comes, so a client that sends a byte now and then would
hold its connection for ever.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from kvops.router.errors import error_content

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_SECONDS = 0.5


class Gate:
    """All connections of clients.

    Attributes:
        refused: connections closed because there were too many.
        too_slow: connections closed because no whole head came in time.
    """

    def __init__(self, most: int, head_seconds: float) -> None:
        """Let in ``most`` at once, each with ``head_seconds`` for the head of a request from its first byte on."""
        self.refused = 0
        self.too_slow = 0
        self._most, self._head_seconds = most, head_seconds
        self._connections: dict[object, _Connection] = {}

    def protocol(self, make: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """Return the protocol of a new connection, which passes everything to the one that ``make`` returns."""
        return _Connection(self, make())

    def request_begins(self, inner: object) -> None:
        """Note that a head has come whole."""
        if connection := self._connections.get(inner):
            connection.in_request, connection.waiting_since = True, None

    def request_ends(self, inner: object) -> None:
        """Note that the next byte begins another head."""
        if connection := self._connections.get(inner):
            connection.in_request = False

    async def watch(self) -> None:
        """End connections whose head takes too long, for ever."""
        while True:
            # One look at all of them costs less than a timer for every request.
            await asyncio.sleep(min(_LOOK_SECONDS, self._head_seconds / 2))
            before = asyncio.get_running_loop().time() - self._head_seconds
            for connection in list(self._connections.values()):
                if connection.waiting_since is not None and connection.waiting_since < before:
                    self.too_slow += 1
                    connection.turn_away(408, "no whole request head came in time")

    def enter(self, connection: _Connection) -> bool:
        """Take the connection in if there is room for it."""
        if len(self._connections) >= self._most:
            self.refused += 1
            return False
        self._connections[connection.inner] = connection
        return True

    def leave(self, connection: _Connection) -> None:
        """Forget the connection."""
        self._connections.pop(connection.inner, None)


class _Connection(asyncio.Protocol):
    """Stands before aiohttp's protocol.

    Attributes:
        inner: aiohttp's.
        in_request: whether a request is being served, so that what comes is its body.
        waiting_since: when the head that is coming began, on the loop's clock.
    """

    def __init__(self, gate: Gate, inner: asyncio.Protocol) -> None:
        self.inner = inner
        self.in_request = False
        self.waiting_since: float | None = None
        self._gate = gate
        self._let_in = False
        self._loop = asyncio.get_running_loop()
        # Nothing else than aiohttp's own methods on the way of an answer.
        self.pause_writing, self.resume_writing = inner.pause_writing, inner.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._let_in = self._gate.enter(self)
        if self._let_in:
            self.waiting_since = self._loop.time()
            self.inner.connection_made(transport)
        else:
            self.turn_away(503, "the router has as many connections as it takes")

    def data_received(self, data: bytes) -> None:
        if not self._let_in:
            return
        if not self.in_request and self.waiting_since is None:
            self.waiting_since = self._loop.time()
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received() if self._let_in else None

    def connection_lost(self, error: Exception | None) -> None:
        if self._let_in:
            self._gate.leave(self)
            self.inner.connection_lost(error)

    def turn_away(self, status: int, message: str) -> None:
        content = error_content("overloaded" if status == 503 else "invalid_request_error", message, status)
        after = "Retry-After: 1\r\n" if status == 503 else ""
        head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n{after}"
        self._transport.write(head.encode() + b"Connection: close\r\n\r\n" + content)
        self._transport.close()
