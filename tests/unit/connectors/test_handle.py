"""Reading what a router hands in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops_connectors import handle, prefix

# As vLLM 0.32 returns it from decode in bidirectional mode, after JSON.
PARAMS = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
    "remote_engine_id": "0e1dd4f2-60ac-4f20-95a7-2993d1aa29cb",
    "remote_request_id": "cmpl-160d42dd4c8a4a30bf4c9436f5b742a1-0-a7e3ef03",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 207,
    "remote_blocks_expiry_time": 4711.25,
    "transfer_mode": "pull",
}


def with_digests(tokens: int = 207, blocks: int = 7) -> dict:
    wire = prefix.of_tokens(range(tokens), 32).wire()
    return {**PARAMS, "remote_block_ids": [list(range(blocks))], "remote_num_tokens": tokens, "kvops": {"prefix": wire}}


def test_a_whole_handle_is_read():
    offer = handle.read(PARAMS, push=False)
    assert (offer.peer, offer.tokens, offer.blocks, offer.prefix) == ("10.0.0.7:5600", 207, 7, None)


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": None},
        {"remote_block_ids": []},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": [[1, "2"]]},
        {"remote_block_ids": [[-1]]},
        {"remote_block_ids": "1,2"},
        {"remote_engine_id": None},
        {"remote_engine_id": 7},
        {"remote_request_id": ""},
        {"remote_host": None},
        {"remote_port": "5600"},
        {"remote_port": 0},
        {"remote_port": True},
        {"tp_size": "1"},
        {"tp_size": 0},
    ],
    ids=str,
)
def test_a_handle_with_a_hole_is_none(change):
    assert handle.read({**PARAMS, **change}, push=False) is None


def test_push_needs_no_block_ids():
    assert handle.read({**PARAMS, "remote_block_ids": None}, push=True) is not None


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.sampled_from([*PARAMS, "kvops"]), ANYTHING, st.booleans())
def test_no_value_of_any_key_makes_reading_raise(name, value, push):
    params = {**PARAMS, name: value}
    handle.read(params, push)
    handle.context(params)


def test_the_routers_words_are_kept_and_cut():
    words = {"router_id": "r" * 1000, "conversation": "c0ffee", "turn": 3, "attempt": "one"}
    said = handle.context({"kvops": words})
    assert (len(said.router_id), said.conversation, said.turn, said.attempt) == (256, "c0ffee", 3, None)


def test_a_cut_leaves_the_blocks_of_the_matching_tokens():
    params = with_digests()
    assert handle.cut(params, handle.read(params, push=False), 96) == 96
    assert (params["remote_num_tokens"], params["remote_block_ids"]) == (96, [[0, 1, 2]])


def test_a_cut_to_nothing_keeps_the_block_ids_so_that_the_peer_is_told():
    params = with_digests()
    assert handle.cut(params, handle.read(params, push=False), 0) == 0
    assert (params["remote_num_tokens"], params["remote_block_ids"]) == (0, [[0, 1, 2, 3, 4, 5, 6]])


@pytest.mark.parametrize("groups", [[[0, 1, 2, 3, 4, 5, 6], [5, 6]], [[0, 1]]], ids=["hybrid", "too few"])
def test_blocks_that_are_not_in_token_order_are_not_cut_but_given_up(groups):
    params = {**with_digests(), "remote_block_ids": groups}
    assert handle.cut(params, handle.read(params, push=False), 96) == 0
    assert (params["remote_num_tokens"], params["remote_block_ids"]) == (0, groups)


@pytest.mark.parametrize(("left", "expired"), [(4.0, True), (6.0, False), (-3.0, True)])
def test_a_handle_expires_before_its_ttl_by_vllms_own_margin(monkeypatch, left, expired):
    monkeypatch.setattr(handle.time, "time", lambda: 1000.0)
    offer = handle.read({**PARAMS, "kvops": {"expires_at": 1000.0 + left}}, push=False)
    assert offer.expired == expired
