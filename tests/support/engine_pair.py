"""A real prefill and decode engine on the CPU, and a client that plays the router between them, leg by leg."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from kvops.tiny_model import KV_BYTES_PER_TOKEN, default_path, ensure_model
from kvops_connectors import journal
from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
BLOCK_TOKENS = 32
BLOCK_BYTES = BLOCK_TOKENS * KV_BYTES_PER_TOKEN
START_SECONDS = 240
# vLLM reads nothing back in the last 5 seconds of decode's TTL.
TTL_SECONDS = 16
LEASE_SECONDS = 10
# Of the decode engine that is there to give up; the other one must not, however slow the machine.
PUSH_TIMEOUT_SECONDS = 4
SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
CLI = [sys.executable, str(ROOT / "tests" / "support" / "vllm_cli.py"), "serve"]


def eventually(check: Any, seconds: float = 20.0) -> Any:
    """Return the first true result of ``check``; its last result when the time is over."""
    deadline = time.monotonic() + seconds
    while not (result := check()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return result


@dataclass
class Engine:
    """One vLLM server and what can be read from it.

    Attributes:
        multi: run the connector as the one child of a MultiConnector.
        nixl_port: port of NIXL's own exporter; 0 for an engine of several ranks, which would all want the same.
    """

    name: str
    folder: Path
    connector: str = "NixlConnector"
    role: str = "kv_both"
    extra: dict[str, Any] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    stock: bool = False
    multi: bool = False
    api_servers: int = 1
    policy: str = "fail"
    port: int = field(default_factory=free_port)
    nixl_port: int = field(default_factory=free_port)
    side_port: int = field(default_factory=free_port)
    headers: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        transfer = {
            "kv_connector": self.connector,
            "kv_connector_module_path": "unpinned_stock" if self.stock else "kvops_connectors",
            "kv_role": self.role,
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": self.extra,
        }
        if not self.stock:
            ours = {"journal_dir": str(self.folder), "engine_name": self.name, **self.extra.get("kvops", {})}
            transfer["kv_connector_extra_config"] = {**self.extra, "kvops": ours}
        if self.multi:
            transfer = {
                "kv_connector": "MultiConnector",
                "kv_role": self.role,
                "kv_connector_extra_config": {"connectors": [transfer]},
            }
        argv = [*SERVER] if self.api_servers == 1 else [*CLI, "--api-server-count", str(self.api_servers)]
        argv += ["--model", str(ensure_model(default_path())), "--served-model-name", "m"]
        argv += ["--host", "127.0.0.1", "--port", str(self.port), "--block-size", str(BLOCK_TOKENS), "--enforce-eager"]
        argv += [
            "--max-model-len",
            "4096",
            "--dtype",
            "float32",
            "--kv-transfer-config",
            json.dumps(transfer),
            *self.args,
        ]
        with (self.folder / f"{self.name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                argv, env=self._environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _environment(self) -> dict[str, str]:
        exporter = {
            "NIXL_TELEMETRY_EXPORTER": "prometheus",
            "NIXL_TELEMETRY_PROMETHEUS_PORT": str(self.nixl_port),
            "NIXL_TELEMETRY_PROMETHEUS_LOCAL": "1",
        }
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("", "connectors", "tests/support")),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "KVOPS_NIXL_PROGRESS_DELAY_MICROSECONDS": "10000",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
            "NIXL_TELEMETRY_ENABLE": "1",
            **(exporter if self.nixl_port else {}),
        }

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log()[-4000:]
            try:
                return self.call("GET", "/health")[0] == 200
            except OSError:
                return False

        assert eventually(ready, START_SECONDS), self.log()[-4000:]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        os.killpg(self.process.pid, how)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Keep the process that answers handshakes from running."""
        assert self.process is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        core = next(child for child in children if child.name().startswith("VLLM::Engine"))
        core.suspend()
        try:
            yield
        finally:
            core.resume()

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    @contextmanager
    def stream(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        """Give an open answer; leaving the block hangs up, whatever is still to come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
            yield connection.getresponse()
        finally:
            connection.close()

    @contextmanager
    def hasty(self, path: str, body: Any, headers: dict[str, str] | None = None, seconds: float = 2.0) -> Any:
        """Give an answer that comes within ``seconds``; hang up and raise TimeoutError otherwise."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
            yield connection.getresponse()
        finally:
            connection.close()

    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(errors="replace")

    def lines(self) -> list[journal.Line]:
        files = sorted(self.folder.glob(f"{self.name}.dp*.jsonl*"), reverse=True)
        return [journal.decode(line) for file in files for line in file.read_bytes().splitlines()]

    def records(self, base_id: str) -> list[journal.Record]:
        return [line for line in self.lines() if base_id in line.request.base_id and isinstance(line, journal.Record)]

    def record(self, base_id: str) -> journal.Record:
        found = eventually(lambda: self.records(base_id))
        assert found, f"no record of {base_id} on {self.name}"
        return found[-1]

    def hold_end(self, base_id: str, seconds: float = 20.0) -> journal.HoldEnd:
        def ends() -> list[journal.HoldEnd]:
            lines = (line for line in self.lines() if base_id in line.request.base_id)
            return [line for line in lines if isinstance(line, journal.HoldEnd)]

        found = eventually(ends, seconds)
        assert found, f"no end of a hold of {base_id} on {self.name}"
        return found[-1]

    def metrics(self) -> Metrics:
        return Metrics(self.call("GET", "/metrics")[1])

    def nixl_metrics(self) -> Metrics:
        connection = http.client.HTTPConnection("127.0.0.1", self.nixl_port, timeout=10)
        connection.request("GET", "/metrics")
        try:
            return Metrics(connection.getresponse().read().decode())
        finally:
            connection.close()

    def kv_usage(self) -> float:
        return self.metrics().total("vllm:kv_cache_usage_perc")

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; vLLM refuses as long as any block is in use or held."""
        assert eventually(lambda: '"success":true' in self.call("POST", "/reset_prefix_cache")[1], 30)


class Metrics:
    """One scrape."""

    _LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
    _LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for line in text.splitlines():
            if match := self._LINE.match(line):
                labels = dict(self._LABEL.findall(match[2] or ""))
                self.samples[match[1]].append((labels, float(match[3])))

    def total(self, name: str, **labels: str) -> float:
        return sum(value for found, value in self.samples[name] if labels.items() <= found.items())

    def by(self, name: str, label: str) -> dict[str, float]:
        totals: dict[str, float] = defaultdict(float)
        for labels, value in self.samples[name]:
            totals[labels[label]] += value
        return {key: value for key, value in totals.items() if value}


@dataclass
class Answer:
    """What a leg gave."""

    status: int
    id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    handle: dict[str, Any] | None = None


class Pair:
    """A router's legs between a prefill and a decode engine."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill, self.decode = prefill, decode

    def prefill_leg(
        self, prompt: list[int], handle: dict[str, Any] | None = None, turn: int = 1, request_id: str | None = None
    ) -> Answer:
        request_id = request_id or uuid.uuid4().hex
        params = {**(handle or {}), "do_remote_decode": True, "do_remote_prefill": False}
        return complete(self.prefill, prompt, request_id, said(params, request_id, turn))

    def decode_leg(
        self, prompt: list[int], handle: dict[str, Any] | None, request_id: str, max_tokens: int = 8, turn: int = 1
    ) -> Answer:
        params = None if handle is None else said(handle, request_id, turn)
        return complete(self.decode, prompt, request_id, params, max_tokens)

    def turn(
        self, prompt: list[int], handle: dict[str, Any] | None = None, max_tokens: int = 8, turn: int = 1
    ) -> Answer:
        """Run one turn through both engines and return decode's answer."""
        first = self.prefill_leg(prompt, handle, turn)
        assert first.status == 200, first.text
        answer = self.decode_leg(prompt, first.handle, first.id, max_tokens, turn)
        assert answer.status == 200, answer.text
        return answer


def said(params: dict[str, Any], request_id: str, turn: int) -> dict[str, Any]:
    """Return the params with what a router adds to them."""
    words = {"router_id": f"r-{request_id}", "conversation": "c0ffee", "turn": turn, "attempt": 1}
    return {**params, "kvops": {**(params.get("kvops") or {}), **words}}


def completion(prompt: list[int], params: dict[str, Any] | None, max_tokens: int, **more: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
    return body if params is None else {**body, "kv_transfer_params": params}


def complete(
    engine: Engine, prompt: list[int], request_id: str, params: dict[str, Any] | None, max_tokens: int = 1
) -> Answer:
    body = completion(prompt, params, max_tokens, return_token_ids=True)
    headers = {"X-Request-Id": request_id, **engine.headers}
    status, text = engine.call("POST", "/v1/completions", body, headers)
    if status != 200:
        return Answer(status, request_id, text)
    answer = json.loads(text)
    choice = answer["choices"][0]
    return Answer(status, request_id, choice["text"], choice["token_ids"], answer.get("kv_transfer_params"))


def alone(engine: Engine, prompt: list[int], max_tokens: int = 8) -> list[int]:
    """Return the answer of one engine that computes everything itself: nothing is cached under a new salt."""
    body = completion(prompt, None, max_tokens, return_token_ids=True, cache_salt=uuid.uuid4().hex)
    token_ids: list[int] = json.loads(engine.call("POST", "/v1/completions", body)[1])["choices"][0]["token_ids"]
    return token_ids


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, without the last one, which must be [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines[-3:]
    return [json.loads(line) for line in lines[:-1]]


_DRAW = random.Random(20)


def tokens(count: int, seed: int | None = None) -> list[int]:
    """Return a prompt of printable bytes; without a seed, one that no earlier one shares a block with."""
    draw = _DRAW if seed is None else random.Random(seed)
    return [draw.randrange(33, 123) for _ in range(count)]
