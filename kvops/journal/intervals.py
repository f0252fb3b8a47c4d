"""Intervals by bootstrap: how far a figure would move if the same traffic came again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

RESAMPLES = 1000
_CONFIDENCE = 0.95
# A resample of n values costs n; beyond this many, the interval of a mean is narrower than anything that is printed.
MAX_SAMPLE = 5_000


class Estimate(msgspec.Struct, frozen=True):
    """A figure with the interval that holds it with 95 % confidence.

    Attributes:
        value: the figure.
        low: lower end.
        high: upper end.
        count: values behind it.
    """

    value: float
    low: float
    high: float
    count: int


def estimate(values: np.ndarray, statistic: Callable[..., np.ndarray] = np.mean) -> Estimate | None:
    """Return ``statistic`` of the finite ``values`` with its percentile-bootstrap interval; None without values."""
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    whole = float(statistic(values))
    draws = _resampled(values, statistic)
    low, high = _ends(draws, values.size)
    return Estimate(whole, min(low, whole), max(high, whole), int(values.size))


def ratio(above: np.ndarray, below: np.ndarray, statistic: Callable[..., np.ndarray] = np.mean) -> Estimate | None:
    """Return ``statistic(above) / statistic(below)`` of two independent samples, with its interval, or None."""
    above, below = above[np.isfinite(above)], below[np.isfinite(below)]
    if not above.size or not below.size or not float(statistic(below)):
        return None
    whole = float(statistic(above)) / float(statistic(below))
    with np.errstate(divide="ignore", invalid="ignore"):
        draws = _resampled(above, statistic, seed=1) / _resampled(below, statistic, seed=2)
    low, high = _ends(draws[np.isfinite(draws)], min(above.size, below.size))
    return Estimate(whole, min(low, whole), max(high, whole), int(min(above.size, below.size)))


def _resampled(values: np.ndarray, statistic: Callable[..., np.ndarray], seed: int = 0) -> np.ndarray:
    """Return the statistic of each resample; around the statistic of all values, from a subsample of very many."""
    rng = np.random.default_rng(seed)
    size = min(values.size, MAX_SAMPLE)
    sample = rng.choice(values, size, replace=False) if size < values.size else values
    draws = np.array([statistic(sample[rng.integers(0, size, size)]) for _ in range(_resamples(size))])
    # The spread of a figure falls with the root of the number of values.
    spread: np.ndarray = (draws - float(statistic(sample))) * np.sqrt(size / values.size)
    return spread + float(statistic(values))


def _resamples(size: int) -> int:
    return RESAMPLES if size <= 2000 else 200


def _ends(draws: np.ndarray, count: int) -> tuple[float, float]:
    if count < 2 or not draws.size:
        return -np.inf, np.inf
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return float(low), float(high)
