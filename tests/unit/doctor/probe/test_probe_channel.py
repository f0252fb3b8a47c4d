"""The control channel: whatever a stranger sends, nothing crashes and nothing large is allocated."""

from __future__ import annotations

import contextlib
import socket
import struct
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvops.doctor.probe.channel import MAX_FRAME_BYTES, Channel, PeerGoneError, ProtocolError, encode, is_frame_of
from kvops.doctor.probe.messages import (
    MAX_METADATA_BYTES,
    Bye,
    Check,
    Checked,
    Clear,
    Done,
    Fill,
    FromPeer,
    Hello,
    Offer,
    Ready,
    Refused,
    ToPeer,
    word,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

HELLO = Hello(protocol=1, kvops="0.1.0", host="8a19c9bb4eac", backend="UCX", memory="dram")
MESSAGES = [
    HELLO,
    Offer(256 * 2**20),
    Ready(b"\x00nixl" * 90, "7f0012340000", 0, "host memory"),
    Refused("the initiator asks for 1024 MiB, this side gives at most 256"),
    Fill(2**48 - 1),
    Clear(),
    Check(0),
    Done(),
    Checked(3, 17),
    Bye(17_716_740_096),
]


@contextlib.contextmanager
def channel_fed_with(data: bytes) -> Iterator[Channel]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        yield Channel(ours)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: ToPeer | FromPeer) -> None:
    with channel_fed_with(encode(message)) as channel:
        assert channel.receive(ToPeer | FromPeer, 5.0) == message


@given(st.binary(max_size=2000))
@settings(max_examples=200, deadline=None)
def test_garbage_is_refused_or_ends_the_connection(data: bytes) -> None:
    with channel_fed_with(data) as channel, pytest.raises((ProtocolError, PeerGoneError)):
        channel.receive(ToPeer | FromPeer, 5.0)


@given(st.sampled_from(MESSAGES), st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_message_is_refused_or_still_within_its_bounds(
    message: ToPeer | FromPeer, data: st.DataObject
) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(4, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with channel_fed_with(bytes(frame)) as channel:
        try:
            got = channel.receive(ToPeer | FromPeer, 5.0)
        except (ProtocolError, PeerGoneError):
            return
        assert len(encode(got)) < MAX_FRAME_BYTES


@given(st.integers(MAX_FRAME_BYTES + 1, 2**32 - 1))
@settings(deadline=None)
def test_a_frame_that_promises_too_much_is_refused_by_its_header(length: int) -> None:
    with channel_fed_with(struct.pack(">I", length) + b"x") as channel, pytest.raises(ProtocolError, match="frame of"):
        channel.receive(FromPeer, 5.0)


def test_a_header_alone_allocates_nothing_of_what_it_promises() -> None:
    with channel_fed_with(struct.pack(">I", MAX_FRAME_BYTES)) as channel:
        tracemalloc.start()
        with pytest.raises(PeerGoneError):
            channel.receive(FromPeer, 5.0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MAX_FRAME_BYTES / 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"type":"offer","size_bytes":0}',
        b'{"type":"offer","size_bytes":-4194304}',
        b'{"type":"offer","size_bytes":1e30}',
        b'{"type":"offer","size_bytes":68719476737}',
        b'{"type":"offer","size_bytes":"4194304"}',
        b'{"type":"offer","size_bytes":4194304,"command":"rm"}',
        b'{"type":"unheard"}',
        b'{"type":"refused","reason":"\\u001b[2J"}',
        b'{"type":"refused","reason":"' + b"x" * 201 + b'"}',
        b'{"type":"ready","metadata":"","address":"-1","device":0,"device_name":""}',
        b'{"type":"ready","metadata":"","address":"12345678901234567","device":0,"device_name":""}',
        b'{"type":"ready","metadata":"","address":"1","device":4096,"device_name":""}',
        b"[" * 100_000,
        b"\xff\xfe",
        b"",
    ],
)
def test_a_value_out_of_its_bounds_is_refused(body: bytes) -> None:
    frame = struct.pack(">I", len(body)) + body
    with channel_fed_with(frame) as channel, pytest.raises(ProtocolError):
        channel.receive(ToPeer | FromPeer, 5.0)


def test_the_largest_metadata_fits_into_a_frame() -> None:
    frame = encode(Ready(b"x" * MAX_METADATA_BYTES, "f" * 16, 1023, "x" * 200))
    assert len(frame) - 4 <= MAX_FRAME_BYTES


def test_a_message_of_the_wrong_kind_is_refused() -> None:
    with channel_fed_with(encode(Done())) as channel, pytest.raises(ProtocolError):
        channel.receive(Checked, 5.0)


def test_a_peer_that_says_nothing_is_gone_after_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(PeerGoneError, match="did not answer in time"):
        Channel(ours).receive(Done, 0.05)


def test_a_closed_connection_is_seen_without_taking_anything_from_it() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        channel = Channel(ours)
        assert channel.is_open()
        theirs.sendall(encode(Done()))
        theirs.close()
        assert not channel.is_open()
        assert channel.receive(Done, 1.0) == Done()


@given(st.integers(0, len(encode(HELLO)) - 1))
@settings(deadline=None)
def test_the_beginning_of_a_greeting_may_still_become_one(length: int) -> None:
    assert is_frame_of(encode(HELLO)[:length], Hello) is None


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", encode(Done())])
def test_what_other_programs_say_first_is_no_greeting(data: bytes) -> None:
    assert is_frame_of(data, Hello) is False


def test_a_greeting_is_recognized_with_more_behind_it() -> None:
    assert is_frame_of(encode(HELLO) + encode(Offer(1)), Hello) is True


@given(st.text(max_size=400))
@settings(deadline=None)
def test_any_text_can_be_said_as_a_word(text: str) -> None:
    with channel_fed_with(encode(Refused(word(text)))) as channel:
        assert channel.receive(Refused, 5.0).reason == word(text)
