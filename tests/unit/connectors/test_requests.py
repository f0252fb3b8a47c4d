"""What is drawn from a request when it ends: tokens by source and reason, outcome, times of the slowest rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops_connectors.catalogue import RECOMPUTE_REASONS
from kvops_connectors.events import Ended, PushMet
from kvops_connectors.requests import Moves, OpenHold, OpenRequest, base_id


def request(**fields) -> OpenRequest:
    fields = {"acts_as": "prefill", "prompt": 1000, "scheduled": True, "status": "FINISHED_STOPPED", **fields}
    return OpenRequest("cmpl-7f-0-1234abcd", arrived_at=0.0, arrived=0.0, **fields)


CASES = {
    "a first turn": ({}, {"new_tokens": 1000}),
    "a local hit": ({"local": 960}, {"new_tokens": 40}),
    "decode that loaded all": (
        {"acts_as": "decode", "offered": 1000, "usable": 1000, "loading": 1000, "remote": 999},
        {"last_token": 1},
    ),
    "decode that must compute its last window itself": (
        {"acts_as": "decode", "offered": 1000, "usable": 1000, "loading": 996, "remote": 996},
        {"last_token": 4},
    ),
    "decode without a handle": ({"acts_as": "decode", "expects_handle": True}, {"no_handle": 1000}),
    "a readback": ({"offered": 900, "usable": 900, "loading": 900, "remote": 900}, {"new_tokens": 100}),
    "a readback of the whole prompt": (
        {"offered": 1200, "usable": 1000, "loading": 1000, "remote": 999},
        {"last_token": 1},
    ),
    "an edited history": (
        {"offered": 900, "usable": 512, "loading": 512, "remote": 512},
        {"prefix_mismatch": 388, "new_tokens": 100},
    ),
    "a wholly other history with a local hit": (
        {"offered": 900, "usable": 0, "local": 64},
        {"prefix_mismatch": 836, "new_tokens": 100},
    ),
    "an offer below the threshold": (
        {"offered": 900, "usable": 900, "local": 864, "declined": "below_threshold"},
        {"below_threshold": 36, "new_tokens": 100},
    ),
    "an offer that expired": (
        {"offered": 900, "usable": 900, "declined": "ttl_expired"},
        {"ttl_expired": 900, "new_tokens": 100},
    ),
    "a failed load that was recomputed": (
        {"offered": 900, "usable": 900, "loading": 900, "failed": "remote_gone"},
        {"remote_gone": 900, "new_tokens": 100},
    ),
    "a preempted request": ({"preempted": 1040}, {"new_tokens": 1000, "preempted": 1040}),
    "a request that was never scheduled": ({"scheduled": False}, {}),
}


@pytest.mark.parametrize(("fields", "reasons"), CASES.values(), ids=CASES)
def test_each_computed_token_has_its_reason(fields, reasons):
    assert request(**fields).recomputed() == reasons


@given(st.data())
def test_local_remote_and_computed_always_make_the_prompt(data):
    prompt = data.draw(st.integers(1, 5000))
    local = data.draw(st.integers(0, prompt - 1))
    offered = data.draw(st.integers(0, 6000))
    usable = data.draw(st.integers(0, offered))
    remote = data.draw(st.integers(0, max(0, min(usable, prompt) - local)))
    one = request(
        acts_as=data.draw(st.sampled_from(["prefill", "decode", "plain"])),
        prompt=prompt,
        local=local,
        offered=offered,
        usable=usable,
        remote=remote,
        loading=remote,
        failed=data.draw(st.sampled_from([None, "transfer_failed"])),
        declined=data.draw(st.sampled_from([None, "below_threshold", "ttl_expired"])),
    )
    reasons = one.recomputed()
    assert local + remote + sum(reasons.values()) == prompt
    assert reasons.keys() <= RECOMPUTE_REASONS.keys()
    assert min(reasons.values(), default=1) > 0


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({}, "ok"),
        ({"status": "FINISHED_LENGTH_CAPPED"}, "ok"),
        ({"declined": "below_threshold"}, "ok"),
        ({"failed": "transfer_failed"}, "recomputed"),
        ({"declined": "ttl_expired"}, "recomputed"),
        ({"failed": "transfer_failed", "status": "FINISHED_ERROR"}, "failed"),
        ({"status": "FINISHED_ERROR"}, "error"),
        ({"status": "FINISHED_IGNORED"}, "error"),
        ({"failed": "push_timeout", "status": "FINISHED_ABORTED"}, "aborted"),
    ],
)
def test_the_outcome_says_whether_kv_is_to_blame(fields, outcome):
    assert request(**fields).outcome() == outcome


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({}, None),
        ({"acts_as": "decode", "offered": 9}, None),
        ({"offered": 900, "usable": 900, "remote": 900}, "loaded"),
        ({"offered": 900, "usable": 900, "local": 960}, "local_hit"),
        ({"offered": 900, "usable": 0}, "prefix_mismatch"),
        ({"offered": 900, "usable": 900, "declined": "below_threshold"}, "below_threshold"),
        ({"offered": 900, "usable": 900, "declined": "ttl_expired"}, "expired"),
        ({"offered": 900, "usable": 900, "failed": "ttl_expired"}, "expired"),
        ({"offered": 900, "usable": 900, "failed": "remote_gone"}, "failed"),
        ({"offered": 900, "usable": 900, "declined": "no_handle"}, "ignored"),
        ({"offered": 900, "usable": 900, "scheduled": False}, None),
    ],
)
def test_a_readback_has_one_outcome(fields, outcome):
    assert request(**fields).readback_outcome() == outcome


def test_bytes_of_all_ranks_add_up_and_the_slowest_rank_gives_the_time():
    moves = Moves()
    for rank, wire in ((0, 0.5), (1, 0.8), (0, 0.2)):
        moves.add(Ended(rank, 1, "r", "READ", True, "10.0.0.7:5600", 0.01, wire, 4096, 3))
    moved = moves.struct("UCX")
    assert (moved.bytes, moved.descriptors, moved.transfers, moved.ranks) == (3 * 4096, 9, 3, 2)
    assert (moved.post_seconds, moved.wire_seconds) == (0.02, 0.8)


@pytest.mark.parametrize(("registered", "done", "last"), [(5.0, 3.0, "registration"), (3.0, 5.0, "prefill_blocks")])
def test_push_says_which_side_came_last_and_how_long_the_other_waited(registered, done, last):
    hold = OpenHold(request().ids, "prefill", 4, 0.0, 30.0)
    hold.met(PushMet(0, "r", "10.0.0.9:5600", "e", registered, done))
    assert (hold.push.waited_for, hold.push.waited_seconds) == (last, 2.0)


@pytest.mark.parametrize(
    ("request_id", "base"),
    [("cmpl-7f-0-1234abcd", "cmpl-7f-0"), ("chatcmpl-x-DEADBEEF", "chatcmpl-x"), ("cmpl-7f-0", "cmpl-7f-0")],
)
def test_vllms_random_suffix_is_not_part_of_the_base_id(request_id, base):
    assert base_id(request_id) == base
