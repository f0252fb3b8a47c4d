"""One connected socket with length-prefixed, size-limited JSON frames and a deadline on every wait."""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from kvops.doctor.probe.messages import FromPeer, ToPeer

MAX_FRAME_BYTES = 512 * 2**10
_HEADER = struct.Struct(">I")
_READ_BYTES = 64 * 2**10
_T = TypeVar("_T")


class PeerGoneError(Exception):
    """The other side closed the connection or stopped answering."""


class ProtocolError(Exception):
    """The other side sent something that no kvops probe sends."""


class Channel:
    """Sends and receives the messages of ``messages`` over a connected socket.

    Args:
        connection: a connected stream socket; the channel closes it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            _notice_a_dead_network(connection)

    def send(self, message: ToPeer | FromPeer, seconds: float = 30.0) -> None:
        """Send one message.

        Raises:
            PeerGoneError: the connection is closed, or nothing was taken for ``seconds``.
        """
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(encode(message))
        except OSError as error:
            raise PeerGoneError(str(error)) from error

    def receive(self, wanted: Any, seconds: float) -> Any:
        """Return the next message, which must be one of the types of ``wanted`` (a struct type or a union of them).

        Raises:
            PeerGoneError: the connection was closed, or the message was not complete within ``seconds``.
            ProtocolError: the frame is too large, or holds anything but a valid message of these types.
        """
        deadline = time.monotonic() + seconds
        (length,) = _HEADER.unpack(self._read(_HEADER.size, deadline))
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {length} bytes, where at most {MAX_FRAME_BYTES} are allowed")
        return decode(self._read(length, deadline), wanted)

    def is_open(self, after_seconds: float = 0.0) -> bool:
        """Return whether the other side still holds its end, without taking anything from the connection.

        Args:
            after_seconds: how long to wait for it to close.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return not poll.poll(after_seconds * 1000)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                # Grows with what arrives: a header alone makes nobody allocate the frame it promises.
                part = self._socket.recv(min(size - len(data), _READ_BYTES))
            except TimeoutError as error:
                raise PeerGoneError("it did not answer in time") from error
            except OSError as error:
                raise PeerGoneError(str(error)) from error
            if not part:
                raise PeerGoneError("it closed the connection")
            data += part
        return bytes(data)


def encode(message: ToPeer | FromPeer) -> bytes:
    """Return the frame of one message."""
    body = msgspec.json.encode(message)
    return _HEADER.pack(len(body)) + body


def decode(body: bytes, wanted: Any) -> Any:
    """Return the message in one frame's body.

    Raises:
        ProtocolError: it is no valid message of the types of ``wanted``.
    """
    try:
        return msgspec.json.decode(body, type=wanted)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(str(error)[:200]) from error


def is_frame_of(data: bytes, wanted: Any) -> bool | None:
    """Return whether ``data`` begins with one whole frame that holds a message of these types; None if it may yet."""
    if len(data) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack_from(data)
    if length > MAX_FRAME_BYTES:
        return False
    body = data[_HEADER.size : _HEADER.size + length]
    if len(body) < length:
        return None
    try:
        decode(body, wanted)
    except ProtocolError:
        return False
    return True


def _notice_a_dead_network(connection: socket.socket) -> None:
    """Let the kernel close the connection about 15 s after the other host stopped answering."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
