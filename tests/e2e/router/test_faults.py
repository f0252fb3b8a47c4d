"""The ways in which P/D routers are known to fail their engines, forced on real ones."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fault_rows import ROWS
from kvops.launch.canary import make_prompt
from ports import free_port
from real_fleet import (
    CHAT,
    COMPLETIONS,
    DECODER_TTL_SECONDS,
    LooseFleet,
    chat,
    completion,
    delta_of,
    events_of,
    text_of,
    texts_of,
    until,
)

SCRIPTED_ENGINES_ONLY = {
    6: "no queue here is as long as a lease; the router's part is to pass on what decode renews it with",
    7: "no engine here takes 512 requests, so decode always has room",
    11: "push: which of an aborted attempt's steps its successor meets cannot be chosen",
    20: "one rank on the CPU",
}
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
SOON_SECONDS = 60
_covered: set[int] = set()


def row(*numbers: int) -> Callable[[Any], Any]:
    _covered.update(numbers)
    return lambda test: test


def test_every_row_is_forced_here_or_on_scripted_engines() -> None:
    assert _covered | SCRIPTED_ENGINES_ONLY.keys() == ROWS.keys()
    assert not _covered & SCRIPTED_ENGINES_ONLY.keys()


async def answer_alone(fleet: LooseFleet, path: str, body: dict[str, Any]) -> list[str]:
    status, answer = await fleet.post(path, body, "prefill-1")
    assert status == 200, answer
    return texts_of(answer)


async def serves(fleet: LooseFleet, requests: int = 4) -> None:
    """Check that both engines of both roles answer, and right."""
    for _ in range(requests):
        body = completion()
        status, answer = await fleet.post(COMPLETIONS, body)
        assert status == 200, answer
        assert texts_of(answer) == await answer_alone(fleet, COMPLETIONS, body)


@asynccontextmanager
async def only(fleet: LooseFleet, *names: str) -> AsyncIterator[None]:
    """Have the router use these engines alone for new requests; within the block ``drain`` changes that."""
    others = [engine.name for engine in fleet.plan.engines if engine.name not in names]
    await fleet.drain(*others)
    try:
        yield
    finally:
        await fleet.drain(*(engine.name for engine in fleet.plan.engines), back=True)


@asynccontextmanager
async def paused(fleet: LooseFleet, *names: str) -> AsyncIterator[None]:
    fleet.signal(signal.SIGSTOP, *names)
    try:
        yield
    finally:
        fleet.signal(signal.SIGCONT, *(name for name in names if name not in fleet.dead()))


async def legs_under_way(fleet: LooseFleet, role: str) -> float:
    return await fleet.routed("kvops_router_in_flight", role=role)


MALFORMED: dict[str, Any] = {
    "no body": b"",
    "no JSON": b"{'prompt': 1}",
    "a list": b"[]",
    "a deep value": b'{"prompt": ' + b"[" * 100_000,
    "no prompt": {},
    "null": {"prompt": None},
    "an empty list": {"prompt": []},
    "an empty text": {"prompt": ""},
    "a number": {"prompt": 7},
    "mixed types": {"prompt": ["a", 1]},
    "an unknown token": {"prompt": [10**6]},
    "a negative token": {"prompt": [-1]},
    "a huge token": {"prompt": [2**63]},
    "a long prompt": {"prompt": "x" * 9000},
    "no tokens": {"prompt": "a", "max_tokens": 0},
    "negative tokens": {"prompt": "a", "max_tokens": -1},
    "tokens in words": {"prompt": "a", "max_tokens": "many"},
    "a negative n": {"prompt": "a", "n": -1},
    "n in words": {"prompt": "a", "n": "two"},
    "a hot temperature": {"prompt": "a", "temperature": -1},
    "options without stream": {"prompt": "a", "stream_options": {"include_usage": True}},
    "stream in words": {"prompt": "a", "stream": "maybe"},
    "a stream in other words": {"prompt": "a", "stream": "yes"},
    "another model": {"prompt": "a", "model": "gpt-0"},
    "a broken schema": {"prompt": "a", "structured_outputs": {"json": "{"}},
    "a broken regex": {"prompt": "a", "structured_outputs": {"regex": "("}},
    "a token out of reach": {"prompt": "a", "logit_bias": {"999999": 5}},
    "params in a list": {"prompt": "a", "kv_transfer_params": [1]},
}


@row(1, 14)
@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_input_is_answered_and_hurts_no_engine(fleet: LooseFleet, name: str) -> None:
    body = MALFORMED[name]
    content = body if isinstance(body, bytes) else json.dumps({"model": "kvops-tiny", "max_tokens": 4} | body).encode()
    async with aiohttp.ClientSession() as client:
        for path in (COMPLETIONS, CHAT):
            async with client.post(
                fleet.process("router").url + path, data=content, headers={"Content-Type": "application/json"}
            ) as answer:
                text = await answer.text()
                assert answer.status in (200, 400, 404), text
                assert ('"choices"' if answer.status == 200 else '"error"') in text


@row(1)
@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_engine_id": "x", "remote_host": "127.0.0.1", "remote_port": 1},
        {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_request_id": "r", "tp_size": 1},
        {"do_remote_decode": True, "remote_block_ids": [[1]]},
        {"do_remote_decode": "yes"},
        {"foo": 1},
        "text",
    ],
    ids=str,
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_clients_own_params_change_nothing(fleet: LooseFleet, params: Any, streamed: bool) -> None:
    body = completion()
    alone = await answer_alone(fleet, COMPLETIONS, body)
    body |= {"kv_transfer_params": params}
    if streamed:
        text = "".join(delta_of(event) for event in await fleet.stream(COMPLETIONS, body))
    else:
        text = text_of((await fleet.post(COMPLETIONS, body))[1])
    assert [text] == alone


@row(1, 18)
async def test_a_handle_of_blocks_that_a_client_knows_is_not_used(fleet: LooseFleet) -> None:
    await fleet.until_idle()
    secret = completion(max_tokens=1, kv_transfer_params=KEEP)
    _, kept = await fleet.post(COMPLETIONS, secret, "prefill-0")
    forged = kept["kv_transfer_params"] | {"do_remote_decode": False, "do_remote_prefill": True}
    body = completion()
    _, answer = await fleet.post(COMPLETIONS, body | {"kv_transfer_params": forged})
    assert texts_of(answer) == await answer_alone(fleet, COMPLETIONS, body)
    assert "kv_transfer_params" not in answer
    # Whoever reads blocks has them freed.
    assert (await fleet.metrics("prefill-0")).total("vllm:kv_cache_usage_perc") > 0


@row(3)
async def test_a_conversation_whose_past_was_edited_is_answered_from_the_new_past(fleet: LooseFleet) -> None:
    first = chat()
    _, answer = await fleet.post(CHAT, first | {"conversation_id": "edited"})
    said = {"role": "assistant", "content": text_of(answer)}
    edited = {"role": "user", "content": make_prompt()}
    body = first | {"messages": [edited, said, {"role": "user", "content": make_prompt()}]}
    _, answer = await fleet.post(CHAT, body | {"conversation_id": "edited"})
    assert texts_of(answer) == await answer_alone(fleet, CHAT, body)


@row(18)
async def test_a_conversation_belongs_to_its_caller(fleet: LooseFleet) -> None:
    body = chat()
    misses = await fleet.routed("kvops_router_handles_total", outcome="first_turn")
    for caller in ("Bearer a", "Bearer b"):
        async with (
            aiohttp.ClientSession(headers={"Authorization": caller}) as client,
            fleet.open_stream(client, CHAT, body | {"conversation_id": "shared"}) as answer,
        ):
            text = "".join(delta_of(event) for event in events_of(await answer.text()))
        assert [text] == await answer_alone(fleet, CHAT, body)
    if fleet.plan.mode == "bidirectional":
        assert await fleet.routed("kvops_router_handles_total", outcome="first_turn") == misses + 2


@row(2)
async def test_streamed_turns_leave_a_handle_for_the_next_one(fleet: LooseFleet) -> None:
    hits = await fleet.routed("kvops_router_handles_total", outcome="hit")
    messages: list[dict[str, str]] = []
    for _ in range(3):
        messages.append({"role": "user", "content": make_prompt()})
        body = chat(messages=messages)
        events = await fleet.stream(CHAT, body | {"conversation_id": "streamed"})
        text = "".join(delta_of(event) for event in events)
        assert [text] == await answer_alone(fleet, CHAT, body)
        messages.append({"role": "assistant", "content": text})
    expected = 2 if fleet.plan.mode == "bidirectional" else 0
    assert await fleet.routed("kvops_router_handles_total", outcome="hit") == hits + expected


@row(9)
async def test_a_clients_request_id_may_be_used_twice_at_once(fleet: LooseFleet) -> None:
    bodies = [completion() for _ in range(6)]

    async def ask(body: dict[str, Any]) -> list[str]:
        async with (
            aiohttp.ClientSession(headers={"X-Request-Id": "always-the-same"}) as client,
            client.post(fleet.process("router").url + COMPLETIONS, json={"model": "kvops-tiny"} | body) as answer,
        ):
            assert answer.headers["X-Request-Id"] == "always-the-same"
            return texts_of(await answer.json())

    answers = await asyncio.gather(*map(ask, bodies))
    assert answers == [await answer_alone(fleet, COMPLETIONS, body) for body in bodies]


@row(8)
async def test_push_sends_both_legs_and_says_how_far_apart(fleet: LooseFleet) -> None:
    before = await fleet.routed("kvops_router_leg_skew_seconds_count")
    await serves(fleet)
    added = await fleet.routed("kvops_router_leg_skew_seconds_count") - before
    assert added == (4 if fleet.plan.mode == "push" else 0)


@row(12)
async def test_a_router_of_another_mode_is_told_so(fleet: LooseFleet, tmp_path: Path) -> None:
    mode, hint = ("pull", "start the router with --mode push")
    if fleet.plan.mode != "push":
        mode, hint = ("push", "start the router with --mode pull")
    argv, port = list(fleet.process("router").argv), free_port()
    for option, value in (
        ("--mode", mode),
        ("--port", port),
        ("--journal", tmp_path / "j"),
        ("--admin-port", free_port()),
    ):
        argv[argv.index(option) + 1] = str(value)
    with (tmp_path / "log").open("w") as log:
        router = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)
    try:
        async with aiohttp.ClientSession() as client:
            await until(lambda: listens(client, port), SOON_SECONDS)
            url = f"http://127.0.0.1:{port}{COMPLETIONS}"
            async with client.post(url, json={"model": "kvops-tiny"} | completion()) as answer:
                assert answer.status == 502, await answer.text()
    finally:
        router.terminate()
        await router.wait()
    assert hint in (tmp_path / "log").read_text()
    await serves(fleet)


async def listens(client: aiohttp.ClientSession, port: int) -> bool:
    try:
        async with client.get(f"http://127.0.0.1:{port}/readyz") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


@row(15)
@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 0}], ids=str)
async def test_logprobs_of_the_prompt_are_those_of_one_engine_alone(fleet: LooseFleet, fields: dict[str, Any]) -> None:
    body = completion(max_tokens=4, **fields)
    _, alone = await fleet.post(COMPLETIONS, body, "decode-0")
    status, routed = await fleet.post(COMPLETIONS, body)
    assert status == 200, routed
    assert chosen(routed) == chosen(alone)


def chosen(answer: dict[str, Any]) -> Any:
    choice = answer["choices"][0]
    logprobs = choice["logprobs"] and choice["logprobs"]["tokens"]
    return choice["text"], logprobs, choice.get("prompt_logprobs") and len(choice["prompt_logprobs"])


@row(13)
@pytest.mark.parametrize("fields", [{"n": 3, "temperature": 1, "top_k": 1}, {"prompt": [make_prompt(), make_prompt()]}])
async def test_several_sequences_are_answered_right_and_leave_nothing(
    fleet: LooseFleet, fields: dict[str, Any]
) -> None:
    body = completion(**fields)
    _, routed = await fleet.post(COMPLETIONS, body)
    assert texts_of(routed) == await answer_alone(fleet, COMPLETIONS, body)
    await fleet.until_idle()


@row(19)
async def test_fields_that_nobody_knows_and_the_trace_go_through(fleet: LooseFleet) -> None:
    body = completion()
    status, routed = await fleet.post(COMPLETIONS, body | {"house_rules": {"nobody": ["knows", 1]}})
    assert status == 200
    assert texts_of(routed) == await answer_alone(fleet, COMPLETIONS, body)


@row(17)
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_the_engine_refuses_is_refused_before_any_stream(fleet: LooseFleet, streamed: bool) -> None:
    status, answer = await fleet.post(COMPLETIONS, completion(prompt="x" * 9000, stream=streamed))
    assert (status, "maximum context length" in answer["error"]["message"]) == (400, True)


@row(5)
async def test_a_client_that_leaves_during_prefill_stops_it(fleet: LooseFleet) -> None:
    await fleet.until_idle()
    async with paused(fleet, "prefill-0", "prefill-1"):
        request = asyncio.create_task(fleet.post(COMPLETIONS, completion(max_tokens=2000)))
        await until(lambda: legs_under_way(fleet, "prefill"), SOON_SECONDS)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        if fleet.plan.mode != "push":
            await until(lambda: nothing_under_way(fleet), SOON_SECONDS)
    await fleet.until_idle()
    await serves(fleet)


async def nothing_under_way(fleet: LooseFleet) -> bool:
    return await fleet.routed("kvops_router_in_flight") == 0


@row(4)
async def test_a_client_that_leaves_between_the_legs_strands_nothing(fleet: LooseFleet) -> None:
    await fleet.until_idle()
    async with paused(fleet, "decode-0", "decode-1"):
        request = asyncio.create_task(fleet.post(COMPLETIONS, completion(max_tokens=2000)))
        await until(lambda: legs_under_way(fleet, "decode"), SOON_SECONDS)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await until(lambda: nothing_under_way(fleet), SOON_SECONDS)
    await fleet.until_idle()
    await serves(fleet)


@row(5)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_during_decode_stops_it(fleet: LooseFleet, streamed: bool) -> None:
    await fleet.until_idle()
    before = await fleet.total("vllm:generation_tokens_total", "decode")
    async with aiohttp.ClientSession() as client:
        asked = asyncio.create_task(read_on(fleet, client, completion(max_tokens=6000, stream=streamed)))
        await until(lambda: generated(fleet), SOON_SECONDS)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    await fleet.until_idle()
    # vLLM does not count among its finished requests what a leaving client has aborted.
    assert await fleet.total("vllm:generation_tokens_total", "decode") - before < 6000


async def read_on(fleet: LooseFleet, client: aiohttp.ClientSession, body: dict[str, Any]) -> None:
    async with fleet.open_stream(client, COMPLETIONS, body) as answer:
        await answer.read()


async def generated(fleet: LooseFleet) -> bool:
    return await fleet.total("vllm:num_requests_running", "decode") == 1


@row(4, 16)
async def test_blocks_go_back_at_once_when_no_decode_takes_them(fleet: LooseFleet) -> None:
    await fleet.until_idle()
    expired = await fleet.total("vllm:nixl_num_kv_expired_reqs_total")
    async with only(fleet, "prefill-0", "decode-0"):
        async with paused(fleet, "prefill-0"):
            body = completion()
            request = asyncio.create_task(fleet.post(COMPLETIONS, body))
            await until(lambda: legs_under_way(fleet, "prefill"), SOON_SECONDS)
            await fleet.drain("decode-0")
        status, answer = await request
        if fleet.plan.mode == "push":
            # Decode had the request before it was drained, and finishes it.
            assert texts_of(answer) == await answer_alone(fleet, COMPLETIONS, body)
        else:
            assert (status, answer["error"]["type"]) == (503, "no_engine")
            await fleet.until_idle()
            assert await fleet.total("vllm:nixl_num_kv_expired_reqs_total") == expired


@row(10, 16, 17)
async def test_prefill_dies_with_a_request_and_comes_back(fleet: LooseFleet) -> None:
    body = completion()
    alone = await answer_alone(fleet, COMPLETIONS, body)
    async with only(fleet, "prefill-0", "decode-0"):
        fleet.signal(signal.SIGSTOP, "prefill-0")
        request = asyncio.create_task(fleet.post(COMPLETIONS, body))
        await until(lambda: legs_under_way(fleet, "prefill"), SOON_SECONDS)
        await fleet.drain("prefill-1", "decode-1", back=True)
        fleet.kill("prefill-0")
        status, answer = await request
    assert (status, texts_of(answer)) == (200, alone)
    fleet.spawn("prefill-0")
    await fleet.until_healthy("prefill-0")
    await fleet.until_all_serve()
    served = await fleet.total("vllm:request_success_total", "prefill")
    await serves(fleet)
    assert await fleet.total("vllm:request_success_total", "prefill") > served
    # Decode gives up what the dead prefill was to write into.
    await fleet.until_idle()


@row(17)
async def test_decode_dies_in_the_middle_of_a_stream_and_comes_back(fleet: LooseFleet) -> None:
    messages = [{"role": "user", "content": make_prompt()}]
    async with only(fleet, "prefill-0", "prefill-1", "decode-0"), aiohttp.ClientSession() as client:
        _, answer = await fleet.post(CHAT, chat(messages=messages) | {"conversation_id": "widowed"})
        body = completion(max_tokens=1000)
        alone = await answer_alone(fleet, COMPLETIONS, body)
        async with fleet.open_stream(client, COMPLETIONS, body | {"max_tokens": 6000}) as stream:
            await stream.content.readany()
            whole = asyncio.create_task(fleet.post(COMPLETIONS, body))
            await until(lambda: two_run(fleet), SOON_SECONDS)
            await fleet.drain("decode-1", back=True)
            fleet.kill("decode-0")
            last = events_of((await stream.read()).decode(errors="replace").split("\n\n", 1)[-1])[-1]
        assert last["error"]["type"] == "decode_failed"
        assert texts_of((await whole)[1]) == alone
    messages += [{"role": "assistant", "content": text_of(answer)}, {"role": "user", "content": make_prompt()}]
    await next_turn(fleet, messages)
    fleet.spawn("decode-0")
    await fleet.until_healthy("decode-0")
    await fleet.until_all_serve()
    await serves(fleet)
    await next_turn(fleet, messages)
    await fleet.until_idle()


async def two_run(fleet: LooseFleet) -> bool:
    return (await fleet.metrics("decode-0")).total("vllm:num_requests_running") == 2


async def next_turn(fleet: LooseFleet, messages: list[dict[str, str]]) -> None:
    """Go on with a conversation whose blocks may be gone."""
    body = chat(messages=messages)
    status, answer = await fleet.post(CHAT, body | {"conversation_id": "widowed"})
    assert status == 200, answer
    assert texts_of(answer) == await answer_alone(fleet, CHAT, body)


@row(3)
async def test_a_turn_after_the_ttl_is_an_ordinary_one(fleet: LooseFleet) -> None:
    messages = [{"role": "user", "content": make_prompt()}]
    _, answer = await fleet.post(CHAT, chat(messages=messages) | {"conversation_id": "slow"})
    await fleet.until_idle(DECODER_TTL_SECONDS + 10)
    hits = await fleet.routed("kvops_router_handles_total", outcome="hit")
    messages += [{"role": "assistant", "content": text_of(answer)}, {"role": "user", "content": make_prompt()}]
    body = chat(messages=messages)
    _, answer = await fleet.post(CHAT, body | {"conversation_id": "slow"})
    assert texts_of(answer) == await answer_alone(fleet, CHAT, body)
    assert await fleet.routed("kvops_router_handles_total", outcome="hit") == hits
