"""Healthy hosts give nothing to do; each documented trap gives exactly its findings, the cause first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from doctor_cases import SRD, Scene, add_nixlbench, set_config
from doctor_hosts import (
    HEALTHY,
    SITE,
    Fixture,
    add_efas,
    add_engine,
    add_gpus,
    add_neuron_engine,
    add_neurons,
    base,
    limits,
    on_bus,
    p4d,
    p5en,
    p6_b200,
)
from doctor_tables.efa import add_mellanox
from hypothesis import given
from hypothesis import strategies as st

from kvops.doctor.check import State
from kvops.doctor.facts import Facts
from kvops.doctor.run import run
from kvops.doctor.snapshot import SnapshotHost

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvops.doctor.run import Report

# What one look at one host cannot tell: whether counters grow while KV moves.
NEEDS_TWO_LOOKS = {"EFA-14"}


def judge(host: Fixture) -> Report:
    return run(Facts(host.host()))


def trouble(report: Report) -> dict[str, State]:
    return {r.check.id: r.state for r in report.results if r.state in {State.FAIL, State.WARN}}


def causes(report: Report) -> dict[str, list[str]]:
    return {cause.check.id: [r.check.id for r in report.consequences(cause)] for cause in report.causes}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_host_gives_nothing_to_do(name: str) -> None:
    report = judge(HEALTHY[name]())
    assert trouble(report) == {}
    assert {r.check.id for r in report.results if r.state is State.UNKNOWN} == NEEDS_TWO_LOOKS
    assert report.exit_status == 0
    assert report.problems == []


@pytest.mark.parametrize("name", HEALTHY)
@given(data=st.data())
def test_evidence_that_is_missing_never_adds_a_failure(name: str, data: st.DataObject) -> None:
    members = HEALTHY[name]().members()
    paths = sorted(set(members) - {"meta.json"})
    for path in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=40)):
        members.pop(path, None)
    report = run(Facts(SnapshotHost(members)))
    assert [r.check.id for r in report.results if r.state is State.FAIL] == []


@pytest.mark.parametrize("name", HEALTHY)
@given(data=st.data())
def test_a_few_members_written_by_hand_never_fail_a_healthy_host(name: str, data: st.DataObject) -> None:
    members = HEALTHY[name]().members()
    kept = data.draw(st.lists(st.sampled_from(sorted(members)), min_size=1, max_size=40, unique=True))
    report = run(Facts(SnapshotHost({path: members[path] for path in kept})))
    assert [r.check.id for r in report.results if r.state is State.FAIL] == []


def pod_on_half_a_node() -> Fixture:
    """A healthy p5en from inside a pod: half of its devices, the runtime's memlock, and few tools and rights."""
    host = p5en()
    host.listing("/dev/infiniband", *(f"uverbs{number}" for number in range(8)))
    listed = host.commands["ls", "-l", "/dev/infiniband"][0].splitlines(keepends=True)
    host.command("ls -l /dev/infiniband", "".join(listed[:9]))
    for command in ("fi_info -p efa", "fi_info -p efa -c FI_HMEM"):
        entries = host.commands[tuple(command.split())][0].split("provider:")
        host.command(command, "provider:".join(entries[:25]))
    host.listing("/proc/driver/nvidia/gpus", *host.listings["/proc/driver/nvidia/gpus"][:4])
    host.file("/.dockerenv", "").env(KUBERNETES_SERVICE_HOST="172.20.0.1")
    for process in ("4242", "1"):
        host.file(f"/proc/{process}/limits", limits(65536))
        host.file(f"/proc/{process}/status", "Uid:\t0\t0\t0\t0\nCapEff:\t00000000a80465fb\n")
    host.command("systemctl is-active nvidia-fabricmanager", "inactive\n", status=3)
    for tool in ("dmesg", "modinfo efa", "dkms status", "lspci -vvv", "nvidia-smi topo -m"):
        host.absent(tool)
    return host


def test_a_healthy_pod_on_half_a_node_fails_nothing() -> None:
    assert trouble(judge(pod_on_half_a_node())) == {"EFA-07": State.WARN}


def another_users_engine() -> Fixture:
    """A healthy p5en seen by a user who may not look into the engine's process, and has no NIXL of their own."""
    host = p5en()
    for pid in ("4242", "4311"):
        for name in ("environ", "maps", "fd/1", "fd/2"):
            host.files.pop(f"/proc/{pid}/{name}", None)
            host.links.pop(f"/proc/{pid}/{name}", None)
            host.not_captured.append({"path": f"/proc/{pid}/{name}", "why": "denied"})
    host.listing(SITE, "kvops-0.1.0.dist-info")
    return host


def test_an_engine_of_another_user_fails_nothing() -> None:
    assert trouble(judge(another_users_engine())) == {}


@dataclass(frozen=True)
class Trap:
    """A host that looks healthy and is not, or the reverse: its causes in order, each with what it explains."""

    name: str
    build: Callable[[], Fixture]
    expected: dict[str, list[str]]

    def __str__(self) -> str:
        return self.name


def active_ports_of_another_driver() -> Fixture:
    """Trap 1: ACTIVE is a constant, so that only its absence tells something."""
    host = p5en()
    host.file("/sys/class/infiniband/rdmap85s0/ports/1/state", "1: DOWN\n")
    return host


def libfabric_on_tcp() -> Fixture:
    """Trap 2: the verbs provider does not fit, libfabric finds no EFA, and NIXL takes tcp at INFO level."""
    host = p5en()
    host.listing("/usr/lib64/libibverbs", "libefa-rdmav34.so", "libmlx5-rdmav59.so")
    for command in ("fi_info -p efa", "fi_info -p efa -c FI_HMEM"):
        host.command(command, "", "fi_getinfo: -61 (No data available)\n", 61)
    host.log(
        "I1101 10:00:00 libfabric_common.cpp:145] Discovered 1 tcp devices (TCP fallback)\n"
        "I1101 10:00:00 libfabric_topology.cpp:60] Using simplified topology for tcp devices\n"
        "I1101 10:00:00 libfabric_topology.cpp:61] System runtime: CUDA for 8 NVIDIA GPU(s)\n"
        "I1101 10:00:01 libfabric_rail_manager.cpp:44] Created 1 rails using provider=tcp\n"
    )
    return host


def ucx_on_tcp() -> Fixture:
    """Trap 3: vLLM's default backend is UCX, and this UCX has no EFA."""
    host = p5en()
    set_config(host, backends=None)
    host.listing(f"{SITE}/nixl_cu12.libs/ucx", "libuct_ib.so.0.0.0", "libuct_cma.so.0.0.0")
    host.file("/proc/4311/maps", "7f0000-7f0001 r-xp 00000000 103:01 12 /x/libplugin_UCX.so\n")
    host.log(
        "W nixl_agent.cpp:310] 16 Amazon EFA(s) were detected, but the UCX backend was configured\n"
        "ucp_context_0 inter-node cfg#2 rma_am(tcp/eth1)\n"
    )
    host.command("ucx_info -d", SRD).command("ucx_info -v", "# Library version: 1.20.0\n")
    return host


def no_peer_memory_file() -> Fixture:
    """Trap 4: an absent p2p file is no proof of a broken GPUDirect where dmabuf is complete."""
    host = p5en()
    for device in host.listings["/sys/class/infiniband"]:
        host.absent(f"/sys/class/infiniband/{device}/device/p2p", f"/sys/class/infiniband/{device}/device/gdr")
    return host


def no_nvidia_peermem() -> Fixture:
    """Trap 5: nvidia_peermem is not what EFA uses, loaded or not."""
    host = p5en()
    host.listings["/sys/module"].append("nvidia_peermem")
    return host


def mellanox_in_the_container() -> Fixture:
    """Trap 6, the broken side: RDMA devices that do not belong to the type."""
    host = p5en()
    add_mellanox(Scene(host))
    return host


def old_pci_names() -> Fixture:
    """Trap 7: only lspci with old names and numbers was captured; EFAs are counted by number."""
    host = p5en()
    lines = [
        f"{address} Ethernet controller [0200]: Amazon.com, Inc. Device [1d0f:efa2]\n"
        for address in host.listings["/sys/bus/pci/devices"][:15]
    ]
    lines += [
        f"{a} 3D controller [0302]: NVIDIA Corporation Device [10de:2335] (rev a1)\n"
        for a in host.listings["/sys/bus/pci/devices"][16:]
    ]
    del host.listings["/sys/bus/pci/devices"]
    return host.command("lspci -D -nn", "".join(lines))


def rate_of_an_old_driver() -> Fixture:
    """Trap 8: an old driver says 100 Gb/s for every link."""
    host = p5en()
    host.file("/sys/module/efa/version", "2.12.1g\n")
    for device in host.listings["/sys/class/infiniband"]:
        host.file(f"/sys/class/infiniband/{device}/ports/1/rate", "100 Gb/sec (4X EDR)\n")
    host.file(
        "/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\n",
    )
    return host


def counters_of_sends_only() -> Fixture:
    """Trap 10: rdma counters that stay at zero are no proof that RDMA does not work."""
    host = p5en()
    for device in host.listings["/sys/class/infiniband"]:
        host.file(f"/sys/class/infiniband/{device}/ports/1/hw_counters/rdma_read_bytes", "0\n")
    return host


def percentage_of_another_machine() -> Fixture:
    """Trap 11: 90 % of the 50 GB/s that nixlbench takes for every pair is less than half of a p5en's line."""
    host = p5en()
    add_nixlbench(host, 45.1)
    return host


def g6e() -> Fixture:
    """Trap 12: the GPUs advertise GPUDirect, the instance does not carry it."""
    host = base("g6e.48xlarge")
    add_efas(host, on_bus(0x10, 0x20, 0x30, 0x40), "efa1", "100 Gb/sec (4X EDR)", "NVIDIA")
    add_gpus(host, on_bus(*range(0x50, 0x58)), "NODE")
    add_engine(host)
    return host


def recompute_hides_it() -> Fixture:
    """Trap 13: switches that turn a broken transport into slow prefill."""
    host = p5en()
    set_config(host, top={"kv_load_failure_policy": "recompute"}, enforce_handshake_compat=False)
    return host


def write_counters_of_an_old_driver() -> Fixture:
    """Trap 14: AWS documents write counters for all types; the driver has them from 2.5 on only."""
    host = p5en()
    host.file("/sys/module/efa/version", "2.4.1g\n")
    host.file(
        "/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\n",
    )
    for device in host.listings["/sys/class/infiniband"]:
        names = host.listings[f"/sys/class/infiniband/{device}/ports/1/hw_counters"]
        names[:] = [name for name in names if not name.startswith("rdma_write_")]
    return host


def one_efa_of_sixteen_on_trn2() -> Fixture:
    """A Neuron host launched with its default interface only."""
    host = base("trn2.48xlarge")
    add_efas(host, on_bus(0x10), "efa2", "200 Gb/sec (4X HDR)", "NEURON")
    add_neurons(host, on_bus(*range(0x20, 0x30)), "7364", core_size=2)
    add_neuron_engine(host)
    return host


def container_without_nodes() -> Fixture:
    """A container that sees all devices in /sys and may open none."""
    host = p5en()
    host.listing("/dev/infiniband").command("ls -l /dev/infiniband", "total 0\n")
    for command in ("fi_info -p efa", "fi_info -p efa -c FI_HMEM"):
        host.command(command, "", "fi_getinfo: -61 (No data available)\n", 61)
    host.log(
        "I1101 10:00:01 libfabric_rail_manager.cpp:44] Created 1 rails using provider=tcp\n"
        "System runtime: CUDA for 8 NVIDIA GPU(s)\n"
    )
    return host


TRAPS = (
    Trap("1-port-state", active_ports_of_another_driver, {"EFA-10": []}),
    Trap("2-libfabric-on-tcp", libfabric_on_tcp, {"EFA-17": ["LF-01", "LF-02", "NX-06"]}),
    Trap("3-ucx-on-tcp", ucx_on_tcp, {"NX-05": ["NX-10"]}),
    Trap("4-no-p2p-file", no_peer_memory_file, {}),
    Trap("5-nvidia-peermem", no_nvidia_peermem, {}),
    Trap("6-p6-has-ten-devices", p6_b200, {}),
    Trap("6-foreign-devices", mellanox_in_the_container, {"EFA-08": []}),
    Trap("7-old-pci-names", old_pci_names, {"EFA-01": ["NW-10"]}),
    Trap("8-rate-of-old-driver", rate_of_an_old_driver, {"EFA-05": ["EFA-09"]}),
    Trap("9-host-bridge-on-p4d", p4d, {}),
    Trap("10-counters-at-zero", counters_of_sends_only, {}),
    Trap("11-nixlbench-percentage", percentage_of_another_machine, {"NX-23": []}),
    Trap("12-no-gpudirect-on-g6e", g6e, {"GDR-01": []}),
    Trap("13-hidden-failures", recompute_hides_it, {"VL-13": [], "VL-14": []}),
    Trap("14-write-counters", write_counters_of_an_old_driver, {"EFA-05": ["EFA-15"]}),
    Trap("default-launch-of-trn2", one_efa_of_sixteen_on_trn2, {"EFA-01": ["NEU-06"]}),
    Trap("container-without-nodes", container_without_nodes, {"EFA-07": ["LF-01", "LF-02", "NX-06"]}),
)


@pytest.mark.parametrize("trap", TRAPS, ids=str)
def test_a_trap_gives_its_findings_cause_first(trap: Trap) -> None:
    assert list(causes(judge(trap.build())).items()) == list(trap.expected.items())
