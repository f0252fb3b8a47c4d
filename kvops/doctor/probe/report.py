"""The result of a probe, as ``kvops probe --json`` prints it; docs/probe.md describes every field."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvops.doctor.instances import line_of
from kvops.doctor.probe.evidence import (
    Rail,
    Route,
    Said,
    grown,
    read_counters,
    read_log,
    route_by_counters,
    trouble_in,
    without_idle_tcp,
)
from kvops.doctor.probe.messages import Finished, Hello, Memory, Run, SideInfo  # noqa: TC001 - msgspec reads them
from kvops.doctor.probe.verdict import Facts, Reason, Verdict, judge


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What carried the bytes, and how that is known.

    ``route_by`` is "log" (NIXL's and UCX's own words), "counters" (the kernel's byte counters) or "nothing".
    ``counters`` is by how much each counter of this host grew while the probe ran.
    """

    route: Route
    route_by: Literal["log", "counters", "nothing"]
    rails: list[Rail]
    provider: str
    counters: dict[str, int]
    warnings: list[str]


class PeerSide(msgspec.Struct, frozen=True, kw_only=True):
    """The other side, as it described itself."""

    host: str
    instance: str
    rdma_devices: int
    device: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One probe, seen from this side."""

    v: Literal[1] = 1
    role: Literal["pair", "connect", "listen"]
    backend: str
    memory: Memory
    same_host: bool
    me: SideInfo
    peer: PeerSide
    runs: list[Run]
    moved_bytes: int
    checks: int
    evidence: Evidence
    verdict: Verdict


def make_report(
    role: Literal["pair", "connect", "listen"],
    finished: Finished,
    *,
    backend: str,
    memory: Memory,
    log: list[str],
    counters_before: dict[str, int],
) -> Report:
    """Return what the sides measured and what this host shows as one report.

    Args:
        role: how this probe was started.
        finished: the last event of this side.
        backend: NIXL's backend.
        memory: what was moved.
        log: this side's log lines.
        counters_before: from ``evidence.read_counters``, before the first byte.
    """
    evidence = _evidence(read_log(log, memory), grown(counters_before, read_counters()), finished.moved_bytes)
    peer = PeerSide(
        host=finished.peer.host,
        instance=finished.peer.instance,
        rdma_devices=finished.peer.rdma_devices,
        device=finished.peer_device,
    )
    return Report(
        role=role,
        backend=backend,
        memory=memory,
        same_host=_is_one_host(finished),
        me=finished.me,
        peer=peer,
        runs=finished.runs,
        moved_bytes=finished.moved_bytes,
        checks=finished.checks,
        evidence=evidence,
        verdict=_with_peer_checks(judge(_facts(finished, backend, memory, evidence)), finished.wrong_bytes),
    )


def _facts(finished: Finished, backend: str, memory: Memory, evidence: Evidence) -> Facts:
    return Facts(
        runs=finished.runs,
        backend=backend,
        memory=memory,
        instance=finished.me.instance,
        same_host=_is_one_host(finished),
        route=evidence.route,
        rdma_expected=_has_rdma(finished.me) and _has_rdma(finished.peer),
        trouble=tuple(trouble_in(evidence.counters)),
    )


def _is_one_host(finished: Finished) -> bool:
    return bool(finished.me.host) and finished.me.host == finished.peer.host


def _has_rdma(side: SideInfo | Hello) -> bool:
    # A container of a known instance type may hide the devices; that is the very fault to find.
    return side.rdma_devices > 0 or line_of(side.instance) is not None


def _evidence(said: Said, growth: dict[str, int], moved_bytes: int) -> Evidence:
    counted = route_by_counters(growth, moved_bytes)
    said = without_idle_tcp(said, growth, moved_bytes)
    # The counters win where they speak for TCP: a log says what was chosen, a counter what went through.
    by_log = said.route != "unknown" and not (counted == "tcp" and said.route == "rdma")
    return Evidence(
        route=said.route if by_log else counted,
        route_by="log" if by_log else "nothing" if counted == "unknown" else "counters",
        rails=said.rails,
        provider=said.provider,
        counters=growth,
        warnings=list(said.warnings),
    )


def _with_peer_checks(verdict: Verdict, wrong_bytes: int) -> Verdict:
    """Return the verdict of a side that measured nothing itself but found wrong bytes in its buffer."""
    if not wrong_bytes:
        return verdict
    found = Reason("FAIL", f"{wrong_bytes} bytes that were written here arrived wrong")
    return Verdict("FAIL", found.text, [found, *verdict.reasons])
