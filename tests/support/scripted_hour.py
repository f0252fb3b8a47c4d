"""A bad hour in minutes: real fleets in every mode, with all that goes wrong, under one real Prometheus.

``python tests/support/scripted_hour.py FOLDER [MODE...]`` starts one fleet after another and leaves Prometheus' data in
FOLDER/data, for ``prometheus --storage.tsdb.path`` and ``kvops dashboards check`` afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

from kvops.launch.plan import Plan, Process
from kvops.launch.rundir import RunDir
from kvops_dashboards.scraping import Target, prometheus_config

TRAFFIC_SECONDS = 80
KVOPS = [sys.executable, "-m", "kvops.cli.main"]
# Short lifetimes, so that they run out within the traffic.
LEASE_SECONDS, TTL_SECONDS = 8, 45
# The router leaves a handle alone in the last 30 seconds of its TTL.
LATE_SECONDS = 20


class Traffic:
    """Clients of one fleet: conversations of several turns, some broken off, some that come back too late."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        self.session, self.url = session, url
        self.random = random.Random(seed)
        self.outcomes: dict[str, int] = {}

    async def converse(self, until: float, number: int) -> None:
        turn_of = 0
        while time.monotonic() < until:
            turn_of += 1
            name, history = f"c{number}-{turn_of}", self.words(60)
            for turn in range(3):
                if time.monotonic() >= until:
                    return
                history += await self.ask(name, history, gone=self.random.random() < 0.08)
                history += self.words(40)
                late = turn == 1 and self.random.random() < 0.2
                await asyncio.sleep(LATE_SECONDS if late else self.random.uniform(0.2, 2))

    async def ask(self, name: str, prompt: str, gone: bool) -> str:
        body = {"model": "kvops-tiny", "prompt": prompt, "max_tokens": 16, "stream": True, "conversation_id": name}
        outcome, text = "gone" if gone else "ok", ""
        try:
            async with asyncio.timeout(0.3 if gone else 60):
                async with self.session.post(f"{self.url}/v1/completions", json=body) as answer:
                    text = answer_text(await answer.text())
                    outcome = str(answer.status)
        except (TimeoutError, aiohttp.ClientError) as error:
            outcome = outcome if gone else type(error).__name__
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        return text

    def words(self, count: int) -> str:
        return " ".join(f"{self.random.randrange(10**8):08d}" for _ in range(count)) + " "


def answer_text(stream: str) -> str:
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event).get("choices", []))


async def strand_on_prefill(session: aiohttp.ClientSession, prefill: Process) -> None:
    """Prefill a request whose KV nobody will read, so that its lease runs out."""
    transfer = {"do_remote_decode": True, "do_remote_prefill": False}
    body: dict[str, Any] = {"model": "kvops-tiny", "prompt": "stranded " * 40, "max_tokens": 1}
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with session.post(
            f"{prefill.url}/v1/completions", json=body | {"kv_transfer_params": transfer}
        ) as answer:
            await answer.read()


async def stall(pid: int, seconds: float) -> None:
    """Stop a process and its children's work for a while: a slow peer."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in family:
        process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(seconds)
    for process in family:
        process.send_signal(signal.SIGCONT)


async def disturb(session: aiohttp.ClientSession, run_dir: RunDir) -> None:
    plan, state = run_dir.read_plan(), run_dir.read_state()
    assert state
    pid = {process.name: process.pid for process in state.processes}
    await asyncio.sleep(15)
    for _ in range(2):
        await strand_on_prefill(session, plan.role("prefill")[0])
    await asyncio.sleep(10)
    decode = pid["decode-0"]
    assert decode
    await stall(decode, 6)


async def play(name: str) -> dict[str, int]:
    run_dir = RunDir(name)
    plan = run_dir.read_plan()
    async with aiohttp.ClientSession() as session:
        traffic = Traffic(session, plan.router.url, seed=len(name))
        until = time.monotonic() + TRAFFIC_SECONDS
        await asyncio.gather(disturb(session, run_dir), *(traffic.converse(until, number) for number in range(2)))
        state = run_dir.read_state()
        prefill = next(process.pid for process in state.processes if process.name == "prefill-0") if state else None
        if prefill:
            # The last act: a peer dies under load, and the supervisor ends the fleet.
            os.kill(prefill, signal.SIGKILL)
            await asyncio.gather(*(traffic.ask(f"last-{n}", traffic.words(60), gone=False) for n in range(2)))
        await asyncio.sleep(12)
    return traffic.outcomes


def targets(plan: Plan) -> tuple[list[Target], list[Target]]:
    engines = [
        Target(f"{each.host}:{each.port}", {"role": each.role, "instance": f"{plan.mode}-{each.name}"})
        for each in plan.engines
    ]
    return engines, [Target(f"{plan.router.host}:{plan.router.port}", {"instance": f"{plan.mode}-router"})]


def configure(
    folder: Path, prometheus: subprocess.Popen[bytes], engines: list[Target], routers: list[Target], rules: list[str]
) -> None:
    config = prometheus_config(engines, routers, interval_seconds=2, rule_files=rules)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    prometheus.send_signal(signal.SIGHUP)


def run_fleet(folder: Path, mode: str, prometheus: subprocess.Popen[bytes], rules: list[str]) -> None:
    name = f"hour-{mode}"
    topology = folder / f"{mode}.yaml"
    kv = {"lease": LEASE_SECONDS, "decoder_ttl": TTL_SECONDS, "recompute_threshold": 64}
    topology.write_text(yaml.safe_dump({"model": "kvops-tiny", "mode": mode, "kv": kv}))
    started = time.monotonic()
    up = subprocess.run([*KVOPS, "up", "-f", str(topology), "--preset", "cpu-demo", "--name", name, "-d"], check=False)
    print(f"{mode}: up rc {up.returncode} after {time.monotonic() - started:.0f} s", flush=True)
    try:
        if up.returncode == 0:
            configure(folder, prometheus, *targets(RunDir(name).read_plan()), rules)
            time.sleep(5)
            print(f"{mode}: outcomes {asyncio.run(play(name))}", flush=True)
    finally:
        subprocess.run([*KVOPS, "down", "--name", name], check=False)
        # The next fleet takes the same ports and must not be scraped under this one's names.
        configure(folder, prometheus, [], [], rules)


def main(folder: Path, modes: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    rules = [str(file) for file in sorted((folder / "rules").glob("*.yaml"))]
    (folder / "prometheus.yml").write_text(
        yaml.safe_dump(prometheus_config([], [], interval_seconds=2, rule_files=rules))
    )
    prometheus = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--web.listen-address=127.0.0.1:19090",
            "--enable-feature=exemplar-storage",
        ],
        stdout=(folder / "prometheus.log").open("wb"),
        stderr=subprocess.STDOUT,
    )
    try:
        for mode in modes:
            run_fleet(folder, mode, prometheus, rules)
    finally:
        prometheus.send_signal(signal.SIGTERM)
        prometheus.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or ["bidirectional", "push", "pull"])
