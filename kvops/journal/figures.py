"""What a report states: latencies of requests, and what their KV did, for each leg of a run or for some journals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvops.journal.intervals import Estimate, estimate, ratio
from kvops.journal.legs import ALL, LATENCIES, numbers_of

if TYPE_CHECKING:
    from kvops.bench import results
    from kvops.journal.legs import Leg
    from kvops.journal.tables import Journal

PHASES = ("queue", "prefill", "handshake", "post", "data", "other")
# With fewer a 99th percentile is not between two of the values but beyond them.
_FEWEST_FOR_P99 = 100

# A pushed request waits on decode while prefill still computes.
WAITS = """
    SELECT r.direction, r.mode, r.prompt, r.remote, r.allocated - r.arrived AS queue,
           greatest(0, coalesce(p.done, r.allocated) - r.allocated) AS prefill,
           coalesce(r.handshake, h.handshake, 0) AS handshake, coalesce(r.post, h.post) AS post,
           coalesce(r.wire, h.wire) AS wire, r.loaded - r.allocated AS wait,
           coalesce(nullif(r.bytes, 0), h.bytes) AS bytes,
           coalesce(nullif(r.descriptors, 0), h.descriptors) AS descriptors,
           coalesce(nullif(r.transfers, 0), h.transfers) AS transfers
    FROM requests r LEFT JOIN holds h ON r.mode = 'push' AND h.mode = 'push' AND h.leg = r.leg AND h.holder = 'prefill'
    LEFT JOIN (SELECT leg, max(finished) AS done FROM requests WHERE mode = 'push' AND role = 'prefill' GROUP BY leg)
    p ON p.leg = r.leg
    WHERE r.direction IS NOT NULL AND r.loaded IS NOT NULL"""


class Cell(msgspec.Struct, kw_only=True):
    """Latencies of the requests of one point of the workload; failed ones are counted but have no latency."""

    name: str
    requests: int
    failed: int
    output_tokens_per_second: float
    ttft_seconds: Estimate | None = None
    ttft_p99_seconds: Estimate | None = None
    tpot_seconds: Estimate | None = None
    itl_p50_seconds: Estimate | None = None
    itl_p99_seconds: Estimate | None = None


class Flow(msgspec.Struct, kw_only=True):
    """KV that moved in one direction.

    Attributes:
        direction: p_to_d or d_to_p.
        requests: requests that loaded KV.
        phase_seconds: mean time of a request in each of ``PHASES``.
        post_share: posting as a share of the whole transfer.
        bytes: moved.
        bytes_per_second: while a transfer was going on.
        descriptors_per_transfer: after NIXL merged neighbours.
        bytes_per_descriptor: likewise.
    """

    direction: str
    requests: int
    phase_seconds: dict[str, Estimate]
    post_share: float | None
    bytes: int
    bytes_per_second: float | None
    descriptors_per_transfer: float | None
    bytes_per_descriptor: float | None


class Held(msgspec.Struct, kw_only=True):
    """Holds on blocks, of prefill or decode, that ended in the same way."""

    holder: str
    ended_by: str
    holds: int
    block_seconds: float
    longest_seconds: float


class Prompts(msgspec.Struct, kw_only=True):
    """Where prefill's prompt tokens of one cell came from, tokens of a mean request.

    Attributes:
        cell: its name.
        requests: how many.
        computed: by prefill.
        remote: read back from decode.
        local_hit: found in prefill's own cache.
    """

    cell: str
    requests: int
    computed: float
    remote: float
    local_hit: float


class Kv(msgspec.Struct, kw_only=True):
    """What the engines' journals say about KV.

    Attributes:
        flows: by direction.
        prefill_tokens: of prompts on prefill: local_hit, remote, computed.
        prompts: the same of a mean request, by cell of the run.
        recomputed_tokens: on both sides, by reason.
        held: by holder and end.
        unreadable_lines: lines that were skipped.
        unknown_version_lines: lines of an unknown schema, skipped too.
    """

    flows: list[Flow]
    prefill_tokens: dict[str, int]
    prompts: list[Prompts] = []
    recomputed_tokens: dict[str, int]
    held: list[Held]
    unreadable_lines: int
    unknown_version_lines: int


class Figures(msgspec.Struct, kw_only=True):
    """Everything about one leg.

    Attributes:
        leg: its name.
        mode: pull, bidirectional or push; several are joined by ``+``.
        cells: latencies by point of the workload, the last one over all.
        kv: what its journals say; None without journals.
        counted: what its engines counted while its cells ran, by role; empty for journals.
        about: how and where it was measured, a sentence each; empty for journals.
        problems: why the run's figures may mean nothing, a sentence each; empty for a run without fault.
    """

    leg: str
    mode: str
    cells: list[Cell]
    kv: Kv | None
    counted: dict[str, results.RoleCounters] = {}
    about: list[str] = []
    problems: list[str] = []


def figures(leg: Leg) -> Figures:
    """Return the figures of one leg."""
    cells = [_cell(leg, name) for name in leg.samples]
    kv = _kv(leg.journal) if leg.journal else None
    return Figures(
        leg=leg.name, mode=leg.mode, cells=cells, kv=kv, counted=leg.counted, about=leg.about, problems=leg.problems
    )


def differences(first: Leg, second: Leg) -> list[str]:
    """Return the conditions in which two legs differ, such as ``seconds``; nothing is known of those of journals."""
    if not (first.conditions and second.conditions):
        return []
    names = first.conditions.keys() | second.conditions.keys()
    return sorted(name for name in names if first.conditions.get(name) != second.conditions.get(name))


def compare(first: Leg, second: Leg) -> dict[str, dict[str, Estimate]]:
    """Return by cell and latency the mean of ``first`` divided by that of ``second``.

    The mean over all requests of two runs with different cells would compare different work, so it is left out then.
    """
    mixed = bool(first.conditions and second.conditions) and first.samples.keys() != second.samples.keys()
    return {
        cell: {
            latency: found
            for latency in LATENCIES
            if (found := ratio(first.good(cell, latency), second.good(cell, latency))) is not None
        }
        for cell in first.samples
        if cell in second.samples and not (mixed and cell == ALL)
    }


def _cell(leg: Leg, name: str) -> Cell:
    sample = leg.samples[name]
    started, ended = sample["started"], sample["ended"]
    span = (
        float(np.nanmax(ended) - np.nanmin(started)) if np.isfinite(ended).any() and np.isfinite(started).any() else 0
    )
    tokens = float(np.nansum(sample["output_tokens"]))
    estimates = {latency: estimate(leg.good(name, latency)) for latency in LATENCIES}
    ttft = leg.good(name, "ttft_seconds")
    return Cell(
        name=name,
        requests=int(sample["good"].size),
        failed=int(np.sum(sample["good"] == 0)),
        output_tokens_per_second=tokens / span if span > 0 else 0.0,
        ttft_p99_seconds=estimate(ttft, p99) if ttft.size >= _FEWEST_FOR_P99 else None,
        **estimates,
    )


def p99(values: np.ndarray) -> np.ndarray:
    """Return the 99th percentile."""
    return np.asarray(np.quantile(values, 0.99))


def _kv(journal: Journal) -> Kv:
    tokens = journal.rows("SELECT sum(prompt), sum(local_hit), sum(remote) FROM requests WHERE role = 'prefill'")[0]
    prompt, local, remote = (int(value or 0) for value in tokens)
    reasons = journal.rows(
        "SELECT e.key, sum(e.value) FROM (SELECT unnest(map_entries(recomputed)) AS e FROM requests)"
        " WHERE e.value IS NOT NULL GROUP BY 1 ORDER BY 2 DESC, 1"
    )
    held = journal.rows(
        "SELECT coalesce(holder, ''), coalesce(ended_by, ''), count(*), coalesce(sum(blocks * held), 0),"
        " coalesce(max(held), 0) FROM holds GROUP BY 1, 2 ORDER BY 1, 2"
    )
    return Kv(
        flows=[flow for direction in ("p_to_d", "d_to_p") if (flow := _flow(journal, direction))],
        prefill_tokens={"local_hit": local, "remote": remote, "computed": max(0, prompt - local - remote)},
        prompts=sorted((Prompts(**row) for row in _prompts(journal)), key=lambda one: numbers_of(one.cell)),
        recomputed_tokens={reason: int(count) for reason, count in reasons},
        held=[
            Held(holder=holder, ended_by=end, holds=holds, block_seconds=float(cost), longest_seconds=float(longest))
            for holder, end, holds, cost, longest in held
        ],
        unreadable_lines=journal.unreadable,
        unknown_version_lines=journal.unknown_version,
    )


def _prompts(journal: Journal) -> list[dict[str, Any]]:
    rows = journal.rows(
        "SELECT l.cell, count(*), avg(p.prompt - p.local_hit - p.remote), avg(p.remote), avg(p.local_hit)"
        " FROM (SELECT DISTINCT cell, unnest(legs) AS leg FROM routed WHERE cell IS NOT NULL) l"
        " JOIN requests p ON p.leg = l.leg AND p.role = 'prefill' GROUP BY 1"
    )
    return [dict(zip(Prompts.__struct_fields__, row, strict=True)) for row in rows]


def _flow(journal: Journal, direction: str) -> Flow | None:
    waits = journal.columns(f"SELECT * EXCLUDE (direction, mode) FROM ({WAITS}) WHERE direction = '{direction}'")
    count = int(waits["wait"].size)
    if not count:
        return None
    phases = phase_seconds(waits)
    wire, descriptors = _total(waits["wire"]), _total(waits["descriptors"])
    moved, transfers = _total(waits["bytes"]), _total(waits["transfers"])
    return Flow(
        direction=direction,
        requests=count,
        phase_seconds={name: found for name, values in phases.items() if (found := estimate(values)) is not None},
        post_share=_total(waits["post"]) / wire if wire else None,
        bytes=int(moved),
        bytes_per_second=moved / wire if wire else None,
        descriptors_per_transfer=descriptors / transfers if transfers else None,
        bytes_per_descriptor=moved / descriptors if descriptors else None,
    )


def phase_seconds(waits: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return each request's seconds in each of ``PHASES``, from the columns of ``WAITS``.

    NIXL counts a transfer's time from the beginning of its posting, so the time on the wire holds the time of posting.
    """
    wire, post = np.nan_to_num(waits["wire"]), np.nan_to_num(waits["post"])
    data = np.maximum(wire - post, 0)
    other = np.maximum(waits["wait"] - waits["prefill"] - waits["handshake"] - post - data, 0)
    values = (waits["queue"], waits["prefill"], waits["handshake"], post, data, other)
    return dict(zip(PHASES, values, strict=True))


def _total(values: np.ndarray) -> float:
    return float(np.nansum(values))
