"""``python -m kvops.demo``: bring a fleet up, hold a conversation through it, show where its KV came from, stop it.

Every turn is one streamed chat request through the router; the figures beside it are what the engines counted while it
ran, so the demo must be the only client of its fleet.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from kvops.cli.fleet_view import FleetView, canary_line
from kvops.errors import KvopsError
from kvops.launch.canary import Counters, read_counters, settled_counters
from kvops.launch.plan import make_plan
from kvops.launch.rundir import RunDir
from kvops.launch.supervisor import Supervisor
from kvops.tiny_model import MODEL_NAME, ensure_model
from kvops.topology import load_topology

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvops.launch.plan import Plan
    from kvops.launch.rundir import FleetState

_NAME = "demo"
_ANSWER_TOKENS = 48
_QUESTIONS = (
    "Our decode engines answer 200, but time to first token doubled overnight. Prefill looks idle. "
    "Here is what changed: nothing that anybody admits to. Where do I look first?",
    "The counters say that decode computes every prompt by itself. Which of the two engines forgot the other one?",
    "I restarted prefill and now transfers fail with a handshake error. Is it the side channel or the version?",
    "They talk again. How would I have seen within a minute that no KV was moving?",
)


class Turn(NamedTuple):
    """One turn of the conversation."""

    prompt_tokens: int
    ttft_seconds: float
    answer: str
    counted: dict[str, Counters]
    """Per engine name, what its counters added during the turn."""


def main() -> int:
    """Run the demo and return its exit status: 0 if the canary matched and KV moved on every turn, else 1."""
    console = Console()
    run_dir = RunDir(_NAME)
    if run_dir.is_running():
        raise KvopsError("the demo is already running", f"stop it with 'kvops down --name {_NAME}'")
    plan = make_plan(load_topology(preset="cpu-demo"), name=_NAME, folder=run_dir.path)
    if plan.served_model_name == MODEL_NAME:
        ensure_model(Path(plan.model))
    return asyncio.run(_demo(console, plan, run_dir))


async def _demo(console: Console, plan: Plan, run_dir: RunDir) -> int:
    settled = asyncio.Event()

    def watch(state: FleetState) -> None:
        view(state)
        if state.phase in ("ready", "failed", "stopped"):
            settled.set()

    view = FleetView(console)
    with view:
        supervisor = Supervisor(plan, run_dir, watch)
        running = asyncio.create_task(supervisor.run())
        await asyncio.wait([running, asyncio.create_task(settled.wait())], return_when=asyncio.FIRST_COMPLETED)
    state = supervisor.state
    try:
        if state.phase != "ready":
            return 1
        console.print()
        return 0 if await _converse(console, plan, state) else 1
    finally:
        supervisor.stop()
        with console.status("stopping every process"):
            await running
        if state.problem:
            console.print(state.problem, style="red", markup=False, highlight=False)


async def _converse(console: Console, plan: Plan, state: FleetState) -> bool:
    """Hold the conversation, print it turn by turn, then the table and the verdict; return whether all is well."""
    messages: list[dict[str, str]] = []
    turns: list[Turn] = []
    async with aiohttp.ClientSession() as session:
        for number, question in enumerate(_QUESTIONS, 1):
            messages.append({"role": "user", "content": question})
            turn = await _ask(session, plan, messages)
            messages.append({"role": "assistant", "content": turn.answer})
            turns.append(turn)
            console.print(f"[bold]turn {number}[/] {question}", highlight=False)
            console.print(f"       {turn.answer}", style="dim", markup=False, highlight=False)
    console.print()
    console.print(_table(plan, turns))
    moved = all(_from_prefill(plan, turn) > 0 for turn in turns)
    total_bytes = sum(_kv_bytes(turn) for turn in turns)
    from_prefill = sum(_from_prefill(plan, turn) for turn in turns)
    total = sum(turn.prompt_tokens for turn in turns)
    console.print(f"\n{canary_line(state)}", markup=False, highlight=False)
    if not moved:
        console.print("verdict: NO KV MOVED in at least one turn; see kvops logs --name demo", style="bold red")
        return False
    console.print(
        f"verdict: KV moves. {decimal(total_bytes)} ({total_bytes} bytes) in {len(turns)} turns; decode took "
        f"{from_prefill} of {total} prompt tokens from prefill; the canary matched.",
        style="bold green",
        highlight=False,
    )
    return True


async def _ask(session: aiohttp.ClientSession, plan: Plan, messages: list[dict[str, str]]) -> Turn:
    before = await read_counters(session, plan)
    started = time.monotonic()
    ttft, answer, prompt_tokens = 0.0, "", 0
    async for chunk in _stream_chat(session, plan, messages):
        for choice in chunk["choices"]:
            ttft = ttft or time.monotonic() - started
            answer += choice["delta"].get("content") or ""
        if chunk.get("usage"):
            prompt_tokens = chunk["usage"]["prompt_tokens"]
    return Turn(prompt_tokens, ttft, answer, await settled_counters(session, plan, before, prompt_tokens))


async def _stream_chat(
    session: aiohttp.ClientSession, plan: Plan, messages: list[dict[str, str]]
) -> AsyncIterator[dict[str, Any]]:
    body = {
        "model": plan.served_model_name,
        "messages": messages,
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with session.post(f"{plan.router.url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise KvopsError(
                f"the router answered HTTP {response.status}: {await response.text()}", "kvops logs router"
            )
        async for line in response.content:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line[len(b"data: ") :])


def _table(plan: Plan, turns: list[Turn]) -> Table:
    table = Table(title="where each turn's KV came from", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("turn", "prompt", "TTFT", "KV moved", "D from P", "D cached", "D computed", "P computed"):
        table.add_column(column, justify="right")
    for number, turn in enumerate(turns, 1):
        decode = [turn.counted[engine.name] for engine in plan.role("decode")]
        prefill = [turn.counted[engine.name] for engine in plan.role("prefill")]
        table.add_row(
            str(number),
            str(turn.prompt_tokens),
            f"{turn.ttft_seconds * 1000:.0f} ms",
            decimal(_kv_bytes(turn)),
            f"{sum(counters.transferred_tokens for counters in decode):.0f}",
            f"{sum(counters.cached_tokens for counters in decode):.0f}",
            f"{sum(counters.computed_tokens for counters in decode):.0f}",
            f"{sum(counters.computed_tokens for counters in prefill):.0f}",
        )
    return table


def _from_prefill(plan: Plan, turn: Turn) -> int:
    return round(sum(turn.counted[engine.name].transferred_tokens for engine in plan.role("decode")))


def _kv_bytes(turn: Turn) -> int:
    return round(sum(counters.kv_bytes for counters in turn.counted.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KvopsError as error:
        error.show()
        sys.exit(error.exit_code)
