from __future__ import annotations

import asyncio
import gc

import pytest

from kvops.router import push
from kvops.router.handles import Identity
from kvops.router.settings import Deadlines
from scripted_engines import wait_until


async def test_both_legs_are_under_way_at_once_with_one_fresh_id(start):
    setup = await start("push")
    setup.prefill[0].seconds = 0.2
    async with setup.ask(stream=True) as answer:
        assert answer.status == 200
        await answer.read()
    warm_up, prefill = setup.prefill[0].calls
    (decode,) = setup.decode[0].calls
    assert prefill.id == decode.id != warm_up.id
    assert prefill.path == decode.path
    assert prefill.params["transfer_id"] == decode.params["transfer_id"] == prefill.id
    assert decode.params["remote_request_id"] == prefill.id
    assert "remote_block_ids" not in decode.params
    assert {key: decode.params[key] for key in ("remote_engine_id", "remote_host", "remote_port", "tp_size")} == {
        "remote_engine_id": "engine-prefill-0",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
    }


async def test_prefills_identity_is_learned_once(start):
    setup = await start("push")
    for _ in range(3):
        async with setup.ask() as answer:
            assert answer.status == 200
    assert [call.body["prompt"] for call in setup.prefill[0].calls] == [[1], "hi", "hi", "hi"]


def tell(setup, engine_id):
    """Tell the router P's identity, as the launcher does."""
    identity = Identity(engine_id=engine_id, host="127.0.0.1", port=5600, tp_size=1)
    setup.router.settings.identities[setup.prefill[0].url] = identity


async def test_a_prefill_whose_identity_was_told_is_not_asked(start):
    setup = await start("push")
    tell(setup, "engine-prefill-0")
    for _ in range(2):
        async with setup.ask() as answer:
            assert answer.status == 200
    assert [call.body["prompt"] for call in setup.prefill[0].calls] == ["hi", "hi"]
    assert {call.params["remote_engine_id"] for call in setup.decode[0].calls} == {"engine-prefill-0"}


async def test_a_told_identity_that_holds_no_more_is_replaced_by_what_prefill_says(start):
    setup = await start("push")
    tell(setup, "engine-of-yesterday")
    setup.decode[0].script.append("hang")
    for _ in range(2):
        async with setup.ask() as answer:
            assert answer.status == 200
    told = [call.params["remote_engine_id"] for call in setup.decode[0].calls]
    assert told == ["engine-of-yesterday", "engine-prefill-0", "engine-prefill-0"]


async def test_a_told_identity_is_asked_anew_once_prefill_has_restarted(start):
    setup = await start("push")
    tell(setup, "engine-prefill-0")
    setup.router.prefill.endpoints[0].restarted()
    async with setup.ask() as answer:
        assert answer.status == 200
    assert [call.body["prompt"] for call in setup.prefill[0].calls] == [[1], "hi"]


async def test_auto_asks_a_prefill_for_its_mode_even_if_it_was_told_who_it_is(start):
    setup = await start("auto")
    setup.fleet.mode = setup.prefill[0].transfer_mode = "push"
    tell(setup, "engine-prefill-0")
    async with setup.ask() as answer:
        assert answer.status == 200
    assert "transfer_id" in setup.decode[0].calls[0].params


async def test_a_restarted_prefill_is_noticed_and_the_request_served_again(start):
    setup = await start("push")
    async with setup.ask() as answer:
        assert answer.status == 200
    setup.prefill[0].engine_id = "engine-reborn"
    setup.decode[0].script.append("hang")
    async with setup.ask() as answer:
        assert answer.status == 200
    assert setup.decode[0].calls[-1].params["remote_engine_id"] == "engine-reborn"
    assert setup.decode[0].calls[-2].ended == "aborted"
    assert setup.metric("kvops_router_retries_total", role="prefill", reason="restarted") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_decode_is_aborted_when_prefill_fails(start, stream):
    setup = await start("push")
    async with setup.ask() as answer:
        assert answer.status == 200
    setup.prefill[0].script.extend(["status:500", "status:500"])
    async with setup.ask(stream=stream) as answer:
        assert answer.status == 502
        assert (await answer.json())["error"]["type"] == "prefill_failed"
    await wait_until(lambda: [call.ended for call in setup.decode[0].calls[1:]] == ["aborted", "aborted"])


async def test_prefills_own_refusal_reaches_the_client(start):
    setup = await start("push")
    setup.prefill[0].script.extend(["ok", "status:400"])
    async with setup.ask() as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["message"] == "scripted"
    await wait_until(lambda: setup.decode[0].calls[0].ended == "aborted")


async def test_prefill_is_aborted_when_decode_refuses(start):
    setup = await start("push")
    setup.prefill[0].script.extend(["ok", "hang"])
    setup.decode[0].script.append("status:400")
    async with setup.ask() as answer:
        assert answer.status == 400
    await wait_until(lambda: setup.prefill[0].calls[1].ended == "aborted")


async def test_kv_that_never_comes_ends_the_request(start):
    setup = await start("push", deadlines=Deadlines(kv_wait=0.2))
    setup.decode[0].script.extend(["hang", "hang"])
    async with setup.ask(stream=True) as answer:
        assert answer.status == 504
    await wait_until(lambda: [call.ended for call in setup.decode[0].calls] == ["aborted", "aborted"])


async def test_a_whole_answer_whose_kv_never_comes_is_not_waited_for(start):
    setup = await start("push", deadlines=Deadlines(kv_wait=0.2))
    setup.decode[0].script.extend(["hang", "hang"])
    setup.decode[0].oldest_wait_seconds = 0.2
    async with setup.ask() as answer:
        assert answer.status == 504
    await wait_until(lambda: [call.ended for call in setup.decode[0].calls] == ["aborted", "aborted"])


async def test_a_whole_answer_that_takes_long_is_waited_for_when_its_kv_is_there(start, monkeypatch):
    monkeypatch.setattr(push, "_SAME_WAIT_SECONDS", 0.05)
    setup = await start("push", deadlines=Deadlines(kv_wait=0.2))
    setup.decode[0].script.append("sleep:0.6")
    async with setup.ask() as answer:
        assert answer.status == 200


async def test_prefill_is_left_to_write_when_the_client_leaves(start):
    setup = await start("push")
    setup.prefill[0].script.extend(["ok", "sleep:0.3"])
    request = asyncio.ensure_future(setup.ask(stream=True).__aenter__())
    await wait_until(lambda: setup.decode[0].calls and len(setup.prefill[0].calls) == 2)
    request.cancel()
    await wait_until(lambda: setup.decode[0].calls[0].ended == "aborted")
    await wait_until(lambda: setup.prefill[0].calls[1].ended == "answered")


async def test_the_first_event_may_come_before_prefills_answer(start):
    setup = await start("push")
    async with setup.ask() as answer:
        assert answer.status == 200

    async def write_early() -> None:
        await wait_until(lambda: len(setup.decode[0].calls) == 2)
        setup.fleet.written(setup.decode[0].calls[1].id).set()

    setup.prefill[0].script.append("hang")
    early = asyncio.ensure_future(write_early())
    async with setup.ask(stream=True) as answer:
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    await early


async def test_a_pull_connector_is_told_from_a_push_connector(start):
    setup = await start("push")
    setup.prefill[0].transfer_mode = "pull"
    async with setup.ask() as answer:
        assert answer.status == 502
    assert setup.decode[0].served() == []


async def test_a_list_of_prompts_is_primed_by_pairs(start):
    setup = await start("push")
    async with setup.ask(prompt=["a", "b"]) as answer:
        assert answer.status == 200
    primed = [call for call in setup.decode[0].calls if call.params]
    assert sorted(call.id for call in primed) == sorted(call.id for call in setup.prefill[0].calls[1:])
    assert setup.decode[0].calls[-1].body["prompt"] == ["a", "b"]


async def test_a_push_connector_that_does_not_say_so_is_trusted_in_push_mode(start):
    setup = await start("push")
    setup.prefill[0].transfer_mode = None
    async with setup.ask() as answer:
        assert answer.status == 200


async def test_a_client_that_leaves_while_decode_waits_leaves_no_task_behind(start, caplog):
    setup = await start("push")
    setup.decode[0].script.append("hang")
    before = waiting_tasks()
    request = asyncio.ensure_future(setup.ask(stream=True).__aenter__())
    await wait_until(lambda: waiting_tasks() - before)
    request.cancel()
    await wait_until(lambda: setup.decode[0].calls[0].ended == "aborted")
    gc.collect()
    assert "Task was destroyed but it is pending" not in caplog.text


def waiting_tasks() -> set[asyncio.Task[object]]:
    return {task for task in asyncio.all_tasks() if "Event.wait" in repr(task.get_coro())}
