"""The report: which evidence counts, and where RDMA is expected."""

from __future__ import annotations

import pytest

from kvops.doctor.probe import report
from kvops.doctor.probe.messages import Finished, Hello, Run, SideInfo

MOVED_BYTES = 1_000_000
LOG_SAYS_RDMA = ["libfabric_rail_manager.cpp:80] Created 16 rails using provider=efa"]
RUN = Run(
    operation="READ",
    pattern="buffer",
    size_bytes=MOVED_BYTES,
    descriptors=1,
    descriptor_bytes=MOVED_BYTES,
    wire_descriptors=1,
    repeat=1,
    p50_seconds=1e-5,
    p99_seconds=1e-5,
    gb_per_second=100.0,
    prepare_us_per_descriptor=1.0,
    post_us_per_descriptor=1.0,
    wire_us_per_descriptor=9.0,
    timed_by="clock",
    wrong_bytes=0,
    first_wrong=None,
)


def finished(here: str = "", there: str = "", rdma_devices: int = 0, wrong_bytes: int = 0) -> Finished:
    me = SideInfo(host="a", instance=here, rdma_devices=rdma_devices, device="cuda:0", nixl="1.5.1", plugins=["UCX"])
    peer = Hello(
        protocol=1, kvops="0.1.0", host="b", backend="UCX", memory="dram", rdma_devices=rdma_devices, instance=there
    )
    return Finished(me=me, peer=peer, runs=[RUN], moved_bytes=MOVED_BYTES, wrong_bytes=wrong_bytes)


def reported(
    monkeypatch: pytest.MonkeyPatch, ended: Finished, log: list[str], after: dict[str, int] | None = None
) -> report.Report:
    monkeypatch.setattr(report, "read_counters", lambda: after or {})
    return report.make_report("connect", ended, backend="UCX", memory="dram", log=log, counters_before={})


def test_the_log_names_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = reported(monkeypatch, finished(), LOG_SAYS_RDMA).evidence
    assert (evidence.route, evidence.route_by, evidence.provider) == ("rdma", "log", "efa")


def test_counters_that_saw_the_bytes_on_tcp_win_over_a_log_that_says_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = reported(monkeypatch, finished(), LOG_SAYS_RDMA, {"net/eth0/rx_bytes": MOVED_BYTES}).evidence
    assert (evidence.route, evidence.route_by) == ("tcp", "counters")


def test_counters_name_the_way_where_the_log_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = reported(monkeypatch, finished(), [], {"rdma/rdmap85s0/rdma_read_bytes": MOVED_BYTES}).evidence
    assert (evidence.route, evidence.route_by) == ("rdma", "counters")


def test_nothing_said_is_nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = reported(monkeypatch, finished(), []).evidence
    assert (evidence.route, evidence.route_by) == ("unknown", "nothing")


@pytest.mark.parametrize(
    ("ended", "state"),
    [
        (finished(), "PASS"),
        (finished(rdma_devices=16), "FAIL"),
        (finished("p5en.48xlarge", "p5en.48xlarge"), "FAIL"),
        (finished("p5en.48xlarge", "m7i.large"), "PASS"),
    ],
)
def test_tcp_is_trouble_only_where_both_sides_have_rdma_or_should(
    ended: Finished, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reported(monkeypatch, ended, [], {"net/eth0/rx_bytes": MOVED_BYTES}).verdict.state == state


def test_wrong_bytes_that_the_listening_side_found_are_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = reported(monkeypatch, finished(wrong_bytes=5), LOG_SAYS_RDMA).verdict
    assert (verdict.state, verdict.headline) == ("FAIL", "5 bytes that were written here arrived wrong")
