"""NCCL and its OFI plugin: tensor parallelism across hosts, not KV transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvops.doctor import conditions
from kvops.doctor.check import in_group, passed, unknown, warned
from kvops.doctor.facts import UnavailableError
from kvops.doctor.parsers import logs

if TYPE_CHECKING:
    from kvops.doctor.check import Finding
    from kvops.doctor.facts import Facts

check = in_group("nccl")


def across_hosts(facts: Facts) -> str:
    """Applies where an engine spans hosts: only then does NCCL use the network."""
    executors = {engine.option("--distributed-executor-backend") for engine in facts.engines}
    spans = "ray" in executors or any(engine.number("--nnodes") > 1 for engine in facts.engines)
    return "" if spans else "no engine spans hosts: NCCL does not use the network"


@check(
    "NX-17",
    "NCCL uses the OFI plugin",
    evidence="ldconfig -p: libnccl-net*.so; the engines' log",
    rule="WARN if the plugin is missing, finds no provider, or NCCL says Socket",
    fix="Install aws-ofi-nccl from the EFA bundle, and set NCCL_NET_PLUGIN if NCCL does not find it",
    sources=("OFI-SRC", "nccl#229"),
    applies=(conditions.efa, conditions.nvidia, across_hosts),
    explained_by=("LF-01",),
)
def plugin(facts: Facts) -> Finding:
    """Without the plugin NCCL talks TCP between hosts."""
    text = _log(facts)
    bad = logs.matching(text, r"NET/OFI No eligible providers|[Uu]sing network Socket")
    if bad:
        return warned("NCCL does not use EFA", bad[0][:160])
    good = logs.matching(text, r"NET/OFI Selected provider is efa|[Uu]sing network (?:AWS )?Libfabric")
    if good:
        return passed("NCCL uses EFA", good[0][:160])
    if not facts.libraries("libnccl-net"):
        return warned("NCCL has no OFI plugin", "ldconfig -p: no libnccl-net*.so")
    return passed("the OFI plugin is there; the log does not show it in use", facts.libraries("libnccl-net")[0])


def _log(facts: Facts) -> str:
    try:
        return facts.engine_log
    except UnavailableError:
        return ""


@check(
    "NX-18",
    "NCCL may not fall back in silence",
    evidence="environment of the engines: NCCL_NET",
    rule="informational; WARN if NCCL_NET is Socket",
    fix="NCCL_NET='AWS Libfabric' (the name that your plugin logs): a missing plugin is then an error",
    sources=("InferenceX#2979", "nccl#527", "nccl#1597"),
    applies=(conditions.efa, conditions.nvidia, across_hosts),
)
def pinned_network(facts: Facts) -> Finding:
    """With the network pinned, a plugin that fails to load ends the start instead of slowing every step."""
    for owner, env in facts.environments.items():
        if env.get("NCCL_NET", "").lower() == "socket":
            return warned(f"{owner} makes NCCL use sockets", f"NCCL_NET={env['NCCL_NET']}")
        if env.get("NCCL_NET"):
            return passed("NCCL_NET is pinned", f"NCCL_NET={env['NCCL_NET']}")
    return passed("note: NCCL_NET is not set; NCCL falls back to sockets in silence")


@check(
    "NX-19",
    "NCCL uses GPUDirect RDMA",
    evidence="the engines' log with NCCL_DEBUG=INFO: via NET/.../GDRDMA",
    rule="WARN if the lines lack /GDRDMA",
    fix="See GDR-02 to GDR-07",
    sources=("aws-ofi-nccl#104",),
    applies=(conditions.gpudirect, across_hosts),
    explained_by=("GDR-02", "GDR-07", "NX-17"),
)
def gpudirect(facts: Facts) -> Finding:
    """Without it every message is copied through host memory."""
    lines = logs.matching(facts.engine_log, r"\[(?:send|receive)\] via NET/.*Libfabric")
    if not lines:
        return unknown("the log has no NCCL channels: set NCCL_DEBUG=INFO")
    without = [line for line in lines if "GDRDMA" not in line]
    if without:
        return warned(f"{len(without)} of {len(lines)} NCCL channels go through host memory", without[0][:160])
    return passed("every NCCL channel uses GPUDirect RDMA", lines[0][:160])


CHECKS = (plugin, pinned_network, gpudirect)
