"""How the two sides of a probe meet: who speaks, and whether they fit together."""

from __future__ import annotations

from kvops import __version__
from kvops.doctor.probe.evidence import host_id, instance_type, rdma_devices
from kvops.doctor.probe.messages import PROTOCOL_VERSION, Hello, SideInfo, SideJob, word
from kvops.errors import KvopsError


def hello(job: SideJob) -> Hello:
    """Return what this side says about itself first."""
    return Hello(
        protocol=PROTOCOL_VERSION,
        kvops=__version__,
        host=host_id(),
        backend=word(job.backend),
        memory=job.memory,
        rdma_devices=min(len(rdma_devices()), 1024),
        instance=instance_type(),
    )


def describe_side(mine: Hello, device: str, nixl: str, plugins: list[str]) -> SideInfo:
    """Return this side as the report shows it."""
    return SideInfo(
        host=mine.host,
        instance=mine.instance,
        rdma_devices=mine.rdma_devices,
        device=device,
        nixl=nixl,
        plugins=plugins,
    )


def refuse_a_different_peer(mine: Hello, theirs: Hello) -> None:
    """Raise unless both sides speak the same protocol and move the same kind of memory by the same backend.

    Raises:
        KvopsError: they differ.
    """
    for what, ours, other in (
        ("probe protocol", mine.protocol, theirs.protocol),
        ("--backend", mine.backend, theirs.backend),
        ("--memory", mine.memory, theirs.memory),
    ):
        if ours != other:
            raise KvopsError(f"{what} is {ours} here and {other} at the peer", "start both sides alike")
