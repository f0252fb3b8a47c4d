"""The twenty ways in which P/D routers are known to fail their engines, each with what this router does about it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from fault_rows import ROWS
from kvops.router.endpoints import Sources
from kvops.router.settings import Deadlines, Limits
from scripted_engines import wait_until

_covered: set[int] = set()


def row(number: int) -> Callable[[Any], Any]:
    _covered.add(number)
    return lambda test: test


def test_every_row_has_a_test() -> None:
    assert _covered == set(ROWS)


@row(1)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_clients_own_handle_reaches_no_engine(start, path):
    setup = await start("pull")
    async with setup.ask(path, kv_transfer_params={"do_remote_prefill": True, "remote_host": "evil"}) as answer:
        assert answer.status == 200
    assert "evil" not in json.dumps([call.body for call in setup.fleet.calls()])


@row(1)
@pytest.mark.parametrize(
    "broken",
    [
        "no_handle",
        "without:remote_engine_id",
        "without:remote_request_id",
        "without:remote_host",
        "without:remote_port",
        "without:tp_size",
        "without:remote_block_ids",
        'with:{"remote_block_ids": []}',
        'with:{"remote_block_ids": [[]]}',
        'with:{"remote_port": "x"}',
    ],
)
async def test_a_handle_that_is_not_whole_never_reaches_decode(start, broken):
    setup = await start("pull")
    setup.prefill[0].script.extend([broken, broken])
    async with setup.ask() as answer:
        assert (answer.status, (await answer.json())["error"]["type"]) == (502, "prefill_failed")
    assert setup.decode[0].served() == []


@row(2)
async def test_a_turn_without_a_handle_is_counted_and_the_next_one_served(start):
    setup = await start("bidirectional")
    setup.fleet.streamed_handles = False
    for _ in range(2):
        async with setup.ask(stream=True, conversation_id="c") as answer:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    assert setup.metric("kvops_router_turns_without_handle_total", streamed="true") == 2


@row(3)
async def test_a_handle_without_digests_of_its_tokens_is_not_used(start):
    setup = await start("bidirectional")
    setup.fleet.digests = False
    for _ in range(2):
        async with setup.ask(conversation_id="c") as answer:
            assert answer.status == 200
    assert [call.params["remote_block_ids"] for call in setup.prefill[0].served()] == [None, None]


@row(4)
async def test_blocks_are_given_back_when_the_client_leaves_while_decode_has_no_room(start):
    setup = await start("pull", limits=Limits(in_flight=1))
    setup.prefill[0].script.append("sleep:0.2")
    request = asyncio.ensure_future(setup.ask().__aenter__())
    await wait_until(lambda: setup.prefill[0].calls)
    # Decode fills up while prefill is at work.
    setup.router.decode.endpoints[0].in_flight += 1
    await wait_until(lambda: setup.fleet.held and setup.router.decode.waiters)
    request.cancel()
    await wait_until(lambda: setup.fleet.held == {})
    await wait_until(lambda: setup.metric("kvops_router_releases_total", reason="client_gone", outcome="sent") == 1)
    setup.router.decode.endpoints[0].in_flight -= 1


@row(4)
async def test_blocks_are_given_back_through_another_decode_when_one_is_dead(start):
    setup = await start("pull", decode=2)
    await setup.decode[0].stop()
    for _ in range(4):
        async with setup.ask() as answer:
            assert answer.status == 200
    await wait_until(lambda: not setup.fleet.held)


@row(5)
@pytest.mark.parametrize("mode", ["pull", "bidirectional"])
async def test_a_client_that_leaves_during_prefill_aborts_it(start, mode):
    setup = await start(mode)
    setup.prefill[0].script.append("hang")
    request = asyncio.ensure_future(setup.ask().__aenter__())
    await wait_until(lambda: setup.prefill[0].calls)
    request.cancel()
    await wait_until(lambda: setup.prefill[0].calls[0].ended == "aborted")
    assert setup.decode[0].served() == []
    assert setup.router.prefill.endpoints[0].in_flight == 0


@row(5)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_during_decode_aborts_it(start, stream):
    setup = await start("pull")
    setup.decode[0].seconds = 0.2
    request = asyncio.ensure_future(setup.ask(stream=stream).__aenter__())
    await wait_until(lambda: setup.decode[0].calls)
    if stream:
        answer = await request
        await answer.content.readany()
        answer.close()
    request.cancel()
    await wait_until(lambda: setup.decode[0].calls[0].ended == "aborted")
    await wait_until(lambda: setup.fleet.held == {})
    await wait_until(lambda: setup.metric("kvops_router_requests_total", mode="pull", outcome="client_gone") == 1)


@row(6)
async def test_decode_learns_what_it_needs_for_heartbeats_and_the_handover_is_measured(start):
    setup = await start("pull")
    async with setup.ask() as answer:
        assert answer.status == 200
    assert setup.decode[0].calls[0].params["tp_size"] == 1
    assert setup.metric("kvops_router_handover_seconds_count") == 1


@row(7)
async def test_push_sends_prefill_nothing_while_decode_has_no_room(start):
    setup = await start("push", limits=Limits(in_flight=1))
    (decode,) = setup.router.decode.endpoints
    setup.router.decode.begin(decode)
    request = asyncio.ensure_future(setup.ask().__aenter__())
    await wait_until(lambda: setup.router.decode.waiters == 1)
    assert setup.prefill[0].calls == []
    setup.router.decode.end(decode)
    assert (await request).status == 200


@row(8)
async def test_push_has_decodes_leg_under_way_before_prefill_is_done(start):
    setup = await start("push")
    setup.prefill[0].script.extend(["ok", "hang"])
    request = asyncio.ensure_future(setup.ask().__aenter__())
    await wait_until(lambda: setup.decode[0].calls and len(setup.prefill[0].calls) == 2)
    request.cancel()
    await wait_until(lambda: setup.metric("kvops_router_leg_skew_seconds_count") == 1)


@row(9)
@pytest.mark.parametrize("mode", ["pull", "push", "bidirectional"])
async def test_no_id_is_used_twice(start, mode):
    setup = await start(mode)
    for _ in range(3):
        setup.decode[0].script.append("status:500")
        async with setup.ask(headers={"X-Request-Id": "always-the-same"}) as answer:
            assert answer.status == 200
    decode = [call.id for call in setup.decode[0].served()]
    assert len(set(decode)) == len(decode) == 6
    assert "always-the-same" not in decode


@row(9)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_push_sends_both_legs_to_the_same_endpoint(start, path):
    setup = await start("push")
    async with setup.ask(path) as answer:
        assert answer.status == 200
    assert setup.prefill[0].calls[-1].path == setup.decode[0].calls[0].path == path


@row(10)
@pytest.mark.parametrize("failure", ["status:500", "drop", "status:400", "no_handle"])
async def test_push_aborts_decode_when_prefill_fails(start, failure):
    setup = await start("push")
    setup.prefill[0].script.extend(["ok", failure, failure])
    setup.decode[0].script.extend(["hang", "hang"])
    async with setup.ask() as answer:
        assert answer.status == (400 if failure == "status:400" else 502)
    await wait_until(lambda: {call.ended for call in setup.decode[0].served()} == {"aborted"})


@row(10)
async def test_push_sends_nothing_to_prefill_while_decode_is_down(start):
    setup = await start("push")
    setup.decode[0].healthy = False
    await wait_until(lambda: setup.router.decode.endpoints[0].state == "down")
    async with setup.ask() as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
    assert setup.prefill[0].calls == []


@row(11)
async def test_push_tries_again_on_another_decode_with_another_id(start):
    setup = await start("push", decode=2)
    setup.decode[0].script.append("status:500")
    setup.decode[1].script.append("status:500")
    async with setup.ask() as answer:
        assert answer.status == 502
    first, second = (engine.calls[0] for engine in setup.decode)
    assert first.id != second.id
    assert first.params["transfer_id"] != second.params["transfer_id"]


@row(12)
@pytest.mark.parametrize(("mode", "connector"), [("pull", "push"), ("push", "pull")])
async def test_a_router_of_the_wrong_mode_says_so_and_gives_decode_nothing(start, mode, connector):
    setup = await start(mode)
    setup.prefill[0].transfer_mode = connector
    async with setup.ask() as answer:
        assert answer.status == 502
    assert setup.decode[0].served() == []


@row(12)
async def test_prefill_engines_of_two_connectors_serve_nobody(start):
    setup = await start("auto", prefill=2)
    setup.prefill[0].transfer_mode = "push"
    async with setup.ask() as answer:
        assert (answer.status, (await answer.json())["error"]["type"]) == (502, "prefill_failed")
    assert setup.decode[0].served() == []


@row(13)
@pytest.mark.parametrize("mode", ["pull", "push", "bidirectional"])
@pytest.mark.parametrize("body", [{"n": 3}, {"best_of": 2}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}])
async def test_each_sequence_of_a_request_has_its_own_handle_or_none(start, mode, body):
    setup = await start(mode)
    async with setup.ask(**body) as answer:
        assert answer.status == 200
    given = [call.params["remote_request_id"] for call in setup.decode[0].served() if call.params]
    assert len(given) == len(set(given)) == (2 if "prompt" in body else 1)
    assert not any({"n", "best_of"} & set(call.body) for call in setup.prefill[0].served())
    await wait_until(lambda: setup.fleet.held == {})


@row(14)
@pytest.mark.parametrize(
    "field",
    [
        {"min_tokens": 4},
        {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"max_completion_tokens": 9},
    ],
)
async def test_parameters_that_one_token_cannot_satisfy_stay_with_decode(start, field):
    setup = await start("pull")
    async with setup.ask("/v1/chat/completions", **field) as answer:
        await answer.read()
    leg = setup.prefill[0].calls[0].body
    assert (leg["max_tokens"], leg.get("max_completion_tokens", 1), leg["stream"]) == (1, 1, False)
    assert leg.get("tool_choice", "auto") == "auto"
    assert not {"min_tokens", "stream_options"} & set(leg)
    assert field.items() <= setup.decode[0].calls[0].body.items()


@row(15)
@pytest.mark.parametrize("field", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 0}])
@pytest.mark.parametrize("mode", ["pull", "push", "bidirectional"])
async def test_logprobs_of_the_prompt_come_from_the_engine_that_computes_it(start, mode, field):
    setup = await start(mode)
    async with setup.ask(**field) as answer:
        assert answer.status == 200
    assert setup.prefill[0].served() == []
    assert setup.decode[0].calls[0].params == {}


@row(16)
@pytest.mark.parametrize("failure", ["status:500", "status:503", "drop", "no_handle"])
async def test_decode_never_stands_in_for_a_failed_prefill(start, failure):
    setup = await start("pull")
    setup.prefill[0].script.extend([failure, failure])
    async with setup.ask() as answer:
        assert answer.status == (503 if failure == "status:503" else 502)
        assert (await answer.json())["error"]["type"] == "prefill_failed"
    assert setup.decode[0].served() == []


@row(16)
async def test_a_prefill_that_does_not_answer_is_given_up(start):
    setup = await start("pull", deadlines=Deadlines(prefill=0.1))
    setup.prefill[0].script.append("hang")
    async with setup.ask() as answer:
        assert answer.status == 504
    await wait_until(lambda: setup.prefill[0].calls[0].ended == "aborted")


@row(17)
@pytest.mark.parametrize("mode", ["pull", "push", "bidirectional"])
@pytest.mark.parametrize("failure", ["error_event:500", "drop", "status:500"])
async def test_a_failure_before_the_first_event_is_repeated_unseen(start, mode, failure):
    setup = await start(mode, decode=2)
    setup.decode[0].script.append(failure)
    setup.decode[1].script.append(failure)
    setup.decode[0].script.append("ok")
    async with setup.ask(stream=True) as answer:
        assert answer.status == 502
    async with setup.ask(stream=True) as answer:
        assert answer.status == 200
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")


@row(17)
async def test_an_error_of_the_clients_own_inside_a_200_is_a_400(start):
    setup = await start("pull")
    setup.decode[0].script.append("error_event:400")
    async with setup.ask(stream=True) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, 400)


@row(17)
@pytest.mark.parametrize("failure", ["die_mid_stream", "stall_mid_stream"])
async def test_a_stream_that_breaks_off_is_not_begun_again(start, failure):
    setup = await start("pull", deadlines=Deadlines(idle=0.2))
    setup.decode[0].script.append(failure)
    async with setup.ask(stream=True) as answer:
        events = (await answer.text()).split("\n\n")
    assert json.loads(events[-3][6:])["error"]["type"] == "decode_failed"
    assert len(setup.decode[0].served()) == 1
    assert setup.metric("kvops_router_requests_total", mode="pull", outcome="broken_off") == 1


@row(17)
async def test_no_first_token_in_time_is_a_504(start):
    setup = await start("pull", deadlines=Deadlines(first_token=0.1))
    setup.decode[0].script.append("hang")
    async with setup.ask(stream=True) as answer:
        assert answer.status == 504


@row(17)
async def test_a_draining_engine_gets_nothing_new_and_finishes_what_it_has(start):
    setup = await start("pull", decode=2)
    setup.decode[0].seconds = setup.decode[1].seconds = 0.05
    async with setup.ask(stream=True) as answer:
        holder = next(engine for engine in setup.decode if engine.calls)
        setup.router.decode.find(holder.url).draining = True
        for _ in range(3):
            async with setup.ask() as other:
                assert other.status == 200
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    assert len(holder.served()) == 1


@row(17)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_was_learned_of_an_engine_does_not_outlive_its_process(start, role):
    setup = await start("push" if role == "prefill" else "bidirectional")
    async with setup.ask(conversation_id="c") as answer:
        assert answer.status == 200
    engine, endpoint = getattr(setup, role)[0], getattr(setup.router, role).endpoints[0]
    await wait_until(lambda: endpoint.started_at == 1000.0)
    engine.started_at, engine.engine_id = 2000.0, "engine-reborn"
    await wait_until(lambda: endpoint.generation == 1)
    async with setup.ask(conversation_id="c") as answer:
        assert answer.status == 200
    if role == "prefill":
        assert setup.decode[0].served()[-1].params["remote_engine_id"] == "engine-reborn"
    else:
        assert setup.prefill[0].served()[-1].params["remote_block_ids"] is None
        assert setup.metric("kvops_router_handles_total", outcome="restarted") == 1


@row(18)
async def test_no_target_is_taken_from_a_request(start):
    setup = await start("pull")
    names = ("X-Prefiller-Host-Port", "X-Forwarded-Host", "X-data-parallel-rank", "X-Kvops-Handle")
    async with setup.ask(headers=dict.fromkeys(names, "10.9.9.9:1")) as answer:
        assert answer.status == 200
    assert "10.9.9.9" not in str([call.headers for call in setup.fleet.calls()])


@row(18)
async def test_another_credential_does_not_reach_a_conversation(start):
    setup = await start("bidirectional")
    for key in ("Bearer a", "Bearer b"):
        async with setup.ask(headers={"Authorization": key}, conversation_id="c") as answer:
            assert answer.status == 200
    assert [call.params["remote_block_ids"] for call in setup.prefill[0].served()] == [None, None]


@row(19)
async def test_unknown_fields_and_the_credential_go_on(start):
    setup = await start("pull")
    async with setup.ask(headers={"Authorization": "Bearer k"}, thinking={"budget": 3}) as answer:
        assert answer.status == 200
    for call in setup.fleet.calls():
        assert (call.headers["Authorization"], call.body["thinking"]) == ("Bearer k", {"budget": 3})


@row(20)
async def test_each_rank_is_an_endpoint_that_its_requests_name(start):
    setup = await start("pull")
    url = setup.decode[0].url
    setup.router.sources = Sources({"prefill": [setup.prefill[0].url], "decode": [f"{url}#0-1"]})
    await setup.router.refresh()
    for _ in range(2):
        async with setup.ask() as answer:
            assert answer.status == 200
    assert sorted(call.headers["X-data-parallel-rank"] for call in setup.decode[0].served()) == ["0", "1"]
    assert "X-data-parallel-rank" not in setup.prefill[0].calls[0].headers
