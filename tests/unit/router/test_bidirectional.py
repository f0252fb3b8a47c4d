from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvops.router.settings import Deadlines, Limits
from scripted_engines import wait_until

CONVERSATION = {"X-Conversation-ID": "c1"}


async def turn(setup: Any, *, headers: dict[str, str] | None = CONVERSATION, **body: Any) -> bytes:
    async with setup.ask("/v1/chat/completions", headers=headers, **body) as answer:
        assert answer.status == 200
        return bytes(await answer.read())


def handed_back(setup: Any) -> list[bool]:
    """Return, for each turn, whether P was given a handle of D."""
    return [bool(call.params.get("remote_block_ids")) for call in setup.fleet.calls("prefill") if call in served(setup)]


def served(setup: Any) -> list[Any]:
    return [call for engine in setup.fleet.engines for call in engine.served()]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turns_prefill_gets_decodes_handle(start, stream):
    setup = await start("bidirectional")
    await turn(setup, stream=stream)
    await turn(setup, stream=stream)
    first, second = setup.prefill[0].calls
    assert first.params["remote_block_ids"] is None
    assert second.params["remote_engine_id"] == "engine-decode-0"
    assert (second.params["do_remote_decode"], second.params["do_remote_prefill"]) == (True, False)
    assert second.params["kvops"]["prefix"] == {"tokens": 96}
    assert (first.params["kvops"]["turn"], second.params["kvops"]["turn"]) == (1, 2)
    assert first.params["kvops"]["conversation"] == second.params["kvops"]["conversation"] != "c1"
    assert setup.metric("kvops_router_handles_total", outcome="hit") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_no_handle_reaches_the_client(start, stream):
    setup = await start("bidirectional")
    content = await turn(setup, stream=stream)
    assert b"remote_block_ids" not in content
    if stream:
        # Only the text of a token, which merely looks like one, and nothing of the event that held the handle.
        assert [json.loads(line[6:])["choices"] != [] for line in content.split(b"\n\n")[:-2]] == [True] * 5
    else:
        assert "kv_transfer_params" not in json.loads(content)


async def test_a_handle_is_used_once(start):
    setup = await start("bidirectional")
    await turn(setup)
    setup.prefill[0].script.append("sleep:0.2")
    await asyncio.gather(turn(setup), turn(setup))
    assert sorted(handed_back(setup)) == [False, False, True]
    assert setup.metric("kvops_router_handles_total", outcome="used") == 1


async def test_the_field_of_the_body_names_a_conversation_and_stays_here(start):
    setup = await start("bidirectional")
    for _ in range(2):
        await turn(setup, headers=None, conversation_id="c1")
    assert handed_back(setup) == [False, True]
    assert all("conversation_id" not in call.body for call in setup.fleet.calls())


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Authorization": "Bearer other"}, {}),
        ({}, {"model": "adapter"}),
        ({}, {"cache_salt": "salt"}),
        ({"X-Conversation-ID": "c2"}, {}),
    ],
)
async def test_the_same_name_of_another_caller_is_another_conversation(start, headers, body):
    setup = await start("bidirectional")
    await turn(setup)
    await turn(setup, headers=CONVERSATION | headers, **body)
    assert handed_back(setup) == [False, False]


async def test_a_late_handle_is_not_used(start):
    setup = await start("bidirectional", ttl_margin_seconds=480.0)
    await turn(setup)
    await turn(setup)
    assert handed_back(setup) == [False, False]
    assert setup.metric("kvops_router_handles_total", outcome="late") == 1


async def test_a_handle_that_does_not_say_which_tokens_it_is_for_is_given_back(start):
    setup = await start("bidirectional")
    setup.fleet.digests = False
    await turn(setup)
    await turn(setup)
    assert handed_back(setup) == [False, False]
    assert setup.metric("kvops_router_handles_total", outcome="no_digests") == 1
    await wait_until(lambda: len(setup.fleet.released) == 1)


async def test_a_stock_decode_that_streams_no_handle_is_counted_and_served_as_pull(start):
    setup = await start("bidirectional")
    setup.fleet.streamed_handles = False
    await turn(setup, stream=True)
    await turn(setup, stream=True)
    assert handed_back(setup) == [False, False]
    assert setup.metric("kvops_router_turns_without_handle_total", streamed="true") == 2
    assert setup.metric("kvops_router_handles_total", outcome="no_handle") == 1


async def test_a_declined_handle_costs_a_second_attempt_and_no_answer(start):
    setup = await start("bidirectional")
    await turn(setup)
    setup.prefill[0].script.append("status:500")
    await turn(setup)
    assert handed_back(setup) == [False, True, False]
    assert setup.metric("kvops_router_handles_total", outcome="declined") == 1
    ids = [call.id for call in setup.prefill[0].served()]
    assert len(set(ids)) == 3


async def test_the_conversation_returns_to_the_decode_that_holds_it(start):
    setup = await start("bidirectional", decode=3)
    for _ in range(4):
        await turn(setup)
    assert sorted(len(engine.served()) for engine in setup.decode) == [0, 0, 4]


async def test_a_busy_holder_is_passed_over(start):
    setup = await start("bidirectional", decode=2)
    await turn(setup)
    holder = next(engine for engine in setup.decode if engine.calls)
    endpoint = setup.router.decode.find(holder.url)
    endpoint.in_flight += 5
    await turn(setup)
    assert handed_back(setup) == [False, True]
    assert len(holder.served()) == 1
    endpoint.in_flight -= 5


async def test_a_restarted_holder_voids_its_handles(start):
    setup = await start("bidirectional")
    await turn(setup)
    await wait_until(lambda: setup.router.decode.endpoints[0].kv_usage == 0.25)
    setup.decode[0].started_at += 1
    await wait_until(lambda: setup.router.decode.endpoints[0].generation == 1)
    await turn(setup)
    assert handed_back(setup) == [False, False]
    assert setup.metric("kvops_router_handles_total", outcome="restarted") == 1


async def test_a_turn_without_a_conversation_leaves_nothing_on_decode(start):
    setup = await start("bidirectional")
    await turn(setup, headers=None)
    await turn(setup, headers=None, stream=True)
    await wait_until(lambda: setup.fleet.held == {})
    assert setup.router.shared.size() == (0, 0)


async def test_what_falls_out_of_the_map_is_given_back(start):
    setup = await start("bidirectional", limits=Limits(conversations=2))
    for name in ("a", "b", "c"):
        await turn(setup, headers={"X-Session-ID": name})
    await wait_until(lambda: len(setup.fleet.held) == 2)
    assert setup.router.shared.size()[0] == 2
    await wait_until(lambda: setup.metric("kvops_router_releases_total", reason="evicted", outcome="sent") == 1)


async def test_several_choices_leave_nothing_on_decode(start):
    setup = await start("bidirectional")
    await turn(setup, n=2)
    await wait_until(lambda: setup.fleet.held == {})


async def test_a_client_that_leaves_during_the_readback_leaves_nothing_on_decode(start):
    setup = await start("bidirectional", deadlines=Deadlines())
    await turn(setup)
    setup.prefill[0].script.append("hang")
    request = asyncio.ensure_future(turn(setup))
    await wait_until(lambda: len(setup.prefill[0].calls) == 2)
    request.cancel()
    await wait_until(lambda: setup.fleet.held == {})


@pytest.mark.parametrize("name", [7, "x" * 257, {"a": 1}])
async def test_a_name_that_is_none_is_refused(start, name):
    setup = await start("bidirectional")
    async with setup.ask(conversation_id=name) as answer:
        assert answer.status == 400
    assert setup.fleet.calls() == []
