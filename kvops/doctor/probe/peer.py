"""The passive side: lends its buffer, fills it, and checks what was written into it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvops.doctor.probe.agent import ProbeAgent, nixl_version
from kvops.doctor.probe.greeting import describe_side, hello, refuse_a_different_peer
from kvops.doctor.probe.memory import allocate, check, fill
from kvops.doctor.probe.messages import (
    Bye,
    Check,
    Checked,
    Clear,
    Done,
    Fill,
    Finished,
    Hello,
    Offer,
    Progress,
    Ready,
    Refused,
    word,
)
from kvops.doctor.probe.patterns import in_order
from kvops.doctor.probe.shape import UNIT_BYTES
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from kvops.doctor.probe.channel import Channel
    from kvops.doctor.probe.memory import Buffer
    from kvops.doctor.probe.messages import SideJob
    from kvops.doctor.probe.side import Events

_GREETING_SECONDS = 60.0
# The initiator may be in one long transfer over a slow network; the parent's --timeout is what ends a probe.
_IDLE_SECONDS = 3600.0


def serve(job: SideJob, channel: Channel, tell: Events) -> None:
    """Serve one initiator until it says goodbye.

    Args:
        job: ``size_bytes`` is the most that the initiator may have registered here.
        channel: to the initiator.
        tell: takes the events.

    Raises:
        KvopsError: the two sides do not fit together, or this one cannot do what is asked.
        PeerGoneError: the initiator went away.
        ProtocolError: the initiator sent nonsense.
    """
    mine = hello(job)
    channel.send(mine)
    theirs = channel.receive(Hello, _GREETING_SECONDS)
    try:
        refuse_a_different_peer(mine, theirs)
        size_bytes = _accepted_size(channel.receive(Offer, _GREETING_SECONDS), job.size_bytes)
        tell(Progress("registering memory", 0, 0))
        buffer = allocate(size_bytes, job.memory, job.device, job.preferred_device)
        agent = ProbeAgent(job.backend, buffer)
    except KvopsError as error:
        channel.send(Refused(word(str(error))))
        raise
    channel.send(Ready(agent.metadata, f"{buffer.address:x}", buffer.device, word(buffer.name)))
    checks, wrong_bytes, moved_bytes = _answer(channel, buffer, tell)
    me = describe_side(mine, buffer.name, nixl_version(), agent.plugins)
    tell(Finished(me=me, peer=theirs, moved_bytes=moved_bytes, checks=checks, wrong_bytes=wrong_bytes))
    agent.close()


def _accepted_size(offer: Offer, most_bytes: int) -> int:
    if offer.size_bytes > most_bytes or offer.size_bytes % UNIT_BYTES:
        raise KvopsError(
            f"the initiator asks for {offer.size_bytes / 2**20:g} MiB, this side gives at most {most_bytes / 2**20:g}",
            "give both sides the same --bytes",
        )
    return offer.size_bytes


def _answer(channel: Channel, buffer: Buffer, tell: Events) -> tuple[int, int, int]:
    """Do what the initiator asks until it says goodbye; return how many checks, wrong bytes and moved bytes."""
    layout = in_order(buffer.size_bytes)
    checks = wrong_bytes = 0
    while True:
        request = channel.receive(Fill | Clear | Check | Bye, _IDLE_SECONDS)
        match request:
            case Fill(seed):
                fill(buffer, seed, layout)
                channel.send(Done())
            case Clear():
                buffer.clear()
                channel.send(Done())
            case Check(seed):
                wrong, first = check(buffer, seed, layout)
                checks += 1
                wrong_bytes += wrong
                tell(Progress("checked what was written here", checks, 0))
                channel.send(Checked(wrong, first))
            case Bye(moved_bytes):
                return checks, wrong_bytes, moved_bytes
