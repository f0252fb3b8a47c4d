"""What the two sides of a probe say to each other, and what each tells the process that started it.

The wire format is JSON: its decoder grows with the bytes that really came, while a binary array header can claim
billions of members. Every field is bounded; unknown fields, wrong types and values out of range are refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

PROTOCOL_VERSION = 1
# The largest buffer either side will ever register, whatever the other one asks for.
MAX_BYTES = 64 * 2**30
# A UCX agent's metadata is about half a kilobyte a device; 32 EFAs with LIBFABRIC stay under 64 KiB.
MAX_METADATA_BYTES = 256 * 2**10

MAX_WORD = 200
# Printable ASCII: what a peer says is shown on a terminal.
Word = Annotated[str, msgspec.Meta(max_length=MAX_WORD, pattern=r"^[ -~]*\Z")]
ByteCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)]
Natural = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Seed = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Metadata = Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)]
Memory = Literal["dram", "vram"]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class Hello(_Message, frozen=True, tag="hello"):
    """The first message of both sides: who speaks, and what it runs on."""

    protocol: int
    kvops: Word
    host: Word  # a hash that is equal for two processes of one running kernel
    backend: Word
    memory: Memory
    rdma_devices: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    instance: Word = ""


class Offer(_Message, frozen=True, tag="offer"):
    """The initiator asks the peer to register a buffer of this size."""

    size_bytes: ByteCount


class Ready(_Message, frozen=True, tag="ready"):
    """The peer has registered its buffer; the address is meaningful to NIXL only."""

    metadata: Metadata
    address: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{1,16}$")]  # hex: JSON numbers stop being exact at 2^53
    device: Annotated[int, msgspec.Meta(ge=0, lt=1024)]
    device_name: Word


class Refused(_Message, frozen=True, tag="refused"):
    """The peer will not go on, and why."""

    reason: Word


class Fill(_Message, frozen=True, tag="fill"):
    """The peer fills its buffer from this seed."""

    seed: Seed


class Clear(_Message, frozen=True, tag="clear"):
    """The peer zeroes its buffer."""


class Check(_Message, frozen=True, tag="check"):
    """The peer compares its buffer with what this seed gives."""

    seed: Seed


class Done(_Message, frozen=True, tag="done"):
    """A fill or a clear is finished."""


class Checked(_Message, frozen=True, tag="checked"):
    """How many bytes differ, and where the first of them is."""

    wrong_bytes: Natural
    first_wrong: Natural = 0


class Bye(_Message, frozen=True, tag="bye"):
    """The initiator has all it wanted, after this many bytes in both directions together."""

    moved_bytes: Natural = 0


ToPeer = Hello | Offer | Fill | Clear | Check | Bye
FromPeer = Hello | Ready | Refused | Done | Checked


class SideJob(msgspec.Struct, frozen=True):
    """What a side's process is started with."""

    role: Literal["initiator", "peer"]
    parent_pid: int
    socket_fd: int
    events_fd: int
    backend: str
    memory: Memory
    size_bytes: int
    repeat: int = 1
    device: int | None = None
    # The device to take where none was asked for, if there are that many.
    preferred_device: int = 0


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One pattern moved one way, ``repeat`` times. Seconds are per transfer; docs/probe.md describes the fields."""

    operation: Literal["READ", "WRITE"]
    pattern: str
    size_bytes: int
    descriptors: int
    descriptor_bytes: int
    wire_descriptors: int | None
    repeat: int
    p50_seconds: float
    p99_seconds: float
    gb_per_second: float
    prepare_us_per_descriptor: float
    post_us_per_descriptor: float
    wire_us_per_descriptor: float
    timed_by: Literal["nixl telemetry", "clock"]
    wrong_bytes: int
    first_wrong: int | None


class SideInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One side of the probe, as it described itself."""

    host: str
    instance: str
    rdma_devices: int
    device: str
    nixl: str
    plugins: list[str]


def word(text: str) -> str:
    """Return ``text`` as a ``Word``: one short line of printable ASCII."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)[:MAX_WORD]


class Progress(msgspec.Struct, frozen=True, tag="progress", tag_field="type"):
    """A side is at this step."""

    step: str
    done: int
    total: int


class Finished(msgspec.Struct, frozen=True, tag="finished", tag_field="type"):
    """A side is done. ``runs`` are the initiator's; ``checks`` and ``wrong_bytes`` are the peer's own."""

    me: SideInfo
    peer: Hello
    peer_device: str = ""
    runs: list[Run] = []
    moved_bytes: int = 0
    checks: int = 0
    wrong_bytes: int = 0


class Failed(msgspec.Struct, frozen=True, tag="failed", tag_field="type"):
    """A side could not go on. ``peer_gone`` marks what is only the consequence of the other side's end."""

    problem: str
    fix: str = ""
    exit_code: int = 2
    peer_gone: bool = False


Event = Progress | Finished | Failed
