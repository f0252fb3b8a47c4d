"""The legs of a report: those of bench runs, and journals; each with its requests' latencies and its journals."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from kvops.bench import results
from kvops.journal.tables import Journal, find_files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ALL = "all"
LATENCIES = ("ttft_seconds", "tpot_seconds", "itl_p50_seconds", "itl_p99_seconds")
_MOST_TURNS = 50
# What may differ between two runs that are compared: how long and how often the same was done.
_NOT_CONDITIONS = ("seed", "rounds", "seconds", "conversations", "warm_up")
_DISPATCH = {"serial": "one after the other", "concurrent": "at once", "unknown": "in an unknown order"}
_ROW = ("good", "started", "ended", "output_tokens", *LATENCIES)

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


def _legs_of_run(folder: Path, prefix: str) -> list[Leg]:
    run = results.read_run(folder)
    about, conditions = _about_run(folder, run), _conditions(run)
    problems = [f"{folder.name}: {'' if run.verdict.ok else 'the run FAILED: '}{one}" for one in run.verdict.problems]
    legs = {
        leg.name: Leg(
            prefix + leg.name,
            leg.mode,
            counted=_counted(run, leg.name),
            about=[about, _about_leg(prefix, leg)],
            problems=problems,
            conditions=conditions,
        )
        for leg in run.legs
    }
    cells = _read_samples(folder, run.kind, legs)
    for name, leg in legs.items():
        files = results.journal_files(folder, name)
        if files:
            leg.journal = Journal(files)
            leg.journal.keep(cells[name])
    return list(legs.values())


def _read_samples(folder: Path, kind: str, legs: dict[str, Leg]) -> dict[str, dict[str, str]]:
    """Fill the samples of ``legs`` and return, by leg, the cell of each request by the client's id."""
    rows: dict[str, dict[str, list[tuple[float, ...]]]] = {name: {} for name in legs}
    cells: dict[str, dict[str, str]] = {name: {} for name in legs}
    for request in results.read_requests(folder):
        if request.leg not in rows:
            continue
        cell = _cell_name(kind, request)
        cells[request.leg][request.request_id] = cell
        if request.outcome != "aborted":
            for name in (cell, ALL):
                rows[request.leg].setdefault(name, []).append(_row(request))
    for name, leg in legs.items():
        for cell in sorted(rows[name], key=lambda cell: (cell == ALL, numbers_of(cell))):
            leg.samples[cell] = dict(zip(_ROW, np.array(rows[name][cell], dtype=float).T, strict=True))
    return cells


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


def numbers_of(name: str) -> list[float]:
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
