"""The figures of a report as rows of text, the same in the terminal and in the page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.filesize import decimal

from kvops.journal.figures import PHASES
from kvops.journal.legs import ALL, LATENCIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvops.journal.figures import Figures, Flow, Prompts
    from kvops.journal.intervals import Estimate

CELL_COLUMNS = (
    "leg",
    "requests of",
    "count",
    "failed",
    "TTFT ms",
    "TTFT p99",
    "TPOT ms",
    "ITL p50",
    "ITL p99",
    "tokens/s",
)
WAIT_COLUMNS = ("leg", "way", "requests", *(f"{phase} ms" for phase in PHASES))
FLOW_COLUMNS = ("leg", "way", "post share", "moved", "rate", "desc/transfer", "bytes/desc")
PROMPT_COLUMNS = ("leg", "requests of", "count", "prompt tokens", "computed", "read back", "own cache")
COUNTED_COLUMNS = (
    "leg", "engines", "tokens computed", "own cache", "from the peer", "moved", "transfers", "post share", "expired",
    "read late",
)  # fmt: skip
HELD_COLUMNS = ("leg", "holder", "ended by", "holds", "block-seconds", "longest s")
RATIO_COLUMNS = ("requests of", "", "ratio", "95 % interval", "verdict")
# The bootstrap's intervals of a handful of values are too narrow by far.
_FEWEST_FOR_VERDICT = 10
_NAMES = dict(zip(LATENCIES, ("TTFT", "TPOT", "ITL p50", "ITL p99"), strict=True))


def tables(
    legs: Sequence[Figures], compared: dict[str, dict[str, Estimate]] | None, names: tuple[str, str] | None
) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """Return title, columns and rows of each table of a report; those without rows are left out."""
    found: list[tuple[str, Sequence[str], list[list[str]]]] = [
        ("Latency and throughput", CELL_COLUMNS, cell_rows(legs)),
        (" / ".join(names or ()), RATIO_COLUMNS, ratio_rows(compared or {})),
        ("Counted by the engines", COUNTED_COLUMNS, counted_rows(legs)),
        ("Wait for KV by phase", WAIT_COLUMNS, wait_rows(legs)),
        ("Transfers", FLOW_COLUMNS, flow_rows(legs)),
        ("Prefill's tokens, of a mean request", PROMPT_COLUMNS, prompt_rows(legs)),
        ("Tokens", ("leg", "what", "tokens", "share"), token_rows(legs)),
        ("Held blocks", HELD_COLUMNS, held_rows(legs)),
    ]
    return [table for table in found if table[2]]


def milliseconds(found: Estimate | None) -> str:
    """Return an estimate of seconds in milliseconds, with its interval."""
    if found is None:
        return "-"
    digits = 1 if found.value < 1 else 0
    value = f"{found.value * 1e3:.{digits}f}"
    if not (math.isfinite(found.low) and math.isfinite(found.high)):
        return value
    return f"{value} [{found.low * 1e3:.{digits}f}, {found.high * 1e3:.{digits}f}]"


def cell_rows(legs: Sequence[Figures]) -> list[list[str]]:
    """Return a row for each leg and cell, as ``CELL_COLUMNS``; none for all where there is only one cell."""
    return [
        [
            leg.leg,
            cell.name,
            f"{cell.requests:,}",
            f"{cell.failed:,}",
            milliseconds(cell.ttft_seconds),
            milliseconds(cell.ttft_p99_seconds),
            milliseconds(cell.tpot_seconds),
            milliseconds(cell.itl_p50_seconds),
            milliseconds(cell.itl_p99_seconds),
            f"{cell.output_tokens_per_second:,.1f}",
        ]
        for leg in legs
        for cell in leg.cells
        if cell.name != ALL or len(leg.cells) != 2
    ]


def prompt_rows(legs: Sequence[Figures]) -> list[list[str]]:
    """Return a row for each leg and cell of a run, as ``PROMPT_COLUMNS``."""
    return [
        [leg.leg, one.cell, f"{one.requests:,}", *(f"{tokens:,.0f}" for tokens in _sources(one))]
        for leg in legs
        if leg.kv
        for one in leg.kv.prompts
    ]


def _sources(prompts: Prompts) -> tuple[float, ...]:
    found = (prompts.computed, prompts.remote, prompts.local_hit)
    return (sum(found), *found)


def wait_rows(legs: Sequence[Figures]) -> list[list[str]]:
    """Return a row for each leg and direction, as ``WAIT_COLUMNS``."""
    return [
        [leg.leg, _way(flow), f"{flow.requests:,}", *(milliseconds(flow.phase_seconds.get(phase)) for phase in PHASES)]
        for leg in legs
        if leg.kv
        for flow in leg.kv.flows
    ]


def flow_rows(legs: Sequence[Figures]) -> list[list[str]]:
    """Return a row for each leg and direction, as ``FLOW_COLUMNS``."""
    return [
        [
            leg.leg,
            _way(flow),
            "-" if flow.post_share is None else f"{flow.post_share:.0%}",
            decimal(flow.bytes),
            "-" if flow.bytes_per_second is None else f"{flow.bytes_per_second / 1e9:.2f} GB/s",
            "-" if flow.descriptors_per_transfer is None else f"{flow.descriptors_per_transfer:,.0f}",
            "-" if flow.bytes_per_descriptor is None else decimal(int(flow.bytes_per_descriptor)),
        ]
        for leg in legs
        if leg.kv
        for flow in leg.kv.flows
    ]


def _way(flow: Flow) -> str:
    return "P to D" if flow.direction == "p_to_d" else "D to P"


def counted_rows(legs: Sequence[Figures]) -> list[list[str]]:
    """Return a row for each leg and role, as ``COUNTED_COLUMNS``."""
    return [
        [
            leg.leg,
            role,
            f"{counted.computed_tokens:,}",
            f"{counted.cached_tokens:,}",
            f"{counted.transferred_tokens:,}",
            decimal(counted.kv_bytes),
            f"{counted.transfers:,}",
            f"{counted.post_seconds / counted.transfer_seconds:.0%}" if counted.transfer_seconds else "-",
            f"{counted.expired:,}",
            f"{counted.reads_after_expiry:,}",
        ]
        for leg in legs
        for role, counted in leg.counted.items()
    ]


def token_rows(legs: Sequence[Figures]) -> list[list[str]]:
    """Return where tokens came from: leg, what, tokens, share."""
    rows = []
    for leg in legs:
        if leg.kv is None:
            continue
        prompt = sum(leg.kv.prefill_tokens.values())
        for name, text in (
            ("local_hit", "prefill's own cache"),
            ("remote", "read back from decode"),
            ("computed", "computed"),
        ):
            count = leg.kv.prefill_tokens[name]
            rows.append([leg.leg, text, f"{count:,}", f"{count / prompt:.1%} of prefill's prompts" if prompt else "-"])
        computed = sum(leg.kv.recomputed_tokens.values())
        for reason, count in leg.kv.recomputed_tokens.items():
            share = f"{count / computed:.1%} of all computed" if computed else "-"
            rows.append([leg.leg, f"computed: {reason}", f"{count:,}", share])
    return rows


def held_rows(legs: Sequence[Figures]) -> list[list[str]]:
    """Return a row for each leg, holder and end, as ``HELD_COLUMNS``."""
    return [
        [
            leg.leg,
            hold.holder,
            hold.ended_by,
            f"{hold.holds:,}",
            f"{hold.block_seconds:,.0f}",
            f"{hold.longest_seconds:.1f}",
        ]
        for leg in legs
        if leg.kv
        for hold in leg.kv.held
    ]


def ratio_rows(compared: dict[str, dict[str, Estimate]]) -> list[list[str]]:
    """Return a row for each cell and latency, as ``RATIO_COLUMNS``."""
    return [
        [cell, _NAMES[latency], f"{found.value:.3f}", f"[{found.low:.3f}, {found.high:.3f}]", _verdict(found)]
        for cell, by_latency in compared.items()
        if cell != ALL or len(compared) != 2
        for latency, found in by_latency.items()
    ]


def _verdict(ratio: Estimate) -> str:
    if ratio.count < _FEWEST_FOR_VERDICT:
        return "too few requests"
    if ratio.high < 1:
        return "first is faster"
    return "second is faster" if ratio.low > 1 else "no difference shown"


def about(legs: Sequence[Figures]) -> list[str]:
    """Return how and where the legs were measured, each sentence once."""
    return list(dict.fromkeys(sentence for leg in legs for sentence in leg.about))


def notes(legs: Sequence[Figures], differences: Sequence[str] = ()) -> list[str]:
    """Return what the reader must know before believing the figures; ``differences`` are those of a comparison."""
    found = list(dict.fromkeys(problem for leg in legs for problem in leg.problems))
    if differences:
        found.append(f"the runs that are compared differ in {', '.join(differences)}: the ratios hold that, too")
    for leg in legs:
        if not any(cell.requests for cell in leg.cells):
            found.append(f"{leg.leg}: no request; journals of decode and of the router or prefill show some together")
        if leg.kv is None:
            found.append(f"{leg.leg}: no journal, so nothing is known of its KV")
            continue
        if leg.kv.unreadable_lines:
            found.append(f"{leg.leg}: {leg.kv.unreadable_lines:,} lines could not be read and were skipped")
        if leg.kv.unknown_version_lines:
            found.append(f"{leg.leg}: {leg.kv.unknown_version_lines:,} lines of an unknown schema were skipped")
    return found
