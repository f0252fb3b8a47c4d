from __future__ import annotations

import numpy as np
import pytest

from kvops.journal.fits import (
    PrefillCost,
    TransferCost,
    break_even,
    break_even_estimate,
    fit_prefill,
    fit_transfer,
    missing,
)
from kvops.journal.intervals import estimate, ratio

TRANSFER = TransferCost(0.008, 2e-6)
PREFILL = PrefillCost(0.02, 2.5e-5, 1.5e-9)


def measured(seed: int, outliers: float = 0.0) -> tuple[tuple, tuple]:
    """Fit costs to 400 transfers and prefills with 5 % noise, and some that a stall made ten times as slow."""
    rng = np.random.default_rng(seed)
    moved, new, history = (rng.uniform(low, high, 400) for low, high in ((100, 8000), (50, 4000), (0, 16000)))
    moving = TRANSFER.seconds(moved) * rng.normal(1, 0.05, 400)
    computing = PREFILL.fixed + PREFILL.each * new + PREFILL.square * ((history + new) ** 2 - history**2)
    computing *= rng.normal(1, 0.05, 400)
    moving[rng.random(400) < outliers] *= 10
    computing[rng.random(400) < outliers] *= 10
    return fit_transfer(moved, moving), fit_prefill(new, history, computing)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_the_break_even_of_known_costs_is_found_within_ten_percent(seed: int, outliers: float) -> None:
    transfers, prefills = measured(seed, outliers)

    found = break_even_estimate(transfers, prefills, 400)

    truth = break_even(TRANSFER, PREFILL)
    assert truth == pytest.approx(341, abs=1)
    assert found.value == pytest.approx(truth, rel=0.1)
    assert found.low <= found.value <= found.high


@pytest.mark.heavy
def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    truth = break_even(TRANSFER, PREFILL)
    found = [break_even_estimate(*measured(seed), 400) for seed in range(20)]

    assert sum(one.low <= truth <= one.high for one in found) >= 16


def test_moving_and_computing_take_equally_long_at_the_break_even() -> None:
    tokens = np.array([break_even(TRANSFER, PREFILL)])

    assert TRANSFER.seconds(tokens) == pytest.approx(PREFILL.extra_seconds(tokens))


def test_there_is_no_break_even_where_computing_is_always_faster() -> None:
    assert break_even(TransferCost(0.01, 5e-5), PrefillCost(0.01, 1e-5, 0.0)) == float("inf")


def test_a_cost_is_never_negative() -> None:
    tokens = np.linspace(100, 5000, 200)

    (fixed, each), _ = fit_transfer(tokens, 0.01 - 1e-7 * tokens)

    assert each == 0
    assert fixed > 0


def test_too_few_observations_are_named_with_how_many_are_missing() -> None:
    assert missing(np.arange(12.0), "transfers") == "18 more transfers (there are 12)"


def test_observations_of_one_length_are_not_enough() -> None:
    assert "all of about 1000 tokens" in missing(np.full(500, 1000.0), "transfers")


def test_the_interval_of_a_mean_agrees_with_its_standard_error() -> None:
    values = np.random.default_rng(3).normal(10, 2, 900)

    found = estimate(values)

    assert found is not None
    assert found.high - found.low == pytest.approx(2 * 1.96 * 2 / 30, rel=0.15)


def test_the_interval_of_very_many_values_shrinks_with_their_number() -> None:
    rng = np.random.default_rng(4)
    few, many = estimate(rng.normal(10, 2, 2_000)), estimate(rng.normal(10, 2, 200_000))

    assert few is not None
    assert many is not None
    assert (few.high - few.low) / (many.high - many.low) == pytest.approx(10, rel=0.35)


def test_the_ratio_of_equal_samples_shows_no_difference() -> None:
    values = np.random.default_rng(5).exponential(1, 300)

    found = ratio(values, values)

    assert found is not None
    assert found.value == 1
    assert found.low < 1 < found.high
