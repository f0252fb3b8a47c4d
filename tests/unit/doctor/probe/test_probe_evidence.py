"""What carried the bytes: lines as NIXL 1.5.1 and UCX 1.23 write them, and counters as the drivers show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvops.doctor.probe.evidence import (
    Rail,
    Said,
    grown,
    instance_type,
    rdma_devices,
    read_counters,
    read_log,
    route_by_counters,
    trouble_in,
    without_idle_tcp,
)

if TYPE_CHECKING:
    from pathlib import Path


def table(peer: str, operation: str, *rows: tuple[str, str, str]) -> list[str]:
    """A protocol table as UCX_PROTO_INFO=y prints it."""
    stamp = "[1796004605.114059] [host:12542:0]   "
    edge = f"{stamp}+--------+-------------+-----------------------------------+"
    lines = [edge, f"{stamp}| {peer:<57}|", f"{stamp}| {operation:<57}|", edge]
    lines += [f"{stamp}| Range  | Description | Config                            |", edge]
    return [*lines, *(f"{stamp}| {a} | {b} | {c} |" for a, b, c in rows), edge]


WRITE = "remote memory write by ucp_put*(multi) from host memory to host"
READ_CUDA = "remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda"
AM = "active message by ucp_am_send* from host memory"


def test_the_agents_talk_to_itself_and_its_notifications_are_left_out() -> None:
    log = [
        *table("a self cfg#0", WRITE, ("0..inf", "zero-copy", "self/memory")),
        *table("a intra-node cfg#1", AM, ("16516..inf", "multi-frag copy-in", "tcp/lo")),
        *table("a intra-node cfg#1", WRITE, ("0..inf", "zero-copy", "cma/memory")),
    ]
    said = read_log(log, "dram")
    assert (said.rails, said.route) == ([Rail("cma", "memory")], "shared_memory")


@pytest.mark.parametrize(
    ("config", "rails", "route"),
    [
        ("tcp/eth0", [Rail("tcp", "eth0")], "tcp"),
        (
            "50% on srd/rdmap85s0:1 and 50% on srd/rdmap86s0:1",
            [Rail("srd", "rdmap85s0:1"), Rail("srd", "rdmap86s0:1")],
            "rdma",
        ),
        ("rc_mlx5/mlx5_0:1", [Rail("rc_mlx5", "mlx5_0:1")], "rdma"),
        ("dc_mlx5/mlx5_bond_0:1", [Rail("dc_mlx5", "mlx5_bond_0:1")], "rdma"),
        ("sysv/memory", [Rail("sysv", "memory")], "shared_memory"),
        ("somethingnew/dev0", [Rail("somethingnew", "dev0")], "unknown"),
    ],
)
def test_the_rails_of_a_way_between_two_hosts_are_named(config: str, rails: list[Rail], route: str) -> None:
    said = read_log(table("a inter-node cfg#1", WRITE, ("0..inf", "zero-copy", config)), "dram")
    assert (said.rails, said.route) == (rails, route)


def test_the_way_of_large_messages_counts() -> None:
    rows = (("0..2038", "short", "tcp/eth0"), ("2039..inf", "zero-copy", "rc_mlx5/mlx5_0:1"))
    assert read_log(table("a inter-node cfg#1", WRITE, *rows), "dram").route == "rdma"


def test_device_memory_has_its_own_tables() -> None:
    log = [
        *table("a intra-node cfg#1", WRITE, ("0..inf", "zero-copy", "cma/memory")),
        *table("a intra-node cfg#1", READ_CUDA, ("0..inf", "zero-copy", "cuda_ipc/cuda")),
    ]
    assert read_log(log, "vram").rails == [Rail("cuda_ipc", "cuda")]
    assert read_log(log, "vram").route == "cuda_ipc"
    assert read_log(log, "dram").route == "shared_memory"


def test_host_memory_tables_alone_say_nothing_about_device_memory() -> None:
    log = table("a intra-node cfg#1", WRITE, ("0..inf", "zero-copy", "cma/memory"))
    assert read_log(log, "vram").route == "unknown"


@pytest.mark.parametrize(
    ("line", "provider", "route"),
    [
        ("I1130 02:13:29.349 1 libfabric_rail_manager.cpp:80] Created 16 rails using provider=efa", "efa", "rdma"),
        ("I1130 02:13:29.349 1 libfabric_topology.cpp:145] Discovered 1 tcp devices (TCP fallback)", "tcp", "tcp"),
        ("I1130 02:13:29.349 1 libfabric_topology.cpp:140] Discovered 16 EFA devices", "efa", "rdma"),
    ],
)
def test_the_provider_of_libfabric_is_read(line: str, provider: str, route: str) -> None:
    said = read_log([line], "vram")
    assert (said.provider, said.route) == (provider, route)


def test_what_nixl_warns_of_is_kept_once() -> None:
    efa = (
        "W1130 1 nixl_agent.cpp:300] 16 Amazon EFA(s) were detected, but the UCX backend was configured. Use LIBFABRIC"
    )
    said = read_log([efa, efa, "W1130 1 rails.cpp:9] Rail count mismatch (local: 16, remote: 1)"], "dram")
    assert said.warnings == (efa.split("] ")[1], "Rail count mismatch (local: 16, remote: 1)")


@given(st.lists(st.text(alphabet=st.sampled_from("|+- cfg#inter-nodremotymwa0..inf/:%"), max_size=80), max_size=30))
@settings(deadline=None)
def test_any_log_is_read_without_a_crash(lines: list[str]) -> None:
    read_log(lines, "dram")


@pytest.fixture
def sys_of_a_p5en(tmp_path: Path) -> Path:
    for path, text in {
        "class/infiniband/rdmap85s0/ports/1/hw_counters/rdma_read_bytes": "1000\n",
        "class/infiniband/rdmap85s0/ports/1/hw_counters/rx_bytes": "7\n",
        "class/infiniband/rdmap85s0/ports/1/hw_counters/lifespan": "12 ms\n",
        "class/infiniband/mlx5_0/ports/1/counters/port_rcv_data": "50\n",
        "devices/virtual/dmi/id/product_name": "p5en.48xlarge\n",
    }.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_counters_of_rdma_and_network_devices_are_kept_apart(sys_of_a_p5en: Path) -> None:
    counters = read_counters(sys_of_a_p5en)
    assert {name: value for name, value in counters.items() if name.startswith("rdma/")} == {
        "rdma/rdmap85s0/rdma_read_bytes": 1000,
        "rdma/rdmap85s0/rx_bytes": 7,
        "rdma/mlx5_0/port_rcv_data": 50,
    }
    assert {"net/lo/rx_bytes", "net/lo/tx_bytes"} <= set(counters)


def test_only_counters_that_grew_are_evidence() -> None:
    assert grown({"net/lo/rx_bytes": 5, "net/eth0/rx_bytes": 9}, {"net/lo/rx_bytes": 5, "net/eth0/rx_bytes": 19}) == {
        "net/eth0/rx_bytes": 10
    }


@pytest.mark.parametrize(
    ("growth", "route"),
    [
        ({"rdma/rdmap85s0/rdma_read_bytes": 300, "rdma/rdmap86s0/rdma_write_bytes": 300}, "rdma"),
        ({"rdma/mlx5_0/port_rcv_data": 150, "net/eth0/rx_bytes": 40}, "rdma"),
        ({"net/eth0/tx_bytes": 600, "rdma/rdmap85s0/rx_bytes": 5}, "tcp"),
        ({"net/eth0/tx_bytes": 200, "net/eth0/rx_bytes": 200}, "unknown"),
        ({}, "unknown"),
    ],
)
def test_whoever_carried_half_of_the_bytes_is_the_way(growth: dict[str, int], route: str) -> None:
    assert route_by_counters(growth, 1000) == route


def test_nothing_moved_is_no_evidence() -> None:
    assert route_by_counters({"net/lo/rx_bytes": 10}, 0) == "unknown"


def test_the_host_is_described_from_sysfs(sys_of_a_p5en: Path, tmp_path: Path) -> None:
    assert instance_type(sys_of_a_p5en) == "p5en.48xlarge"
    assert rdma_devices(sys_of_a_p5en) == ["mlx5_0", "rdmap85s0"]
    assert (instance_type(tmp_path / "none"), rdma_devices(tmp_path / "none")) == ("", [])


@pytest.mark.parametrize("name", ["KVM", "Standard PC (Q35 + ICH9, 2009)", "", "p5en.48xlarge\x1b[31m"])
def test_a_machine_that_is_no_ec2_instance_has_no_type(name: str, tmp_path: Path) -> None:
    file = tmp_path / "devices/virtual/dmi/id/product_name"
    file.parent.mkdir(parents=True)
    file.write_text(name)
    assert instance_type(tmp_path) == ""


def test_counters_that_should_stand_still_are_named() -> None:
    growth = {"rdma/rdmap85s0/rdma_read_wr_err": 3, "rdma/rdmap85s0/rdma_read_bytes": 9, "net/eth0/rx_bytes": 5}
    assert trouble_in(growth) == ["rdma/rdmap85s0/rdma_read_wr_err +3"]


def test_a_tcp_rail_that_carried_nothing_does_not_name_the_route() -> None:
    # As UCX 1.20 lists them between two GPUs of one host: NVLink, and TCP for its own messages.
    said = Said([Rail("cuda_ipc", "cuda"), Rail("tcp", "lo")], "tcp")
    growth = {"net/lo/rx_bytes": 93_214, "net/lo/tx_bytes": 93_266}
    assert without_idle_tcp(said, growth, 70_866_960_384).route == "cuda_ipc"


def test_a_tcp_rail_that_may_have_carried_data_still_names_the_route() -> None:
    said = Said([Rail("cuda_ipc", "cuda"), Rail("tcp", "lo")], "tcp")
    assert without_idle_tcp(said, {"net/lo/tx_bytes": 60_000_000_000}, 70_866_960_384).route == "tcp"
    assert without_idle_tcp(said, {}, 70_866_960_384).route == "tcp"
