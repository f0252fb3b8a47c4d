"""Digests of token prefixes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops_connectors.prefix import Extra, from_wire, matched_tokens, of_tokens

TOKENS = st.lists(st.integers(0, 200_000), min_size=1, max_size=300)


@given(TOKENS)
def test_equal_tokens_match_whole(tokens):
    assert matched_tokens(of_tokens(tokens, 16), tokens) == len(tokens)


@given(TOKENS, TOKENS)
def test_a_longer_prompt_matches_all_of_its_prefix(tokens, more):
    assert matched_tokens(of_tokens(tokens, 16), tokens + more) == len(tokens)


@given(TOKENS, st.data())
def test_nothing_matches_from_an_edit_on(tokens, data):
    where = data.draw(st.integers(0, len(tokens) - 1))
    edited = [*tokens]
    edited[where] += 1
    matched = matched_tokens(of_tokens(tokens, 16), edited)
    assert matched == where // 16 * 16


@given(TOKENS, st.data())
def test_a_shorter_prompt_matches_up_to_its_last_whole_block(tokens, data):
    length = data.draw(st.integers(0, len(tokens) - 1))
    assert matched_tokens(of_tokens(tokens, 16), tokens[:length]) == length // 16 * 16


def test_tokens_under_another_adapter_do_not_match():
    tokens = list(range(100))
    assert matched_tokens(of_tokens(tokens, 16, salt="sql-lora/"), tokens, salt="/") == 0


def test_nothing_matches_from_another_image_on():
    tokens = list(range(100))
    digests = of_tokens(tokens, 16, extras=[Extra(40, 60, "cat")])
    assert matched_tokens(digests, tokens, extras=[Extra(40, 60, "cat")]) == 100
    assert matched_tokens(digests, tokens, extras=[Extra(40, 60, "dog")]) == 32


@pytest.mark.parametrize("length", [1, 15, 16, 17, 2048, 32_768, 131_072])
def test_the_digests_stay_below_1500_bytes(length):
    wire = of_tokens(range(length), 16).wire()
    assert len(json.dumps(wire)) < 1500
    assert from_wire(json.loads(json.dumps(wire))) == of_tokens(range(length), 16)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 0},
        {"tokens": 200},
        {"tokens": "100"},
        {"tokens": True},
        {"step": 0},
        {"step": 24},
        {"block_tokens": None},
        {"digests": "!"},
        {"digests": "A" * 100_000},
        {"digests": 5},
    ],
    ids=str,
)
def test_digests_that_make_no_sense_are_none(change):
    assert from_wire({**of_tokens(range(100), 16).wire(), **change}) is None


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner)))
def test_anything_else_is_none(wire):
    assert from_wire(wire) is None
