"""What really carried the bytes: NIXL's and UCX's own log lines, and the counters of the kernel before and after."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SYS = Path("/sys")
Route = Literal["rdma", "tcp", "shared_memory", "cuda_ipc", "host_staging", "unknown"]

# What makes NIXL and UCX say which way they chose. LIBFABRIC names its provider at INFO only
# (libfabric_topology.cpp of NIXL); UCX_PROTO_INFO prints the protocol of every operation with its devices.
LOG_ENVIRONMENT = {"NIXL_LOG_LEVEL": "INFO", "UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"}

# Transport names of UCX (ucx_info -d) by what they mean for KV.
_UCX_ROUTES: tuple[tuple[str, Route], ...] = (
    (r"(rc|dc|ud|srd|gga|ib)(_.*)?", "rdma"),
    (r"tcp", "tcp"),
    (r"cma|sysv|posix|mm|knem|xpmem|self", "shared_memory"),
    (r"cuda_ipc|rocm_ipc|ze_ipc", "cuda_ipc"),
    (r"cuda_copy|gdr_copy|rocm_copy|ze_copy", "host_staging"),
)
_WORST_FIRST: tuple[Route, ...] = ("tcp", "host_staging", "shared_memory", "rdma", "cuda_ipc")
_RAIL = re.compile(r"\b([a-z][a-z0-9_]*)/([\w.:-]+)")
_PROVIDER = re.compile(r"(?:Created|with) (\d+) rails using provider=(\S+)")
_DISCOVERED = re.compile(r"Discovered (\d+) (\S+) devices?")
_WARNING = re.compile(
    r"\d+ Amazon EFA\(s\) were detected, but the UCX backend was configured.*"
    r"|Rail count mismatch \(local: \d+, remote: \d+\)"
)
_COUNTER_FILES = (
    "class/infiniband/*/ports/*/hw_counters/*",
    "class/infiniband/*/ports/*/counters/port_*_data",
)
_TROUBLE_COUNTERS = (
    "rx_drops",
    "retrans_timeout_events",
    "unresponsive_remote_events",
    "impaired_remote_conn_events",
    "rdma_read_wr_err",
    "rdma_write_wr_err",
)
_MOST_COUNTERS = 16_384


class Rail(msgspec.Struct, frozen=True, order=True):
    """One transport and device that NIXL's backend chose, for example srd on rdmap85s0:1."""

    transport: str
    device: str


@dataclass(frozen=True, slots=True)
class Said:
    """What the log of one side says about the way."""

    rails: list[Rail]
    route: Route
    provider: str = ""
    warnings: tuple[str, ...] = ()


def read_log(lines: Iterable[str], memory: str) -> Said:
    """Return what NIXL and UCX said about the way the bytes went.

    Args:
        lines: the log of one side that ran with ``LOG_ENVIRONMENT``.
        memory: "dram" or "vram"; UCX names other ways for the other kind, which are left out.
    """
    lines = list(lines)
    warnings = tuple(dict.fromkeys(found[0] for line in lines if (found := _WARNING.search(line))))
    provider = ""
    rails: list[Rail] = []
    for line in lines:
        if found := _PROVIDER.search(line) or _DISCOVERED.search(line):
            provider = found[2].lower()
            rails = [Rail(provider, f"{found[1]} rails")]
    if provider:
        return Said(rails, "tcp" if provider in ("tcp", "sockets") else "rdma", provider, warnings)
    rails = _ucx_rails(lines, memory)
    return Said(rails, _worst(rails), "", warnings)


def _ucx_rails(lines: Iterable[str], memory: str) -> list[Rail]:
    """Return the rails of UCX's protocol tables for one-sided operations with a peer that is not the process itself."""
    chosen: dict[str, dict[Rail, None]] = {}
    peer, operation = "", ""
    for line in lines:
        if "|" not in line:
            continue
        cells = [cell.strip() for cell in line[line.index("|") :].strip().strip("|").split("|")]
        if len(cells) == 1:
            peer, operation = (cells[0], "") if "cfg#" in cells[0] else (peer, cells[0])
        elif len(cells) == 3 and "self cfg#" not in peer and "remote memory" in operation and cells[0].endswith("inf"):
            found = chosen.setdefault("vram" if re.search(r"\b(cuda|rocm|ze)\b", operation) else "dram", {})
            found.update(dict.fromkeys(Rail(*match) for match in _RAIL.findall(cells[2])))
    return sorted(chosen.get(memory, {}))


def without_idle_tcp(said: Said, growth: dict[str, int], moved_bytes: int) -> Said:
    """Return ``said`` with the route of its other rails, if the network's counters show that TCP carried no data.

    UCX keeps a TCP rail beside a faster one for its own messages, and lists it with the others.
    """
    carried = [value for name, value in growth.items() if name.startswith("net/")]
    others = [rail for rail in said.rails if rail.transport != "tcp"]
    if said.route == "tcp" and others and carried and max(carried) < moved_bytes / 100:
        return replace(said, route=_worst(others))
    return said


def _worst(rails: list[Rail]) -> Route:
    routes = {route for rail in rails for pattern, route in _UCX_ROUTES if re.fullmatch(pattern, rail.transport)}
    return next((route for route in _WORST_FIRST if route in routes), "unknown")


def read_counters(sys: Path = SYS) -> dict[str, int]:
    """Return the counters of every RDMA and network device, named "rdma/DEVICE/COUNTER" or "net/DEVICE/COUNTER"."""
    counters = _network_counters()
    for path in _counter_paths(sys):
        _, device, *_, counter = path.relative_to(sys / "class").parts
        try:
            counters[f"rdma/{device}/{counter}"] = int(path.read_text())
        except (OSError, ValueError):
            continue
        if len(counters) >= _MOST_COUNTERS:
            break
    return counters


def _network_counters() -> dict[str, int]:
    """Return the bytes of the network devices of this process's own namespace; sysfs may be mounted for another."""
    counters = {}
    for device, count in psutil.net_io_counters(pernic=True, nowrap=False).items():
        counters[f"net/{device}/rx_bytes"] = count.bytes_recv
        counters[f"net/{device}/tx_bytes"] = count.bytes_sent
    return counters


def _counter_paths(sys: Path) -> Iterator[Path]:
    for pattern in _COUNTER_FILES:
        yield from sorted(sys.glob(pattern))


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Return by how much each counter grew, leaving out those that did not."""
    return {name: value - before.get(name, 0) for name, value in after.items() if value > before.get(name, 0)}


def route_by_counters(growth: dict[str, int], moved_bytes: int) -> Route:
    """Return which kind of device carried at least half of ``moved_bytes``; "unknown" if none did.

    Args:
        growth: what ``grown`` returned.
        moved_bytes: what the probe moved meanwhile.
    """
    rdma = sum(
        value * (4 if name.endswith("_data") else 1)  # InfiniBand's port_*_data count words of 4 bytes
        for name, value in growth.items()
        if re.fullmatch(r"rdma/.*/(rdma_(read|write)(_recv)?_bytes|send_bytes|recv_bytes|port_(xmit|rcv)_data)", name)
    )
    network = max((value for name, value in growth.items() if name.startswith("net/")), default=0)
    if moved_bytes and rdma >= moved_bytes / 2:
        return "rdma"
    return "tcp" if moved_bytes and network >= moved_bytes / 2 else "unknown"


def trouble_in(growth: dict[str, int]) -> list[str]:
    """Return the counters of EFA that should not have grown, with by how much.

    Their meanings: "Monitor an Elastic Fabric Adapter" of the EC2 user guide.
    """
    return [f"{name} +{value}" for name, value in growth.items() if name.rpartition("/")[2] in _TROUBLE_COUNTERS]


def rdma_devices(sys: Path = SYS) -> list[str]:
    """Return the names of the RDMA devices that this host shows."""
    try:
        return sorted(entry.name for entry in (sys / "class/infiniband").iterdir())
    except OSError:
        return []


def instance_type(sys: Path = SYS) -> str:
    """Return the EC2 instance type; an empty string on other machines.

    The same file that aws-ofi-nccl reads (src/platform-aws.cpp).
    """
    try:
        name = (sys / "devices/virtual/dmi/id/product_name").read_text().strip()
    except OSError:
        return ""
    return name if re.fullmatch(r"[a-z][a-z0-9-]*\.[a-z0-9-]+", name) else ""


def host_id() -> str:
    """Return a short hash that is the same for all processes of this running kernel, and tells nothing else."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return ""
    return hashlib.sha256(b"kvops probe " + boot).hexdigest()[:12]
