"""TTFT and TPOT of two P/D pairs in alternating rounds, such as instrumented against stock connectors.

The client plays the router, so that no router is in the figures. Both pairs are up at the same time and take turns, A B
A B ..., each round with open-loop arrivals at a fixed rate and fresh random prompts from one seed; a round's ratio is
B's median over A's in the same round, so drift of the machine cancels out. Near saturation queues multiply every small
difference; --rate 0 sends one request at a time and shows the difference itself.

    python tests/bench/paired_latency.py --mode push --input-tokens 16384 --rate 6 \
        --a stock,http://127.0.0.1:8100,http://127.0.0.1:8200,stock-p,127.0.0.1:5600 \
        --b kvops,http://127.0.0.1:8101,http://127.0.0.1:8201,kvops-p,127.0.0.1:5601
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
import uuid
from typing import Any, NamedTuple

import aiohttp

WARM_UP_REQUESTS = 3


class Pair(NamedTuple):
    """One prefill and one decode engine; engine id and side channel of prefill are what push needs to know."""

    name: str
    prefill_url: str
    decode_url: str
    engine_id: str
    side_channel: str


class Sample(NamedTuple):
    """One request."""

    ttft_ms: float
    tpot_ms: float


async def measure(client: aiohttp.ClientSession, pair: Pair, options: argparse.Namespace, prompt: list[int]) -> Sample:
    request_id = uuid.uuid4().hex
    started = time.perf_counter()
    prefill = asyncio.create_task(run_prefill(client, pair, options, prompt, request_id))
    handle = push_handle(pair, request_id) if options.mode == "push" else await prefill
    arrivals = await run_decode(client, pair, options, prompt, request_id, handle)
    await prefill
    if len(arrivals) != options.output_tokens:
        raise RuntimeError(f"{pair.name} answered {len(arrivals)} tokens instead of {options.output_tokens}")
    tpot = (arrivals[-1] - arrivals[0]) / max(1, len(arrivals) - 1)
    return Sample((arrivals[0] - started) * 1e3, tpot * 1e3)


async def run_prefill(
    client: aiohttp.ClientSession, pair: Pair, options: argparse.Namespace, prompt: list[int], request_id: str
) -> dict[str, Any]:
    keep = {"do_remote_decode": True, "do_remote_prefill": False}
    body = body_of(options, prompt, max_tokens=1) | {"kv_transfer_params": keep}
    async with client.post(
        f"{pair.prefill_url}/v1/completions", json=body, headers={"X-Request-Id": request_id}
    ) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{pair.name} prefill: HTTP {answer.status} {await answer.text()}")
        handle: dict[str, Any] = (await answer.json())["kv_transfer_params"]
    return handle


async def run_decode(
    client: aiohttp.ClientSession,
    pair: Pair,
    options: argparse.Namespace,
    prompt: list[int],
    request_id: str,
    handle: dict[str, Any],
) -> list[float]:
    """Return the arrival time of every token."""
    body = body_of(options, prompt, max_tokens=options.output_tokens) | {"stream": True, "return_token_ids": True}
    arrivals: list[float] = []
    async with client.post(
        f"{pair.decode_url}/v1/completions",
        json=body | {"kv_transfer_params": handle},
        headers={"X-Request-Id": request_id},
    ) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{pair.name} decode: HTTP {answer.status} {await answer.text()}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{pair.name} decode: {event['error']}")
            tokens = sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
            arrivals += [time.perf_counter()] * tokens
    return arrivals


def push_handle(pair: Pair, request_id: str) -> dict[str, Any]:
    host, _, port = pair.side_channel.rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": pair.engine_id,
        "remote_request_id": f"cmpl-{request_id}-0",
        "remote_block_ids": None,
        "remote_host": host,
        "remote_port": int(port),
        "tp_size": 1,
        "pp_size": 1,
    }


def body_of(options: argparse.Namespace, prompt: list[int], *, max_tokens: int) -> dict[str, Any]:
    return {
        "model": options.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


async def run_round(client: aiohttp.ClientSession, pair: Pair, options: argparse.Namespace, seed: int) -> list[Sample]:
    """Return the samples of one round; both pairs get the same prompts at the same times."""
    source = random.Random(seed)
    low, high = options.token_range
    # Made beforehand: it takes milliseconds a prompt, which would delay the tokens of requests under way.
    prompts = [
        [low + int(source.random() * (high - low)) for _ in range(options.input_tokens)]
        for _ in range(round((options.rate or 1) * options.seconds))
    ]
    if not options.rate:
        return [await measure(client, pair, options, prompt) for prompt in prompts]
    tasks = []
    begin = time.perf_counter()
    for number, prompt in enumerate(prompts):
        await asyncio.sleep(max(0.0, begin + number / options.rate - time.perf_counter()))
        tasks.append(asyncio.create_task(measure(client, pair, options, prompt)))
    return list(await asyncio.gather(*tasks))


def ratio_line(what: str, a: list[list[float]], b: list[list[float]]) -> str:
    """Return medians of both sides and the median of the rounds' ratios with their range."""
    ratios = [statistics.median(late) / statistics.median(early) for early, late in zip(a, b, strict=True)]
    medians = [statistics.median(value for one in side for value in one) for side in (a, b)]
    pooled = medians[1] / medians[0]
    return (
        f"{what:5} median A {medians[0]:9.3f} ms  B {medians[1]:9.3f} ms  B/A {pooled:.4f}  "
        f"by round: median {statistics.median(ratios):.4f}, min {min(ratios):.4f}, max {max(ratios):.4f}"
    )


async def main(options: argparse.Namespace) -> None:
    timeout = aiohttp.ClientTimeout(total=300)
    pairs = [Pair(*spec.split(",")) for spec in (options.a, options.b)]
    rounds: list[list[list[Sample]]] = [[], []]
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:
        for pair in pairs:
            for number in range(WARM_UP_REQUESTS):
                prompt = [random.Random(number).randrange(*options.token_range)] * options.input_tokens
                await measure(client, pair, options, prompt)
        for number in range(options.rounds):
            # Which pair goes first changes from round to round, so that neither always follows the other.
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                samples = await run_round(client, pairs[side], options, seed=1000 + number)
                rounds[side].append(samples)
                ttft = statistics.median(sample.ttft_ms for sample in samples)
                tpot = statistics.median(sample.tpot_ms for sample in samples)
                print(
                    f"round {number} {pairs[side].name:6} n={len(samples)} TTFT {ttft:.2f} TPOT {tpot:.3f}", flush=True
                )
    print(
        f"{options.mode}, {options.input_tokens} tokens in, {options.output_tokens} out, {options.rate} req/s, "
        f"{options.rounds} rounds of {options.seconds} s; A {pairs[0].name}, B {pairs[1].name}"
    )
    for what, field in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")):
        values = [[[getattr(sample, field) for sample in samples] for samples in side] for side in rounds]
        print(ratio_line(what, *values))


def parser() -> argparse.ArgumentParser:
    """Return the parser of everything but the pairs."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--mode", choices=["pull", "push"], required=True)
    made.add_argument("--model", default="m")
    made.add_argument("--input-tokens", type=int, required=True)
    made.add_argument("--output-tokens", type=int, default=128)
    made.add_argument("--rate", type=float, required=True, help="requests a second; 0: one after the other")
    made.add_argument("--seconds", type=float, default=20, help="length of a round; with rate 0 its requests")
    made.add_argument("--rounds", type=int, default=6)
    made.add_argument("--token-range", type=int, nargs=2, default=(300, 151000), metavar=("LOW", "HIGH"))
    return made


if __name__ == "__main__":
    arguments = parser()
    arguments.add_argument("--a", required=True, metavar="NAME,P_URL,D_URL,P_ENGINE_ID,P_SIDE_CHANNEL")
    arguments.add_argument("--b", required=True, metavar="NAME,P_URL,D_URL,P_ENGINE_ID,P_SIDE_CHANNEL")
    asyncio.run(main(arguments.parse_args()))
