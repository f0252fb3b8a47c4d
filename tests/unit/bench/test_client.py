from __future__ import annotations

import time

import pytest

from kvops.bench.client import Ask, Client
from kvops.bench.results import Cell


def ask(**changes):
    fields = {"leg": "pull", "round": 0, "cell": Cell(input_tokens=3), "request_id": "r1", "prompt": [5, 6, 7]}
    return Ask(**(fields | {"new_tokens": 3, "output_tokens": 4} | changes))


async def send(fleet, request, due=None):
    client = Client(fleet.url, "tiny")
    try:
        return await client.send(request, client.body(request), time.monotonic() if due is None else due)
    finally:
        client.close()


async def test_a_good_answer_is_measured(fleet):
    result, tokens = await send(fleet, ask())
    assert (result.outcome, result.output_tokens, tokens) == ("ok", 4, [7, 8, 9, 7])
    assert 0 < result.ttft_seconds <= result.e2e_seconds
    assert result.tpot_seconds is not None


async def test_latency_counts_from_when_the_request_was_due(fleet):
    result, _ = await send(fleet, ask(), due=time.monotonic() - 5)
    assert result.ttft_seconds > 5
    assert result.sent - result.scheduled >= 5


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("error", "an error inside a 200"),
        ("short", "3 tokens instead of 4"),
        ("cut", "without [DONE]"),
        ("status", "HTTP 503"),
    ],
)
async def test_a_wrong_answer_is_a_failure(fleet, behaviour, said):
    fleet.behaviour = behaviour
    result, _ = await send(fleet, ask())
    assert result.outcome == "failed"
    assert said in result.error
    assert result.e2e_seconds is None


async def test_a_server_that_is_not_there_is_a_failure(fleet):
    client = Client(fleet.url, "tiny")
    await fleet.server.close()
    result, _ = await client.send(ask(), client.body(ask()), time.monotonic())
    assert (result.outcome, result.ttft_seconds) == ("failed", None)


async def test_an_aborted_turn_has_a_first_token_and_no_end(fleet):
    result, tokens = await send(fleet, ask(abort=True, output_tokens=500))
    assert result.outcome == "aborted"
    assert result.ttft_seconds is not None
    assert result.e2e_seconds is None
    assert tokens


async def test_the_length_of_the_answer_is_forced(fleet):
    await send(fleet, ask())
    body = fleet.bodies[0]
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["temperature"]) == (4, 4, True, 0)


@pytest.mark.parametrize(("told", "seen"), [(True, "c1"), (False, None)])
async def test_the_conversation_is_named_on_the_wire_only_where_the_leg_wants_it(fleet, told, seen):
    await send(fleet, ask(conversation="c1", send_conversation=told))
    assert fleet.headers[0].get("X-Conversation-ID") == seen
