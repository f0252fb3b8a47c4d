"""What the figures of a probe mean for the host they were measured on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from kvops.doctor.instances import line_of

if TYPE_CHECKING:
    from kvops.doctor.probe.evidence import Route
    from kvops.doctor.probe.messages import Run

State = Literal["PASS", "WARN", "FAIL"]


# NIXL's UCX plugin sets MAX_RMA_RAILS=2, so one agent pair uses two EFAs at most (src/plugins/ucx of NIXL).
_UCX_RAILS = 2
# House rules, no guarantee of anyone: shares of the line that one accelerator pair reaches, and what a single TCP flow
# of EC2 reaches at most (9.5 Gbit/s and some room).
_PAIR_PASS = 0.60
_NEURON_PASS, _NEURON_FAIL = 0.70, 0.40
ONE_TCP_FLOW_GB_PER_SECOND = 1.3
_ASYMMETRY_WARN, _ASYMMETRY_FAIL = 0.15, 0.30


class Reason(msgspec.Struct, frozen=True):
    """One thing that the verdict rests on."""

    state: State
    text: str


class Verdict(msgspec.Struct, frozen=True):
    """PASS, WARN or FAIL: the worst of the reasons, and a headline."""

    state: State
    headline: str
    reasons: list[Reason]


class Facts(NamedTuple):
    """What a verdict is made from: where the bytes went, whether RDMA should have carried them, what counters say."""

    runs: list[Run]
    backend: str
    memory: str
    instance: str
    same_host: bool
    route: Route
    rdma_expected: bool
    trouble: tuple[str, ...] = ()


def judge(facts: Facts) -> Verdict:
    """Return the verdict: data first, then the way, then the speed against what the instance type allows."""
    reasons = [*_data(facts.runs), *_way(facts)]
    reasons += [Reason("WARN", f"a device counted trouble meanwhile: {counter}") for counter in facts.trouble]
    threshold = threshold_gb_per_second(facts)
    if threshold and facts.runs:
        reasons += [*_speed(facts, threshold), *_symmetry(facts.runs)]
    worst: State = "PASS"
    for reason in reasons:
        worst = reason.state if reason.state == "FAIL" or (reason.state == "WARN" and worst == "PASS") else worst
    headline = next((reason.text for reason in reasons if reason.state == worst != "PASS"), "moved and checked")
    return Verdict(worst, headline, reasons)


class Threshold(NamedTuple):
    """GB/s from which a pair passes, and below which it fails."""

    passes: float
    fails: float
    line: float


def threshold_gb_per_second(facts: Facts) -> Threshold | None:
    """Return the thresholds of one pair of this host; None where nothing is known or no network was in the way.

    Two processes of one host are judged only if their bytes really went through its EFAs.
    """
    if facts.same_host and facts.route != "rdma":
        return None
    return pair_threshold(facts.instance, facts.backend, facts.memory)


def pair_threshold(instance_type: str, backend: str, memory: str) -> Threshold | None:
    """Return what one pair of agents should reach between two hosts of a type; None where nothing is published."""
    line = line_of(instance_type)
    if line is None:
        return None
    if memory == "dram":
        # Nobody published what one DRAM pair should reach; slower than one TCP flow is wrong all the same.
        return Threshold(ONE_TCP_FLOW_GB_PER_SECOND, ONE_TCP_FLOW_GB_PER_SECOND, line.efas * line.gb_per_second)
    rails = min(line.near_one_accelerator, _UCX_RAILS) if backend == "UCX" else line.near_one_accelerator
    reachable = rails * line.gb_per_second
    if instance_type.startswith("trn"):
        return Threshold(_NEURON_PASS * reachable, _NEURON_FAIL * reachable, reachable)
    return Threshold(_PAIR_PASS * reachable, ONE_TCP_FLOW_GB_PER_SECOND, reachable)


def _data(runs: list[Run]) -> list[Reason]:
    return [
        Reason(
            "FAIL",
            f"{run.operation} {run.pattern}: {run.wrong_bytes} of {run.size_bytes} bytes arrived wrong, "
            f"the first at {run.first_wrong}",
        )
        for run in runs
        if run.wrong_bytes
    ]


def _way(facts: Facts) -> list[Reason]:
    if facts.route == "tcp":
        if facts.rdma_expected:
            return [Reason("FAIL", f"{facts.backend} moved the bytes over TCP, though RDMA devices should carry them")]
        return [Reason("PASS", "over TCP; no RDMA device is known here")]
    if facts.memory == "vram" and facts.route in ("host_staging", "shared_memory"):
        direct = "CUDA IPC" if facts.same_host else "GPUDirect RDMA"
        return [Reason("WARN", f"device memory went through host memory: {direct} was not used")]
    if facts.route == "unknown" and facts.rdma_expected:
        return [Reason("WARN", "neither logs nor counters say what carried the bytes")]
    return []


def _speed(facts: Facts, threshold: Threshold) -> list[Reason]:
    reasons = []
    for operation, reached in _best_by_operation(facts.runs).items():
        text = f"{operation} reached {reached:.1f} GB/s of {threshold.line:g} ({facts.instance}, {facts.backend})"
        if reached < threshold.fails:
            reasons.append(Reason("FAIL", f"{text}, under {threshold.fails:.1f} is a fault"))
        elif reached < threshold.passes:
            reasons.append(Reason("WARN", f"{text}, {threshold.passes:.1f} is to be expected"))
        else:
            reasons.append(Reason("PASS", text))
    return reasons


def _symmetry(runs: list[Run]) -> list[Reason]:
    best = _best_by_operation(runs)
    if len(best) < 2:
        return []
    gap = 1 - min(best.values()) / max(best.values())
    if gap <= _ASYMMETRY_WARN:
        return []
    text = f"READ and WRITE differ by {gap:.0%} ({best['READ']:.1f} and {best['WRITE']:.1f} GB/s)"
    return [Reason("FAIL" if gap > _ASYMMETRY_FAIL else "WARN", text)]


def _best_by_operation(runs: list[Run]) -> dict[str, float]:
    best: dict[str, float] = {}
    for run in runs:
        best[run.operation] = max(best.get(run.operation, 0.0), run.gb_per_second)
    return best
