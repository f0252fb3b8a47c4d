from __future__ import annotations

import itertools

import pytest

from kvops.bench.workload import Turns, arrival_times, gap_seconds, prompt
from kvops.errors import KvopsError

TURNS = Turns(
    conversations=1, turns=4, start_tokens=2000, end_tokens=8000, output_tokens=100, think_seconds=0.0,
    rate_per_second=0.0, abort_rate=0.0, arrivals="poisson", rounds=1, prefill_cache="cold", seed=0,
)  # fmt: skip


def first(count, *arguments):
    return list(itertools.islice(arrival_times(*arguments), count))


def test_prompts_depend_on_their_names_alone():
    assert prompt(64, 1, "a") == prompt(64, 1, "a") != prompt(64, 1, "b")


def test_prompts_hold_no_special_tokens():
    assert {3 <= token < 256 for token in prompt(5000, 0)} == {True}


def test_arrivals_are_the_same_for_the_same_seed():
    assert first(20, 4.0, "poisson", 1) == first(20, 4.0, "poisson", 1) != first(20, 4.0, "poisson", 2)


def test_poisson_arrivals_have_the_mean_that_was_asked_for():
    times = first(4001, 5.0, "poisson", 3)
    assert times[-1] / 4000 == pytest.approx(0.2, rel=0.05)


def test_constant_arrivals_have_equal_gaps():
    assert first(4, 2.0, "constant", 0) == [0.0, 0.5, 1.0, 1.5]


def test_a_conversation_grows_evenly_from_start_to_end():
    assert [TURNS.prompt_tokens(turn) for turn in (1, 2, 3, 4)] == [2000, 4000, 6000, 8000]


def test_turns_that_add_nothing_are_refused():
    with pytest.raises(KvopsError, match="adds 20 tokens"):
        Turns(**{name: getattr(TURNS, name) for name in TURNS.__struct_fields__} | {"end_tokens": 2060}).check()


def test_no_think_time_is_no_gap():
    assert gap_seconds(0.0, 1) == 0.0
