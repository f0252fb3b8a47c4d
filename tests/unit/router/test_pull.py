from __future__ import annotations

import json

from scripted_engines import wait_until


async def test_decode_gets_the_clients_body_with_the_handle_of_prefill(start):
    setup = await start("pull")
    async with setup.ask(max_tokens=7, unknown_field={"a": 1}) as answer:
        assert answer.status == 200
        assert "kv_transfer_params" not in await answer.json()
    prefill, decode = setup.prefill[0].calls[0], setup.decode[0].calls[0]
    assert prefill.body["max_tokens"] == 1
    assert decode.body["max_tokens"] == 7
    assert decode.body["unknown_field"] == {"a": 1}
    assert decode.params["remote_engine_id"] == "engine-prefill-0"
    assert decode.params["do_remote_prefill"] is True
    assert decode.params["kvops"] == {"router_id": decode.id, "attempt": 1}
    assert prefill.id == decode.id
    assert setup.fleet.held == {}


async def test_a_stream_reaches_the_client_byte_for_byte(start):
    setup = await start("pull")
    async with setup.ask("/v1/chat/completions", stream=True) as answer:
        content = (await answer.read()).decode()
    texts = [json.loads(line[6:])["choices"][0]["delta"]["content"] for line in content.split("\n\n")[:-2]]
    assert texts == setup.decode[0].tokens
    assert content.endswith("data: [DONE]\n\n")


async def test_chat_is_tokenized_once(start):
    setup = await start("pull")
    async with setup.ask("/v1/chat/completions") as answer:
        assert answer.status == 200
    assert setup.prefill[0].calls[0].body["return_token_ids"] is True
    assert setup.decode[0].calls[0].params["prompt_token_ids"] == [5, 6, 7]


async def test_the_clients_request_id_comes_back_and_stays_here(start):
    setup = await start("pull")
    async with setup.ask(headers={"X-Request-Id": "mine", "traceparent": "00-ab-cd-01"}) as answer:
        assert answer.headers["X-Request-Id"] == "mine"
    assert "mine" not in setup.decode[0].calls[0].id
    assert setup.decode[0].calls[0].headers["traceparent"] == "00-ab-cd-01"


async def test_several_choices_are_served_from_decodes_prefix_cache(start):
    setup = await start("pull")
    async with setup.ask(n=3) as answer:
        assert answer.status == 200
    priming, whole = setup.decode[0].calls
    assert (priming.body["max_tokens"], "n" in priming.body, "remote_block_ids" in priming.params) == (1, False, True)
    assert (whole.body["n"], whole.params) == (3, {})
    assert "n" not in setup.prefill[0].calls[0].body
    assert setup.fleet.held == {}


async def test_each_prompt_of_a_list_has_a_pair_of_legs_of_its_own(start):
    setup = await start("pull")
    async with setup.ask(prompt=["a", "b", "c"]) as answer:
        assert answer.status == 200
    assert sorted(call.body["prompt"] for call in setup.prefill[0].calls) == ["a", "b", "c"]
    assert len({call.id for call in setup.prefill[0].calls}) == 3
    assert setup.decode[0].calls[-1].body["prompt"] == ["a", "b", "c"]
    assert setup.fleet.held == {}


async def test_logprobs_of_the_prompt_are_computed_by_decode_alone(start):
    setup = await start("pull")
    async with setup.ask(echo=True, logprobs=2) as answer:
        assert answer.status == 200
    assert setup.prefill[0].calls == []
    assert setup.decode[0].calls[0].params == {}


async def test_blocks_are_given_back_when_decode_cannot_be_reached(start):
    setup = await start("pull", decode=2)
    await setup.decode[0].stop()
    statuses = []
    for _ in range(4):
        async with setup.ask() as answer:
            statuses.append(answer.status)
    assert statuses == [200] * 4
    await wait_until(lambda: not setup.fleet.held)
