"""Fleets of real vLLM engines on the CPU: as ``kvops up -d`` brings them up, or with engines that die and come back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from kvops.launch.canary import make_prompt, run_canary
from kvops.launch.plan import Plan, Process, make_plan
from kvops.launch.processes import RUN_ID_VARIABLE, end_run
from kvops.launch.rundir import FleetState, RunDir
from kvops.metrics_text import Samples
from kvops.tiny_model import default_path, ensure_model
from kvops.topology import load_topology
from kvops_connectors import journal
from ports import free_port

BLOCK_TOKENS = 32
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TRANSFER = "--kv-transfer-config"
LEASE_SECONDS = 15
# In push mode it is the time for which decode waits for a prefill engine that is gone.
DECODER_TTL_SECONDS = 20
# A start takes a minute on two idle cores; CI machines are neither always idle nor always fast.
UP_TIMEOUT_SECONDS = 600


def kvops(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvops.cli.main", *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=UP_TIMEOUT_SECONDS,
    )


class Fleet:
    """A fleet that is up."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.run_dir = RunDir(name)
        self.plan: Plan = self.run_dir.read_plan()

    @property
    def state(self) -> FleetState:
        state = self.run_dir.read_state()
        assert state
        return state

    def process(self, name: str) -> Process:
        return next(process for process in self.plan.processes if process.name == name)

    async def post(self, path: str, body: dict[str, Any], server: str = "router") -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as client,
            client.post(self.process(server).url + path, json={"model": "kvops-tiny"} | body) as answer,
        ):
            return answer.status, await answer.json()

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a streamed answer; the last must be ``[DONE]``."""
        async with aiohttp.ClientSession() as client, self.open_stream(client, path, body) as answer:
            assert answer.status == 200, await answer.text()
            return events_of(await answer.text())

    def open_stream(self, client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Any:
        return client.post(self.process("router").url + path, json={"model": "kvops-tiny", "stream": True} | body)

    async def metrics(self, name: str) -> Samples:
        async with (
            aiohttp.ClientSession() as client,
            client.get(self.process(name).url + "/metrics") as answer,
        ):
            return Samples(await answer.text())

    def journal(self, name: str) -> list[journal.Line]:
        files = sorted(self.run_dir.journal_dir.glob(f"{name}.dp*.jsonl*"))
        return [journal.decode(line) for file in files for line in file.read_bytes().splitlines()]

    async def transferred_tokens(self) -> float:
        """Return the prompt tokens that all decode engines took from prefill so far."""
        scrapes = [await self.metrics(engine.name) for engine in self.plan.role("decode")]
        return sum(
            scrape.total("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") for scrape in scrapes
        )

    async def total(self, metric: str, *roles: str, **labels: str) -> float:
        """Return the sum of a metric over the engines of some roles, of both if none is named."""
        engines = [engine for engine in self.plan.engines if not roles or engine.role in roles]
        scrapes = await asyncio.gather(*(self.metrics(engine.name) for engine in engines))
        return sum(scrape.total(metric, **labels) for scrape in scrapes)

    async def routed(self, metric: str, **labels: str) -> float:
        """Return the sum of a metric of the router."""
        return (await self.metrics("router")).total(metric, **labels)

    async def held(self, *roles: str) -> float:
        """Return the shares of KV blocks that the engines hold, added up."""
        return await self.total("vllm:kv_cache_usage_perc", *roles)


# vLLM takes no tools at all without a parser for their calls.
TOOL_CALLS = ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]


class LooseFleet(Fleet):
    """Two prefill and two decode engines that nobody supervises: they can be stopped, killed and started again."""

    def __init__(self, mode: str) -> None:
        """Plan it."""
        overrides = {
            "mode": mode,
            "prefill": {"replicas": 2, "args": TOOL_CALLS},
            "decode": {"replicas": 2, "args": TOOL_CALLS},
            "kv": {"lease": LEASE_SECONDS, "decoder_ttl": DECODER_TTL_SECONDS},
            "router": {"admin_port": free_port()},
        }
        run_dir = RunDir(f"e2e-{mode}")
        ensure_model(default_path())
        run_dir.prepare(make_plan(load_topology(None, overrides, "cpu-demo"), name=run_dir.name, folder=run_dir.path))
        super().__init__(run_dir.name)
        self._run_id = uuid.uuid4().hex
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self) -> None:
        """Start everything and return once the canary has passed."""
        for engine in self.plan.engines:
            self.spawn(engine.name)
        for engine in self.plan.engines:
            await self.until_healthy(engine.name)
        self.spawn("router")
        await self.until_all_serve()
        async with aiohttp.ClientSession() as session:
            canary = await run_canary(session, self.plan)
        assert canary.passed, (canary.verdict, canary.cause)

    def spawn(self, name: str) -> None:
        process = self.process(name)
        with Path(process.log_file).open("ab") as log:
            self._children[name] = subprocess.Popen(
                self._argv(process),
                env=os.environ | process.env | {RUN_ID_VARIABLE: self._run_id},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _argv(self, process: Process) -> list[str]:
        argv = list(process.argv)
        if process.role == "router":
            return _without_option(argv, "--identity")
        at = argv.index(TRANSFER) + 1
        config = json.loads(argv[at])
        # Peers would go on using what they know of an engine that died under the same id. So the router has to learn
        # what the engines are called.
        config["engine_id"] += f"-{uuid.uuid4().hex[:8]}"
        config["kv_connector_extra_config"]["push_registration_timeout"] = DECODER_TTL_SECONDS
        argv[at] = json.dumps(config)
        return argv

    async def until_healthy(self, name: str) -> None:
        child = self._children[name]

        async def healthy() -> bool:
            assert child.poll() is None, self.log_of(name)[-4000:]
            return await self._answers(name, "/health")

        await until(healthy, UP_TIMEOUT_SECONDS)

    def log_of(self, name: str) -> str:
        return Path(self.process(name).log_file).read_text()

    async def until_all_serve(self) -> None:
        """Return once the router sends requests to every engine."""

        async def all_up() -> bool:
            return await self._answers("router", "/readyz") and await self.routed("kvops_router_endpoint_up") == len(
                self.plan.engines
            )

        await until(all_up, 60)

    async def _answers(self, name: str, path: str) -> bool:
        try:
            async with aiohttp.ClientSession() as client, client.get(self.process(name).url + path) as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    def signal(self, number: signal.Signals, *names: str) -> None:
        """Send a signal to the processes of engines: server, engine core and worker."""
        for name in names:
            child = psutil.Process(self._children[name].pid)
            for process in (*child.children(recursive=True), child):
                process.send_signal(number)

    def kill(self, name: str) -> None:
        self.signal(signal.SIGKILL, name)
        self._children[name].wait()

    async def until_idle(self, seconds: float = LEASE_SECONDS + DECODER_TTL_SECONDS + 30) -> None:
        """Return once no request is under way and no block is held, which leases and TTLs may delay."""

        async def idle() -> bool:
            return await self.held() + await self.routed("kvops_router_in_flight") == 0

        await until(idle, seconds)

    def dead(self) -> list[str]:
        return [name for name, child in self._children.items() if child.poll() is not None]

    async def drain(self, *names: str, back: bool = False) -> None:
        """Have the router send engines nothing new; ``back`` ends that."""
        router = self.process("router")
        port = router.argv[router.argv.index("--admin-port") + 1]
        async with aiohttp.ClientSession() as client:
            for engine in map(self.process, names):
                verb, query = "undrain" if back else "drain", {"role": engine.role, "name": engine.url}
                async with client.post(f"http://127.0.0.1:{port}/endpoints/{verb}", params=query) as answer:
                    assert answer.status == 200, await answer.text()

    def end(self) -> None:
        end_run(self._run_id)
        for child in self._children.values():
            child.wait()


def _without_option(argv: list[str], option: str) -> list[str]:
    values = {at + 1 for at, word in enumerate(argv) if word == option}
    return [word for at, word in enumerate(argv) if word != option and at not in values]


Up = Callable[..., Fleet]


async def until(look: Callable[[], Awaitable[Any]], seconds: float) -> None:
    """Return once ``look`` gives something true."""
    deadline = time.monotonic() + seconds
    while not await look():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s"
        await asyncio.sleep(0.1)


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream; the last must be ``[DONE]``."""
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert events[-1] == "[DONE]", events[-3:]
    return [json.loads(event) for event in events[:-1]]


def kill(pid: int | None, number: int) -> None:
    assert pid
    os.kill(pid, number)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": make_prompt(), "max_tokens": 16, "temperature": 0, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": make_prompt()}]
    return {"messages": messages, "max_tokens": 16, "temperature": 0, **fields}


async def held_blocks_share(fleet: Fleet, *names: str) -> float:
    """Return the largest share of KV blocks that one of the engines holds once all have let go, or after 10 s."""
    for _ in range(100):
        usage = [(await fleet.metrics(name)).total("vllm:kv_cache_usage_perc") for name in names]
        if not any(usage):
            break
        await asyncio.sleep(0.1)
    return max(usage)


def text_of(answer: dict[str, Any]) -> str:
    return texts_of(answer)[0]


def texts_of(answer: dict[str, Any]) -> list[str]:
    assert "choices" in answer, answer
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in answer["choices"]]


def delta_of(event: dict[str, Any]) -> str:
    if not event["choices"]:
        return ""
    choice = event["choices"][0]
    text: str = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
    return text


def failed_checks(prefill: str, decode: str) -> dict[str, str]:
    """Return what ``kvops doctor --pair`` says of each check that fails for two running engines."""
    result = kvops("doctor", "--pair", prefill, decode, "--json")
    report = json.loads(result.stdout)
    found = {entry["id"]: entry["message"] for entry in report["findings"] if entry["state"] == "fail"}
    assert result.returncode == bool(found)
    assert {"VL-06", "VL-08", "VL-12"} <= {e["id"] for e in report["findings"] if e["state"] in ("pass", "fail")}
    return found
