"""Cost of moving and of computing tokens, fitted to what was measured, and where the two are equal.

A transfer of n tokens takes a + b n seconds. A prefill of m new tokens behind h tokens of history takes
c + d m + e ((h + m)^2 - h^2): d for the layers, e for attention, which sees the history too; without history that is
c + d n + e n^2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvops.journal.intervals import Estimate

MIN_OBSERVATIONS = 30
_MIN_SPREAD = 2.0
_RESAMPLES = 200
_MOST_OBSERVATIONS = 3000
# Huber's constant: full efficiency but 5 % on clean data, while an outlier pulls with bounded force.
_HUBER = 1.345


class TransferCost(NamedTuple):
    """Seconds to move n tokens: ``fixed + each * n``."""

    fixed: float
    each: float

    def seconds(self, tokens: np.ndarray) -> np.ndarray:
        """Return the seconds for ``tokens``."""
        return self.fixed + self.each * tokens


class PrefillCost(NamedTuple):
    """Seconds to compute m tokens behind h: ``fixed + each * m + square * ((h + m)^2 - h^2)``."""

    fixed: float
    each: float
    square: float

    def extra_seconds(self, tokens: np.ndarray) -> np.ndarray:
        """Return what computing ``tokens`` at the beginning of a prompt adds to a prefill that takes place anyway."""
        return self.each * tokens + self.square * tokens**2


def missing(tokens: np.ndarray, what: str) -> str:
    """Return what is missing to fit a cost over ``tokens``, or nothing."""
    if tokens.size < MIN_OBSERVATIONS:
        return f"{MIN_OBSERVATIONS - tokens.size} more {what} (there are {tokens.size})"
    shortest, longest = np.quantile(tokens, [0.05, 0.95])
    if longest < _MIN_SPREAD * max(shortest, 1):
        return f"{what} of other lengths: these are all of about {np.median(tokens):.0f} tokens"
    return ""


def fit_transfer(tokens: np.ndarray, seconds: np.ndarray) -> tuple[TransferCost, list[TransferCost]]:
    """Return the cost of transfers, and one cost for each bootstrap resample of the observations."""
    columns = np.column_stack([np.ones(tokens.size), tokens])
    whole, resampled = _fit_with_resamples(columns, seconds)
    return TransferCost(*whole), [TransferCost(*each) for each in resampled]


def fit_prefill(tokens: np.ndarray, history: np.ndarray, seconds: np.ndarray) -> tuple[PrefillCost, list[PrefillCost]]:
    """Return the cost of prefills of ``tokens`` behind ``history``, and one for each bootstrap resample."""
    columns = np.column_stack([np.ones(tokens.size), tokens, (history + tokens) ** 2 - history**2])
    whole, resampled = _fit_with_resamples(columns, seconds)
    return PrefillCost(*whole), [PrefillCost(*each) for each in resampled]


def break_even(transfer: TransferCost, prefill: PrefillCost) -> float:
    """Return the fewest tokens that are moved as fast as they are computed; infinite if there is no such number.

    What a prefill costs before its first token, ``prefill.fixed``, is paid in both cases, for the new tokens.
    """
    gain = prefill.each - transfer.each
    if prefill.square > 0:
        root = np.sqrt(gain**2 + 4 * prefill.square * max(transfer.fixed, 0.0))
        return max(0.0, float((root - gain) / (2 * prefill.square)))
    return max(transfer.fixed, 0.0) / gain if gain > 0 else float("inf")


def break_even_estimate(
    transfers: tuple[TransferCost, list[TransferCost]], prefills: tuple[PrefillCost, list[PrefillCost]], count: int
) -> Estimate:
    """Return the break-even with its interval from the resampled costs; ``count`` observations are behind it."""
    draws = [break_even(transfer, prefill) for transfer, prefill in zip(transfers[1], prefills[1], strict=True)]
    # By rank, for infinite values cannot be interpolated.
    low, high = np.quantile(draws, [0.025, 0.975], method="nearest")
    return Estimate(break_even(transfers[0], prefills[0]), float(low), float(high), count)


def _fit_with_resamples(columns: np.ndarray, seconds: np.ndarray) -> tuple[list[float], list[list[float]]]:
    rng = np.random.default_rng(0)
    if seconds.size > _MOST_OBSERVATIONS:
        chosen = rng.choice(seconds.size, _MOST_OBSERVATIONS, replace=False)
        columns, seconds = columns[chosen], seconds[chosen]
    whole = _robust_fit(columns, seconds)
    resampled = []
    for _ in range(_RESAMPLES):
        drawn = rng.integers(0, seconds.size, seconds.size)
        resampled.append(_robust_fit(columns[drawn], seconds[drawn]))
    return whole, resampled


def _robust_fit(columns: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Return non-negative coefficients by iteratively reweighted least squares with Huber's weights.

    A cost cannot be negative: a column whose coefficient comes out so is left out, and the others are fitted again.
    """
    kept = list(range(columns.shape[1]))
    while kept:
        found = _reweighted(columns[:, kept], seconds)
        if (found >= 0).all():
            break
        del kept[int(np.argmin(found * np.abs(columns[:, kept]).mean(axis=0)))]
    coefficients = [0.0] * columns.shape[1]
    for index, value in zip(kept, found, strict=False):
        coefficients[index] = float(value)
    return coefficients


def _reweighted(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-12)
    scaled = columns / scale
    weights = np.ones(seconds.size)
    found = np.zeros(columns.shape[1])
    for _ in range(30):
        weighted = scaled * weights[:, None]
        before, found = found, np.linalg.lstsq(weighted.T @ scaled, weighted.T @ seconds, rcond=None)[0]
        residuals = np.abs(seconds - scaled @ found)
        spread = max(1.4826 * float(np.median(residuals)), 1e-12)
        weights = np.minimum(1.0, _HUBER * spread / np.maximum(residuals, 1e-12))
        if np.allclose(before, found, rtol=1e-6, atol=1e-12):
            break
    unscaled: np.ndarray = found / scale
    return unscaled
