from __future__ import annotations

import asyncio
import signal
from typing import Any

import openai
import pytest
from truth import check_holds, check_instruments, check_moves, check_tokens

from kvops.launch.canary import make_prompt
from kvops.launch.processes import pids_of_run
from kvops.tiny_model import KV_BYTES_PER_TOKEN
from real_fleet import (
    BLOCK_TOKENS,
    CHAT,
    COMPLETIONS,
    Fleet,
    Up,
    chat,
    completion,
    delta_of,
    failed_checks,
    held_blocks_share,
    kill,
    kvops,
    text_of,
    texts_of,
    until,
)


@pytest.fixture(scope="module")
def fleet(up: Up) -> Fleet:
    return up("e2e-1p1d")


async def test_the_canary_names_the_bytes_that_moved(fleet: Fleet) -> None:
    canary = fleet.state.canary
    assert canary
    assert canary.passed
    blocks = -(-canary.prompt_tokens // BLOCK_TOKENS)
    assert canary.kv_bytes == blocks * BLOCK_TOKENS * KV_BYTES_PER_TOKEN
    assert canary.kv_tokens == canary.prompt_tokens


def test_the_doctor_finds_no_fault_between_prefill_and_decode(fleet: Fleet) -> None:
    assert failed_checks(f"{fleet.name}/prefill-0", f"{fleet.name}/decode-0") == {}


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, completion), (CHAT, chat)])
async def test_an_answer_is_that_of_one_engine_alone(fleet: Fleet, path: str, body: Any) -> None:
    request = body()
    _, alone = await fleet.post(path, request, "prefill-0")
    before = await fleet.transferred_tokens()
    _, routed = await fleet.post(path, request)
    assert text_of(routed) == text_of(alone)
    assert await fleet.transferred_tokens() - before == routed["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, completion), (CHAT, chat)])
async def test_a_streamed_answer_is_that_of_one_engine_alone(fleet: Fleet, path: str, body: Any) -> None:
    request = body()
    _, alone = await fleet.post(path, request, "prefill-0")
    events = await fleet.stream(path, request | {"stream_options": {"include_usage": True}})
    assert "".join(delta_of(event) for event in events) == text_of(alone)
    assert events[-1]["usage"].items() <= alone["usage"].items()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_every_choice_of_a_request_for_several_is_right(fleet: Fleet, path: str) -> None:
    # Not greedy, for vLLM takes n > 1 only then; top_k 1 gives the same answer.
    request = (completion if path == COMPLETIONS else chat)(n=3, temperature=1, top_k=1)
    _, alone = await fleet.post(path, request, "prefill-0")
    before = await fleet.transferred_tokens()
    _, routed = await fleet.post(path, request)
    assert texts_of(routed) == texts_of(alone)
    assert len(texts_of(routed)) == 3
    assert await fleet.transferred_tokens() > before


async def test_every_prompt_of_a_list_is_answered(fleet: Fleet) -> None:
    request = completion(prompt=[make_prompt(), make_prompt()])
    _, alone = await fleet.post(COMPLETIONS, request, "prefill-0")
    _, routed = await fleet.post(COMPLETIONS, request)
    assert texts_of(routed) == texts_of(alone)


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 8},
        {"max_completion_tokens": 12},
        {"min_tokens": 8, "max_completion_tokens": 12},
        {"logprobs": True, "top_logprobs": 2},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    ],
)
async def test_parameters_that_break_a_one_token_leg_are_served(fleet: Fleet, fields: dict[str, Any]) -> None:
    request = chat(**fields)
    _, alone = await fleet.post(CHAT, request, "prefill-0")
    status, routed = await fleet.post(CHAT, request)
    assert status == 200
    assert text_of(routed) == text_of(alone)


async def test_a_request_that_the_engine_refuses_is_refused_in_its_words(fleet: Fleet) -> None:
    request = completion(prompt="x" * 9000)
    status, alone = await fleet.post(COMPLETIONS, request, "prefill-0")
    routed_status, routed = await fleet.post(COMPLETIONS, request)
    assert (routed_status, status) == (400, 400)
    assert "maximum context length" in routed["error"]["message"]
    assert "maximum context length" in alone["error"]["message"]


async def test_a_clients_own_handle_cannot_hurt_an_engine(fleet: Fleet) -> None:
    poison = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_host": "127.0.0.1"}
    status, _ = await fleet.post(COMPLETIONS, completion(kv_transfer_params=poison))
    assert status == 200
    assert fleet.state.phase == "ready"


async def test_an_openai_client_works_unchanged(fleet: Fleet) -> None:
    async with openai.AsyncOpenAI(base_url=f"{fleet.plan.router.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="kvops-tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=8, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert len(text) == 8


async def test_sixteen_clients_at_once_all_get_their_own_answer(fleet: Fleet) -> None:
    requests = [completion() for _ in range(16)]
    alone = [text_of((await fleet.post(COMPLETIONS, request, "prefill-0"))[1]) for request in requests]
    routed = await asyncio.gather(*(fleet.post(COMPLETIONS, request) for request in requests))
    assert [text_of(answer) for _, answer in routed] == alone


async def test_every_turn_of_a_conversation_is_answered_as_by_one_engine_alone(fleet: Fleet) -> None:
    prompt = make_prompt()
    for _ in range(5):
        _, alone = await fleet.post(COMPLETIONS, completion(prompt=prompt), "prefill-0")
        _, routed = await fleet.post(COMPLETIONS, completion(prompt=prompt))
        assert text_of(routed) == text_of(alone)
        prompt += text_of(routed) + make_prompt()[:100]


async def test_a_client_that_leaves_leaves_no_block_behind(fleet: Fleet) -> None:
    leaving = [asyncio.create_task(fleet.post(COMPLETIONS, completion(max_tokens=2000))) for _ in range(4)]
    for delay, task in zip((0.02, 0.1, 0.3, 1.0), leaving, strict=True):
        await asyncio.sleep(delay)
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    status, _ = await fleet.post(COMPLETIONS, completion())
    assert status == 200

    async def nothing_held() -> bool:
        return await held_blocks_share(fleet, "prefill-0", "decode-0") == 0

    # A client that leaves between the legs strands P's blocks until the lease of 30 s ends.
    await until(nothing_held, 90)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_the_instruments_agree_with_vllm_over_all_of_the_above(fleet: Fleet, name: str) -> None:
    metrics, lines = await fleet.metrics(name), fleet.journal(name)
    check_tokens(metrics, lines)
    check_moves(metrics, lines)
    check_holds(metrics, lines)
    check_instruments(metrics, lines)


async def test_a_second_up_of_the_same_name_is_refused(fleet: Fleet) -> None:
    result = kvops("up", "-d", "--preset", "cpu-demo", "--name", fleet.name)
    assert (result.returncode, f"a fleet named {fleet.name} is already running" in result.stderr) == (2, True)
    assert fleet.state.phase == "ready"


async def test_an_engine_killed_while_serving_is_named_and_nothing_is_left(fleet: Fleet) -> None:
    state = fleet.state
    request = asyncio.create_task(fleet.post(COMPLETIONS, completion(max_tokens=4000)))
    await asyncio.sleep(1)
    kill(next(process.pid for process in state.processes if process.name == "decode-0"), signal.SIGKILL)
    await asyncio.gather(request, return_exceptions=True)
    for _ in range(200):
        if not fleet.run_dir.is_running():
            break
        await asyncio.sleep(0.1)
    assert fleet.state.phase == "failed"
    assert fleet.state.problem.startswith("decode-0 was killed by SIGKILL")
    assert pids_of_run(state.run_id) == []


async def test_down_of_a_fleet_that_is_gone_is_no_error(fleet: Fleet) -> None:
    assert [kvops("down", "--name", fleet.name).returncode for _ in range(2)] == [0, 0]
