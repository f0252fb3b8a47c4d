"""What the figures of a probe mean: thresholds, the way, and the data."""

from __future__ import annotations

import pytest

from kvops.doctor.instances import instances, line_of
from kvops.doctor.probe.initiator import percentile_99
from kvops.doctor.probe.messages import Run
from kvops.doctor.probe.verdict import Facts, judge, threshold_gb_per_second


def run(operation: str, gb_per_second: float, wrong_bytes: int = 0, pattern: str = "merged") -> Run:
    return Run(
        operation="READ" if operation == "READ" else "WRITE",
        pattern=pattern,
        size_bytes=268435456,
        descriptors=8192,
        descriptor_bytes=32768,
        wire_descriptors=128,
        repeat=10,
        p50_seconds=0.268435456 / gb_per_second,
        p99_seconds=0.3 / gb_per_second,
        gb_per_second=gb_per_second,
        prepare_us_per_descriptor=0.1,
        post_us_per_descriptor=2.0,
        wire_us_per_descriptor=1.0,
        timed_by="nixl telemetry",
        wrong_bytes=wrong_bytes,
        first_wrong=4096 if wrong_bytes else None,
    )


def facts(read: float, write: float | None = None, **changes: object) -> Facts:
    runs = [run("READ", read), run("WRITE", read if write is None else write)]
    base = Facts(runs, "LIBFABRIC", "vram", "p5en.48xlarge", same_host=False, route="rdma", rdma_expected=True)
    return base._replace(**changes)


@pytest.mark.parametrize(
    ("instance", "backend", "line"),
    [
        ("p5.48xlarge", "LIBFABRIC", 50),
        ("p5.48xlarge", "UCX", 25),
        ("p5en.48xlarge", "LIBFABRIC", 100),
        ("p5en.48xlarge", "UCX", 50),
        ("p6-b200.48xlarge", "UCX", 100),
        ("p4d.24xlarge", "UCX", 12.5),
        ("g7e.12xlarge", "UCX", 50),
        ("trn2.48xlarge", "LIBFABRIC", 25),
        ("trn1.32xlarge", "LIBFABRIC", 12.5),
    ],
)
def test_the_line_of_one_pair_is_that_of_the_efas_near_its_accelerator(
    instance: str, backend: str, line: float
) -> None:
    threshold = threshold_gb_per_second(facts(1, instance=instance, backend=backend))
    assert threshold is not None
    assert threshold.line == line


@pytest.mark.parametrize("name", instances())
def test_no_accelerator_has_more_efas_near_it_than_there_are(name: str) -> None:
    line = line_of(name)
    assert line is None or 1 <= line.near_one_accelerator <= line.efas


@pytest.mark.parametrize(
    ("gb_per_second", "state"),
    [(61, "PASS"), (60, "PASS"), (59.9, "WARN"), (1.31, "WARN"), (1.29, "FAIL"), (0.3, "FAIL")],
)
def test_a_pair_of_a_known_type_is_held_against_its_line(gb_per_second: float, state: str) -> None:
    assert judge(facts(gb_per_second)).state == state


@pytest.mark.parametrize(("gb_per_second", "state"), [(19.3, "PASS"), (12, "WARN"), (9.9, "FAIL")])
def test_a_neuron_device_is_held_against_its_own_share(gb_per_second: float, state: str) -> None:
    assert judge(facts(gb_per_second, instance="trn2.48xlarge")).state == state


@pytest.mark.parametrize(("write", "state"), [(86, "PASS"), (80, "WARN"), (65, "FAIL")])
def test_one_direction_much_slower_than_the_other_is_found(write: float, state: str) -> None:
    assert judge(facts(100, write)).state == state


def test_the_best_pattern_of_each_direction_counts() -> None:
    slow_blocks = [run("READ", 4, pattern="blocks"), run("WRITE", 4, pattern="blocks")]
    healthy = facts(70)
    assert judge(healthy._replace(runs=slow_blocks + healthy.runs)).state == "PASS"


def test_an_unknown_host_gets_figures_and_no_threshold() -> None:
    verdict = judge(facts(0.4, instance="", rdma_expected=False, route="shared_memory", memory="dram", same_host=True))
    assert (verdict.state, verdict.headline, verdict.reasons) == ("PASS", "moved and checked", [])


def test_two_processes_of_one_known_host_are_not_held_against_the_network_they_did_not_use() -> None:
    assert judge(facts(0.9, same_host=True, route="cuda_ipc")).reasons == []


def test_tcp_where_rdma_should_be_is_the_headline() -> None:
    verdict = judge(facts(0.3, backend="UCX", route="tcp"))
    assert verdict.state == "FAIL"
    assert verdict.headline == "UCX moved the bytes over TCP, though RDMA devices should carry them"


def test_tcp_where_there_is_nothing_else_is_said_and_passes() -> None:
    verdict = judge(facts(0.3, instance="", route="tcp", rdma_expected=False, memory="dram"))
    assert verdict.state == "PASS"
    assert [reason.text for reason in verdict.reasons] == ["over TCP; no RDMA device is known here"]


@pytest.mark.parametrize(("same_host", "missing"), [(True, "CUDA IPC"), (False, "GPUDirect RDMA")])
def test_device_memory_that_went_through_the_host_is_a_warning(same_host: bool, missing: str) -> None:
    verdict = judge(facts(5, instance="", same_host=same_host, route="host_staging"))
    assert verdict.state == "WARN"
    assert missing in verdict.headline


def test_wrong_bytes_fail_whatever_the_speed() -> None:
    verdict = judge(facts(90)._replace(runs=[run("READ", 90), run("WRITE", 90, wrong_bytes=3)]))
    assert verdict.state == "FAIL"
    assert verdict.headline == "WRITE merged: 3 of 268435456 bytes arrived wrong, the first at 4096"


def test_the_slow_tcp_flow_of_a_dram_pair_fails() -> None:
    assert judge(facts(1.1, memory="dram")).state == "FAIL"
    assert judge(facts(5.0, memory="dram")).state == "PASS"


@pytest.mark.parametrize(("values", "expected"), [([3.0], 3.0), ([1.0, 9.0, 2.0], 9.0), (list(range(1, 201)), 198)])
def test_p99_is_the_nearest_rank(values: list[float], expected: float) -> None:
    assert percentile_99(values) == expected


def test_trouble_that_a_device_counted_is_a_warning() -> None:
    verdict = judge(facts(90, trouble=("rdma/rdmap85s0/rx_drops +12",)))
    assert (verdict.state, verdict.headline) == (
        "WARN",
        "a device counted trouble meanwhile: rdma/rdmap85s0/rx_drops +12",
    )
