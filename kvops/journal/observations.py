"""What advice needs of a journal: transfers, prefills, gaps between turns, and how busy engines were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvops.journal.figures import WAITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvops.journal.tables import Journal

# vLLM's default; used only where no hold tells.
_BLOCK_TOKENS = 16

_PREFILLS = """
    SELECT prompt - local_hit - remote AS tokens, local_hit + remote AS history,
           finished - coalesce(loaded, allocated) AS seconds
    FROM requests WHERE role = 'prefill' AND outcome = 'ok' AND prompt > local_hit + remote
    AND finished > coalesce(loaded, allocated)"""
# A turn of a conversation with the beginning of the next one; by conversation and turn, for each turn has a line on
# prefill and one on decode, and more if it was tried again.
_TURNS = """
    WITH turns AS (
        SELECT conversation, turn, min(arrived) AS began,
               max(finished) FILTER (role <> 'prefill') AS ended, max(prompt) AS prompt,
               max(prompt + generated) FILTER (role <> 'prefill') AS kept, max(hold_blocks) FILTER (role <> 'prefill')
               AS blocks, max(local_hit) FILTER (role = 'prefill') AS local_hit
        FROM requests WHERE conversation IS NOT NULL AND turn IS NOT NULL GROUP BY ALL)
    SELECT a.ended, a.kept, a.blocks, b.began - a.ended AS gap,
           greatest(0, least(a.kept, b.prompt - 1) - coalesce(b.local_hit, 0)) AS reusable
    FROM turns a LEFT JOIN turns b ON b.conversation = a.conversation AND b.turn = a.turn + 1
    WHERE a.ended IS NOT NULL AND a.kept IS NOT NULL"""
_HANDOVERS = """
    SELECT d.loaded - p.finished AS handover, d.wire AS wire, d.post AS post
    FROM requests d JOIN requests p ON p.leg = d.leg AND p.role = 'prefill'
    WHERE d.role <> 'prefill' AND d.direction = 'p_to_d' AND d.mode <> 'push' AND d.loaded > p.finished"""


@dataclass(frozen=True)
class Turns:
    """Answered turns of conversations; arrays of one value a turn.

    Attributes:
        gap_seconds: from decode's end of the turn to the arrival of the next one; NaN if none came.
        reusable_tokens: tokens of the next turn that decode held and prefill did not; 0 if none came.
        blocks: that decode would hold.
        seen_seconds: how long after the turn the journal still goes on.
    """

    gap_seconds: np.ndarray
    reusable_tokens: np.ndarray
    blocks: np.ndarray
    seen_seconds: np.ndarray


@dataclass(frozen=True)
class Engines:
    """Engines of one role: how many, their mean share of time with work, and requests' mean seconds in their queue."""

    count: int
    busy_share: float
    queue_seconds: float


def transfers(journal: Journal, direction: str) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and seconds of the reads in one direction, without the waits for handshakes.

    Pushed requests are left out: decode waits from its allocation on, and so for the prefill as well.
    """
    query = (
        f"SELECT * EXCLUDE (direction, mode) FROM ({WAITS})"
        f" WHERE direction = '{direction}' AND remote > 0 AND mode IS DISTINCT FROM 'push'"
    )
    waits = journal.columns(query)
    seconds = waits["wait"] - waits["handshake"]
    good = np.isfinite(seconds) & (seconds > 0)
    return waits["remote"][good], seconds[good]


def prefills(journals: Sequence[Journal]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return computed tokens, the tokens before them, and seconds of prefills."""
    found = [journal.columns(_PREFILLS) for journal in journals]
    tokens, history, seconds = (
        np.concatenate([each[name] for each in found]) for name in ("tokens", "history", "seconds")
    )
    return tokens, history, seconds


def turns(journal: Journal) -> Turns:
    """Return the turns of all conversations that are known by their hash."""
    found = journal.columns(_TURNS)
    end = journal.one("SELECT max(greatest(arrived, coalesce(finished, arrived))) FROM requests")
    size = block_tokens(journal)
    blocks = np.where(np.isfinite(found["blocks"]), found["blocks"], np.ceil(found["kept"] / size))
    gap = np.where(found["gap"] < 0, np.nan, found["gap"])
    reusable = np.where(np.isfinite(gap), np.nan_to_num(found["reusable"]), 0.0)
    return Turns(gap, reusable, blocks, np.maximum(end - found["ended"], 0))


def block_tokens(journal: Journal) -> int:
    """Return the tokens of a KV block, as the holds of prefill tell: blocks = prompt / size, rounded up."""
    size = journal.one(
        "SELECT max(ceil(prompt / hold_blocks)) FROM requests WHERE role = 'prefill' AND hold_blocks > 0 AND prompt > 0"
    )
    return int(size) if np.isfinite(size) else _BLOCK_TOKENS


def handovers(journal: Journal) -> dict[str, np.ndarray]:
    """Return, of pulled requests, seconds from the end of prefill to KV on decode, and of the transfer in it."""
    return journal.columns(_HANDOVERS)


def engines(journal: Journal, role: str) -> Engines:
    """Return how busy the engines of ``role`` were."""
    rows = journal.rows(
        "SELECT engine, arrived, allocated, coalesce(finished, allocated) FROM requests"
        f" WHERE role = '{role}' AND allocated IS NOT NULL AND engine IS NOT NULL ORDER BY engine, allocated"
    )
    if not rows:
        return Engines(0, 0.0, 0.0)
    span = journal.one("SELECT max(coalesce(finished, arrived)) - min(arrived) FROM requests")
    names = np.array([row[0] for row in rows])
    times = np.array([row[1:] for row in rows], dtype=float)
    busy = [_union_seconds(times[names == name, 1:]) / span if span > 0 else 0.0 for name in np.unique(names)]
    return Engines(len(busy), float(np.mean(busy)), float(np.mean(times[:, 1] - times[:, 0])))


def _union_seconds(spans: np.ndarray) -> float:
    """Return the time that is in at least one of the spans (begin, end), which are sorted by begin."""
    reached = np.maximum.accumulate(spans[:, 1])
    before = np.concatenate([[-np.inf], reached[:-1]])
    return float(np.sum(np.maximum(spans[:, 1] - np.maximum(spans[:, 0], before), 0)))
