"""Calls between a router and its workers, in both directions over one socket pair.

A message is its length in four bytes, then msgpack of its number, a name and a value. A reply has the number of the
call and no name, or the name of an error.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from kvops.router.errors import RouterError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = Callable[[str, msgspec.Raw], Awaitable[Any]]

log = logging.getLogger(__name__)

_LENGTH_BYTES = 4
_REPLY, _ROUTER_ERROR, _OS_ERROR = "", "!router", "!os"


class PeerGoneError(ConnectionError):
    """The process at the other end has ended."""


class _Message(msgspec.Struct, array_like=True):
    number: int
    name: str
    value: msgspec.Raw


_encode = msgspec.msgpack.Encoder(enc_hook=str).encode
_decode = msgspec.msgpack.Decoder(_Message).decode


class Peer:
    """One end of the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler) -> None:
        """Keep the connection.

        Args:
            reader: what the other end says.
            writer: to the other end.
            handler: given name and value of a call, returns its result; RouterError and OSError go to the caller.
        """
        self._reader, self._writer, self._handler = reader, writer, handler
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[_Message]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._gone = False

    async def call(self, name: str, value: Any, *, returns: Any) -> Any:
        """Return the other end's answer as the type ``returns``.

        Raises:
            RouterError: the call failed there; OSError likewise.
            PeerGoneError: there is no other end any more.
        """
        if self._gone:
            raise PeerGoneError("the other process has ended")
        number = next(self._numbers)
        future: asyncio.Future[_Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._send(number, "call:" + name, value)
            reply = await future
        finally:
            del self._waiting[number]
        if reply.name == _ROUTER_ERROR:
            status, kind, message, after = msgspec.msgpack.decode(reply.value)
            raise RouterError(status, kind, message, retry_after_seconds=after)
        if reply.name == _OS_ERROR:
            raise OSError(*msgspec.msgpack.decode(reply.value))
        # The one type here that msgspec does not know is Path.
        return msgspec.msgpack.decode(reply.value, type=returns, dec_hook=lambda kind, value: kind(value))

    async def run(self) -> None:
        """Serve calls and take in replies until the other end is gone."""
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES))
                self._take_in(_decode(await self._reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._gone = True
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(PeerGoneError("the other process has ended"))
            self._writer.close()

    def _take_in(self, message: _Message) -> None:
        if message.name.startswith("call:"):
            task = asyncio.get_running_loop().create_task(self._serve(message))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
        elif (future := self._waiting.get(message.number)) is not None and not future.done():
            future.set_result(message)

    async def _serve(self, message: _Message) -> None:
        try:
            result = await self._handler(message.name.removeprefix("call:"), message.value)
        except RouterError as error:
            self._send(message.number, _ROUTER_ERROR, (error.status, error.kind, str(error), error.retry_after_seconds))
        except OSError as error:
            self._send(message.number, _OS_ERROR, (error.errno or 0, error.strerror or str(error)))
        except Exception:
            # Whoever asked would wait for ever.
            log.exception("%s failed", message.name)
            self._send(message.number, _OS_ERROR, (0, f"{message.name} failed"))
        else:
            self._send(message.number, _REPLY, result)

    def _send(self, number: int, name: str, value: Any) -> None:
        if self._gone:
            return
        content = _encode(_Message(number, name, msgspec.Raw(_encode(value))))
        self._writer.write(len(content).to_bytes(_LENGTH_BYTES) + content)
