"""UCX: whether its build has EFA, and what its variables choose."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvops.doctor import conditions
from kvops.doctor.check import failed, in_group, passed, skipped, unknown, warned, worst
from kvops.doctor.facts import UnavailableError
from kvops.doctor.parsers import logs, whole_number
from kvops.doctor.parsers.versions import at_least, dotted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvops.doctor.check import Finding
    from kvops.doctor.facts import Facts

check = in_group("ucx")

UNKNOWN_TRANSPORTS = {"efa": "there is no transport of this name: it is srd", "srd_x": "not in released UCX"}
NETWORK_TRANSPORTS = {"srd", "rc", "rc_x", "rc_v", "ud", "ud_x", "ud_v", "dc", "dc_x", "ib", "all"}


@check(
    "NX-10",
    "The UCX that NIXL loads has EFA's transport",
    evidence="libuct_ib_efa.so in the NIXL wheel, else ucx_info -d: Transport: srd; the engines' log",
    rule="FAIL where an engine uses UCX on EFA and there is no srd; WARN before UCX 1.20 (no EFA RMA write)",
    fix="UCX 1.20 or later built --with-efa, or NIXL's LIBFABRIC backend",
    sources=("UCX-NEWS", "dynamo#1288", "ucx#10692"),
    applies=(conditions.efa, conditions.ucx_backend),
    explained_by=("NX-05", "EFA-07", "EFA-17"),
    quick=True,
)
def efa_transport(facts: Facts) -> Finding:
    """UCX without srd sees EFA as ud or not at all, and takes tcp."""
    bad = _log_lines(facts, r"rma_am\(tcp/|UCT modules: < (?!.*efa)")
    if bad:
        return failed("UCX moves KV over TCP", bad[0][:160])
    bundled = _bundled_modules(facts)
    if bundled:
        if any(name.startswith("libuct_ib_efa.so") for name in bundled):
            return passed("the NIXL wheel's UCX has EFA's transport", "libuct_ib_efa.so")
        return failed("the NIXL wheel's UCX has no EFA transport", f"{bundled[0]} ..., no libuct_ib_efa.so")
    transports = {transport for domain in facts.ucx_domains for transport, _ in domain.devices}
    if not transports & {"srd"}:
        return failed("this UCX has no EFA transport", f"transports: {', '.join(sorted(transports))[:120]}")
    if not at_least(facts.ucx_version, (1, 20)):
        return warned(f"UCX {dotted(facts.ucx_version)} writes to EFA without RMA (1.20)", "Transport: srd")
    return passed("UCX has EFA's transport", f"Transport: srd, UCX {dotted(facts.ucx_version)}")


def _bundled_modules(facts: Facts) -> list[str]:
    """Return the UCX modules inside NIXL wheels; these, and not the system's UCX, are what NIXL loads."""
    found: list[str] = []
    for folder in facts.site_packages:
        wheels = [name for name in facts.names(folder) if re.fullmatch(r"nixl(?:_cu\d+)?\.libs", name)]
        found += [name for wheel in wheels for name in facts.names(f"{folder}/{wheel}/ucx") if ".so" in name]
    return found


def _log_lines(facts: Facts, pattern: str) -> list[str]:
    try:
        return logs.matching(facts.engine_log, pattern)
    except UnavailableError:
        return []


@check(
    "NX-11",
    "UCX's variables choose transports and devices that exist",
    evidence="environment of the engines: UCX_TLS, UCX_NET_DEVICES",
    rule="FAIL: UCX_TLS without a network transport but tcp, unknown names. WARN: UCX_NET_DEVICES that names a netdev",
    fix="Unset both, or UCX_TLS=srd,cuda_copy,cuda_ipc,sm,self with device names like rdmap85s0:1",
    sources=("ucx#10692", "UCX-ALIAS", "nixl#1614"),
    applies=(conditions.efa, conditions.ucx_backend),
    quick=True,
)
def transport_variables(facts: Facts) -> Finding:
    """A guide for another network, or a name that UCX does not know, leaves TCP."""
    return worst(_transport_problems(facts), passed("UCX chooses for itself, or among what exists"))


def _transport_problems(facts: Facts) -> Iterator[Finding]:
    for owner, env in facts.environments.items():
        chosen = env.get("UCX_TLS", "all")
        names = {name.strip() for name in chosen.removeprefix("^").split(",")}
        for name, why in UNKNOWN_TRANSPORTS.items():
            if name in names:
                yield failed(f"{owner} names the transport {name}: {why}", f"UCX_TLS={chosen}")
        if not chosen.startswith("^") and not names & NETWORK_TRANSPORTS:
            yield failed(f"{owner} leaves UCX no transport for EFA", f"UCX_TLS={chosen}")
        devices = env.get("UCX_NET_DEVICES", "all")
        known = {device.name for device in facts.efa_rdma}
        wrong = [n for n in devices.split(",") if n != "all" and n.partition(":")[0] not in known]
        if wrong:
            yield warned(f"{owner} names {wrong[0]}, which is no EFA of this host", f"UCX_NET_DEVICES={devices}")


@check(
    "NX-12",
    "UCX can register GPU memory with EFA",
    evidence="ucx_info -d: memory types of EFA's memory domains",
    rule="FAIL if cuda is not among them",
    fix="modprobe efa_nv_peermem, and UCX 1.20 or later",
    sources=("UCX-TLINFO", "ucx#10966"),
    applies=(conditions.gpudirect, conditions.ucx_backend),
    explained_by=("NX-10", "GDR-03", "GDR-02"),
)
def gpu_memory(facts: Facts) -> Finding:
    """Without it UCX copies every KV block through host memory."""
    names = {device.name for device in facts.efa_rdma}
    domains = [domain for domain in facts.ucx_domains if domain.name in names]
    if not domains:
        return unknown("ucx_info shows no memory domain of an EFA")
    without = [domain.name for domain in domains if not domain.registers("cuda")]
    if without:
        shown = domains[0].memory_types or "none"
        return failed("UCX cannot register GPU memory with EFA", f"{without[0]}: memory types: {shown}"[:160])
    return passed("UCX registers GPU memory with EFA", f"{domains[0].name}: {domains[0].memory_types}"[:160])


@check(
    "NX-13",
    "UCX opens more than 16 devices where there are more",
    evidence="number of EFA devices, UCX version, UCX_MAX_COMPONENT_MDS",
    rule="WARN for more than 16 EFAs with UCX before 1.19 or a lower UCX_MAX_COMPONENT_MDS",
    fix="UCX_MAX_COMPONENT_MDS=32",
    sources=("NIXL-UCX", "UCX-ALIAS"),
    applies=(conditions.efa, conditions.ucx_backend),
)
def many_devices(facts: Facts) -> Finding:
    """UCX stops at 16 devices by default; p5 has 32."""
    count = len(facts.efa_pci)
    if count <= 16:
        return skipped(f"{count} EFA devices")
    for owner, env in facts.environments.items():
        limit = env.get("UCX_MAX_COMPONENT_MDS", "")
        opened = whole_number(limit)
        if opened is not None and opened < count:
            return warned(f"{owner} lets UCX open {limit} of {count} EFA devices", f"UCX_MAX_COMPONENT_MDS={limit}")
        if not limit and not at_least(facts.ucx_version, (1, 19)):
            number = dotted(facts.ucx_version)
            return warned(f"UCX {number} opens 16 of {count} EFA devices", "UCX_MAX_COMPONENT_MDS is not set")
    return passed(f"UCX opens all {count} EFA devices")


CHECKS = (efa_transport, transport_variables, gpu_memory, many_devices)
