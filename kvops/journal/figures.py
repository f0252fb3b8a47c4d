"""What a report states: latencies of requests, and what their KV did, for each leg of a run or for some journals."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvops.bench import results
from kvops.journal.intervals import Estimate, estimate, ratio
from kvops.journal.tables import Journal, find_files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ALL = "all"
LATENCIES = ("ttft_seconds", "tpot_seconds", "itl_p50_seconds", "itl_p99_seconds")
PHASES = ("queue", "handshake", "post", "data", "other")
_MOST_TURNS = 50
# With fewer a 99th percentile is not between two of the values but beyond them.
_FEWEST_FOR_P99 = 100

# One row a request: the router's times with decode's tokens. In push mode the write is on prefill's hold line.
_ROUTED = """
    SELECT r.turn, r.outcome IN ('', 'ok') AS good, r.started, r.first_byte_at - r.started AS ttft_seconds, d.generated,
           (r.ended_at - r.first_byte_at) / nullif(d.generated - 1, 0) AS tpot_seconds, r.ended_at
    FROM (SELECT id, unnest(legs) AS leg FROM routed) l JOIN routed r USING (id)
    JOIN requests d ON d.leg = l.leg AND d.role <> 'prefill' AND d.prompt IS NOT NULL
    QUALIFY row_number() OVER (PARTITION BY r.id ORDER BY d.finished DESC) = 1"""
_UNROUTED = """
    SELECT coalesce(d.turn, p.turn) AS turn, d.outcome IN ('ok', 'recomputed') AS good, coalesce(p.arrived, d.arrived)
           AS started, coalesce(d.loaded, d.finished) - coalesce(p.arrived, d.arrived) AS ttft_seconds, d.generated,
           (d.finished - d.loaded) / nullif(d.generated, 0) AS tpot_seconds, d.finished AS ended_at
    FROM requests d LEFT JOIN requests p ON p.leg = d.leg AND p.role = 'prefill' WHERE d.role <> 'prefill'"""
WAITS = """
    SELECT r.direction, r.mode, r.prompt, r.remote, r.allocated - r.arrived AS queue,
           coalesce(r.handshake, h.handshake, 0) AS handshake, coalesce(r.post, h.post) AS post,
           coalesce(r.wire, h.wire) AS wire, r.loaded - r.allocated AS wait,
           coalesce(nullif(r.bytes, 0), h.bytes) AS bytes,
           coalesce(nullif(r.descriptors, 0), h.descriptors) AS descriptors,
           coalesce(nullif(r.transfers, 0), h.transfers) AS transfers
    FROM requests r LEFT JOIN holds h ON r.mode = 'push' AND h.mode = 'push' AND h.leg = r.leg AND h.holder = 'prefill'
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


@dataclass
class Leg:
    """What is to be reported as one: a leg of a run, or some journals.

    Attributes:
        name: of the leg, or of the journal.
        mode: pull, bidirectional or push; several are joined by ``+``.
        samples: by cell, arrays of one value a request: ``LATENCIES``, good, started, ended, output_tokens.
        journal: its journals, if there are any.
        counted: as in ``Figures``.
        about: likewise.
        problems: likewise.
        conditions: what else but the leg itself decides about its figures; empty for journals.
    """

    name: str
    mode: str
    samples: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    journal: Journal | None = None
    counted: dict[str, results.RoleCounters] = field(default_factory=dict)
    about: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    conditions: dict[str, Any] = field(default_factory=dict)

    def good(self, cell: str, latency: str) -> np.ndarray:
        """Return the latencies of the requests of a cell that ended well."""
        sample = self.samples[cell]
        values = sample.get(latency, np.empty(0))
        return values[sample["good"] > 0] if values.size else values


def legs_of_paths(paths: Sequence[Path]) -> list[Leg]:
    """Return the legs of each run among ``paths``, and one more for all other paths together.

    Raises:
        KvopsError: a path is neither a run nor a journal, or cannot be read.
    """
    runs = [path for path in paths if (path / results.RUN).is_file()]
    others = [path for path in paths if path not in runs]
    legs = [leg for run in runs for leg in _legs_of_run(run, prefix=f"{run.name}:" if len(runs) > 1 else "")]
    if others:
        legs.append(_leg_of_journals(" ".join(path.name for path in others), others))
    return legs


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


def _legs_of_run(folder: Path, prefix: str) -> list[Leg]:
    run = results.read_run(folder)
    about, conditions = _about_run(folder, run), _conditions(run)
    problems = [] if run.verdict.ok else [f"{folder.name}: the run FAILED: {one}" for one in run.verdict.problems]
    legs = {
        leg.name: Leg(
            prefix + leg.name,
            leg.mode,
            counted=_counted(run, leg.name),
            about=[about, _about_leg(prefix, leg)],
            problems=problems or run.verdict.problems,
            conditions=conditions,
        )
        for leg in run.legs
    }
    columns: dict[str, dict[str, list[tuple[float, ...]]]] = {name: {} for name in legs}
    sent: dict[str, dict[str, str]] = {name: {} for name in legs}
    for request in results.read_requests(folder):
        if request.leg not in columns:
            continue
        cell = _cell_name(run.kind, request)
        sent[request.leg][request.request_id] = cell
        if request.outcome == "aborted":
            continue
        for name in (cell, ALL):
            columns[request.leg].setdefault(name, []).append(_row(request))
    for name, leg in legs.items():
        found = columns[name]
        for each in sorted(found, key=lambda each: (each == ALL, _natural(each))):
            leg.samples[each] = dict(zip(_ROW, np.array(found[each], dtype=float).T, strict=True))
        files = results.journal_files(folder, name)
        if files:
            leg.journal = Journal(files)
            leg.journal.keep(sent[name])
    return list(legs.values())


# What may differ between two runs that are compared: the rest is how long and how often the same was done.
_NOT_CONDITIONS = ("seed", "rounds", "seconds", "conversations", "warm_up")


def _counted(run: results.Run, leg: str) -> dict[str, results.RoleCounters]:
    cells = [cell for cell in run.counters if cell.leg == leg]
    totals = {"prefill": results.RoleCounters(), "decode": results.RoleCounters()} if cells else {}
    for cell in cells:
        totals["prefill"].add(cell.prefill)
        totals["decode"].add(cell.decode)
    return totals


def _conditions(run: results.Run) -> dict[str, Any]:
    workload = {name: value for name, value in run.workload.items() if name not in _NOT_CONDITIONS}
    if run.kind == "imported":
        return {"kind": run.kind}
    machine = (run.environment.host, run.environment.gpus)
    models = sorted({leg.model for leg in run.legs})
    return {"kind": run.kind, "machine": machine, "versions": run.environment.versions, "model": models, **workload}


def _about_run(folder: Path, run: results.Run) -> str:
    if run.kind == "imported":
        return f"{folder.name}: requests of another tool"
    where = run.environment
    versions = ", ".join(f"{name} {where.versions[name]}" for name in ("vllm", "nixl") if name in where.versions)
    started = datetime.fromtimestamp(run.started, UTC)
    machine = ", ".join(where.gpus) or f"{where.cpus} CPUs ({where.cpu})"
    models = ", ".join(sorted({leg.model for leg in run.legs if leg.model}))
    told = f"{folder.name}: {run.kind} of {started:%Y-%m-%d %H:%M} UTC"
    return f"{told}, client on {machine}" + "".join(f"; {part}" for part in (models, versions) if part)


def _about_leg(prefix: str, leg: results.Leg) -> str:
    ids = ", conversations named" if leg.conversation_ids else ""
    return (
        f"{prefix}{leg.name}: {leg.mode}, {leg.connectors} connectors, prefill and decode asked "
        f"{_DISPATCH[leg.dispatch]}, prefill's own cache {leg.prefill_cache}{ids}"
    )


_DISPATCH = {"serial": "one after the other", "concurrent": "at once", "unknown": "in an unknown order"}
_ROW = ("good", "started", "ended", "output_tokens", *LATENCIES)


def _row(request: results.RequestResult) -> tuple[float, ...]:
    latencies = [getattr(request, latency) for latency in LATENCIES]
    return (
        float(request.outcome == "ok"),
        request.scheduled,
        request.scheduled + (request.e2e_seconds or 0.0),
        request.output_tokens,
        *(np.nan if value is None else value for value in latencies),
    )


def _cell_name(kind: str, request: results.RequestResult) -> str:
    if kind == "turns":
        return f"turn {request.turn}"
    if kind == "imported":
        known = f", {request.cell.rate_per_second:g} req/s" if request.cell.rate_per_second else ""
        return f"about {request.cell.input_tokens} tokens{known}"
    rate = f"{request.cell.rate_per_second:g} req/s" if request.cell.rate_per_second else "one at a time"
    return f"{request.cell.input_tokens} tokens, {rate}"


def _natural(name: str) -> list[float]:
    """Return the numbers of a name, by which cells sort."""
    numbers = "".join(letter if letter.isdigit() or letter == "." else " " for letter in name).split()
    return [float(number) for number in numbers if number.strip(".").replace(".", "", 1).isdigit()]


def _leg_of_journals(name: str, paths: Sequence[Path]) -> Leg:
    journal = Journal(find_files(paths))
    table = "routed" if journal.one("SELECT count(*) FROM routed") else "requests"
    modes = journal.rows(f"SELECT DISTINCT mode FROM {table} WHERE mode IS NOT NULL ORDER BY mode")
    leg = Leg(name, " + ".join(mode for (mode,) in modes), journal=journal)
    found = journal.columns(_ROUTED if table == "routed" else _UNROUTED)
    whole = {
        "good": found["good"],
        "started": found["started"],
        "ended": found["ended_at"],
        "output_tokens": found["generated"],
        "ttft_seconds": found["ttft_seconds"],
        "tpot_seconds": found["tpot_seconds"],
    }
    turns = [int(turn) for turn in np.unique(found["turn"][np.isfinite(found["turn"])])]
    if len(turns) > 1:
        for turn in turns[:_MOST_TURNS]:
            leg.samples[f"turn {turn}"] = {key: values[found["turn"] == turn] for key, values in whole.items()}
    leg.samples[ALL] = whole
    return leg


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
        prompts=sorted((Prompts(**row) for row in _prompts(journal)), key=lambda one: _natural(one.cell)),
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
    other = np.maximum(waits["wait"] - waits["handshake"] - post - data, 0)
    values = (waits["queue"], waits["handshake"], post, data, other)
    return dict(zip(PHASES, values, strict=True))


def _total(values: np.ndarray) -> float:
    return float(np.nansum(values))
