"""The two modes beside pull, each brought up the way a user does."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvops.launch.canary import make_prompt
from kvops.tiny_model import KV_BYTES_PER_TOKEN
from real_fleet import BLOCK_TOKENS, CHAT, COMPLETIONS, Fleet, Up, completion, delta_of, failed_checks, text_of, write

TURNS = 4
# Prefill that forgets must read the history from decode, or compute it.
CONFIG = "prefill: {args: [--no-enable-prefix-caching]}\n"


@pytest.fixture(scope="module", params=["push", "bidirectional"])
def fleet(up: Up, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    config = write(Path(tmp_path_factory.mktemp("config")) / "kvops.yaml", CONFIG)
    return up(f"e2e-{request.param}", "-f", config, "--mode", request.param)


async def read_back_tokens(fleet: Fleet) -> float:
    """Return the prompt tokens that prefill took from decode so far."""
    scrape = await fleet.metrics("prefill-0")
    return scrape.total("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


async def test_the_canary_saw_the_bytes_of_its_prompt_move(fleet: Fleet) -> None:
    canary = fleet.state.canary
    assert canary
    blocks = -(-canary.prompt_tokens // BLOCK_TOKENS)
    assert (canary.passed, canary.kv_bytes) == (True, blocks * BLOCK_TOKENS * KV_BYTES_PER_TOKEN)


def test_the_doctor_finds_no_fault_between_prefill_and_decode(fleet: Fleet) -> None:
    assert failed_checks(f"{fleet.name}/prefill-0", f"{fleet.name}/decode-0") == {}


@pytest.mark.parametrize("streamed", [False, True])
async def test_every_prompt_token_comes_from_prefill_and_the_answer_is_right(fleet: Fleet, streamed: bool) -> None:
    request = completion()
    _, alone = await fleet.post(COMPLETIONS, request, "prefill-0")
    before = await fleet.transferred_tokens()
    if streamed:
        text = "".join(delta_of(event) for event in await fleet.stream(COMPLETIONS, request))
    else:
        text = text_of((await fleet.post(COMPLETIONS, request))[1])
    assert text == text_of(alone)
    assert await fleet.transferred_tokens() - before == alone["usage"]["prompt_tokens"]


async def test_a_streamed_conversation_goes_on_as_on_one_engine_alone(fleet: Fleet) -> None:
    messages: list[dict[str, str]] = []
    reused = []
    for _ in range(TURNS):
        messages.append({"role": "user", "content": make_prompt()})
        body: dict[str, Any] = {"messages": messages, "max_tokens": 24, "temperature": 0}
        _, alone = await fleet.post(CHAT, body, "prefill-0")
        before = await read_back_tokens(fleet)
        events = await fleet.stream(CHAT, body | {"conversation_id": fleet.name})
        reused.append(await read_back_tokens(fleet) - before)
        text = "".join(delta_of(event) for event in events)
        assert text == text_of(alone)
        messages.append({"role": "assistant", "content": text})
    if fleet.plan.mode == "bidirectional":
        # A turn adds a prompt and an answer, and the next one finds all of it on decode.
        assert reused[0] == 0
        assert all(late > early for early, late in pairwise(reused))
    else:
        assert reused == [0] * TURNS
