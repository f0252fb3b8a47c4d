"""Every mode of the router with two real prefill and two real decode engines."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import aiohttp
import pytest

from kvops.launch.canary import make_prompt
from real_fleet import CHAT, COMPLETIONS, LooseFleet, delta_of, text_of, texts_of, until

REQUESTS = 200
AT_ONCE = 16
STOPS: dict[str, Any] = {"max_tokens": 12, "temperature": 0}


def load() -> list[tuple[str, dict[str, Any]]]:
    """Return requests of every kind: short and long, whole and streamed, of one sequence and of several."""
    kinds: list[tuple[str, dict[str, Any]]] = []
    for _ in range(6):
        prompt = make_prompt()
        message = {"messages": [{"role": "user", "content": prompt}]}
        kinds += [
            (COMPLETIONS, {"prompt": prompt}),
            (COMPLETIONS, {"prompt": "short"}),
            (COMPLETIONS, {"prompt": [prompt, prompt[::-1]]}),
            (CHAT, message),
            (CHAT, message | {"min_tokens": 4, "logprobs": True}),
            (CHAT, message | {"conversation_id": prompt[:40]}),
        ]
    return kinds


async def ask(client: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]) -> list[str]:
    async with client.post(url + path, json={"model": "kvops-tiny"} | STOPS | body) as answer:
        assert answer.status == 200, await answer.text()
        return texts_of(await answer.json())


async def ask_streamed(fleet: LooseFleet, path: str, body: dict[str, Any]) -> list[str]:
    events = await fleet.stream(path, STOPS | body)
    texts = [""] * (len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1)
    for event in events:
        assert "kv_transfer_params" not in event
        if event["choices"]:
            texts[event["choices"][0]["index"]] += delta_of(event)
    return texts


async def test_mixed_requests_are_answered_right_while_clients_leave(fleet: LooseFleet) -> None:
    dice = random.Random(7)
    kinds = load()
    async with aiohttp.ClientSession() as client:
        alone = [
            await ask(
                client, fleet.process("prefill-0").url, path, {k: v for k, v in body.items() if k != "conversation_id"}
            )
            for path, body in kinds
        ]
        slots = asyncio.Semaphore(AT_ONCE)
        wrong: list[tuple[dict[str, Any], list[str], list[str]]] = []
        left = 0

        async def one(index: int, leaves_after: float | None, streamed: bool) -> None:
            nonlocal left
            path, body = kinds[index]
            async with slots:
                try:
                    async with asyncio.timeout(leaves_after):
                        asked = ask_streamed(fleet, path, body) if streamed else ask(
                            client, fleet.process("router").url, path, body
                        )  # fmt: skip
                        texts = await asked
                except TimeoutError:
                    left += 1
                    return
            if texts != alone[index]:
                wrong.append((body, texts, alone[index]))

        plans = [
            (dice.randrange(len(kinds)), dice.uniform(0, 1) if dice.random() < 0.3 else None, dice.random() < 0.5)
            for _ in range(REQUESTS)
        ]
        await asyncio.gather(*(one(*plan) for plan in plans))
    assert wrong == []
    assert 0 < left < REQUESTS / 2
    await fleet.until_idle()


async def test_blocks_that_nobody_reads_are_given_back_at_once(fleet: LooseFleet) -> None:
    if fleet.plan.mode == "push":
        # In push mode P frees blocks when it has written them, or when the lease ends.
        return
    await fleet.until_idle()
    keep = {"do_remote_decode": True, "do_remote_prefill": False}
    body = {"prompt": make_prompt(), "max_tokens": 1, "kv_transfer_params": keep}
    _, answer = await fleet.post(COMPLETIONS, body, "prefill-0")
    release = {
        "model": "kvops-release-blocks",
        "prompt": "-",
        "max_tokens": 1,
        "kv_transfer_params": answer["kv_transfer_params"],
    }
    expired_before = (await fleet.metrics("prefill-0")).total("vllm:nixl_num_kv_expired_reqs_total")
    assert (await fleet.metrics("prefill-0")).total("vllm:kv_cache_usage_perc") > 0
    status, _ = await fleet.post(COMPLETIONS, release, "decode-0")
    assert status == 404
    await fleet.until_idle()
    assert (await fleet.metrics("prefill-0")).total("vllm:nixl_num_kv_expired_reqs_total") == expired_before


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_conversation_goes_on_as_on_one_engine(fleet: LooseFleet, streamed: bool) -> None:
    name = make_prompt()[:32]
    messages = [{"role": "user", "content": make_prompt()}]
    for turn in range(3):
        body = STOPS | {"messages": messages}
        _, alone = await fleet.post(CHAT, body, "prefill-0")
        body = body | {"conversation_id": name}
        if streamed:
            text = "".join(await ask_streamed(fleet, CHAT, body))
        else:
            text = text_of((await fleet.post(CHAT, body))[1])
        assert text == text_of(alone), turn
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": make_prompt()}]


async def test_the_journal_holds_the_legs_of_every_request(fleet: LooseFleet) -> None:
    journal = fleet.run_dir.path / "journal" / "router.jsonl"
    before = len(journal.read_text().splitlines())
    status, _ = await fleet.post(COMPLETIONS, STOPS | {"prompt": make_prompt()})
    assert status == 200

    async def both_legs_are_there() -> bool:
        lines = map(json.loads, journal.read_text().splitlines()[before:])
        return any({leg["role"] for leg in line["legs"]} == {"prefill", "decode"} for line in lines)

    await until(both_legs_are_there, 60)
