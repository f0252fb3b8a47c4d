"""The router against a direct client and against vllm-router, in front of the same engines.

    python tests/bench/router_bench.py [--vllm-router PATH] [--seconds 3] [--repeats 3] [--json FILE]

The router under test is pinned to one core; client and engines share another one. Beside rates and latencies the table
has the CPU time of the router's process per request and per token, which stays the same when the machine is busy with
something else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import psutil
import uvloop

HERE = Path(__file__).parent
ROUTER_CORE, LOAD_CORE = 0, 1
CONCURRENCIES = (1, 4, 16, 64, 256)
STREAMS = (1, 64)
CONVERSATIONS = 10_000
_MOST_WINDOWS = 10
PROMPT = "The quick brown fox jumps over the lazy dog. " * 45
_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)


@dataclass
class Row:
    """One measurement: the median of the repeats, and how far they lay apart."""

    target: str
    what: str
    at_once: int
    per_second: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    spread: float


class Client(asyncio.Protocol):
    """One connection that sends the next request as soon as the answer is there."""

    def __init__(self, request: bytes, seen: Seen) -> None:
        self._request, self._seen = request, seen

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._send()

    def _send(self) -> None:
        self._received = b""
        self._sent_at = time.perf_counter()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._seen.tokens += data.count(b"completion.chunk")
        self._received = self._received + data if len(self._received) < 4096 else self._received[-64:] + data
        if self._is_whole():
            if b" 200 " not in self._first_line():
                self._seen.failed.append(self._received[-300:])
            self._seen.seconds.append(time.perf_counter() - self._sent_at)
            self._send()

    def _is_whole(self) -> bool:
        end = self._received.find(b"\r\n\r\n")
        length = _LENGTH.search(self._received, 0, end) if end >= 0 else None
        if length is not None:
            return len(self._received) >= end + 4 + int(length[1])
        # Past 4 KiB the head is dropped, and what is left belongs to a stream. The end of a head that says
        # "content-length: 10" looks like the end of a stream, but is none.
        return self._received.endswith(b"\r\n0\r\n\r\n")

    def _first_line(self) -> bytes:
        return self._received[:64] if self._received.startswith(b"HTTP") else b" 200 "


class Seen:
    """What all connections of one measurement saw."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.tokens = 0
        self.failed: list[bytes] = []


def request(port: int, *, stream: bool, conversation: int | None = None) -> bytes:
    fields: dict[str, object] = {"model": "tiny", "max_tokens": 64, "stream": stream}
    fields["messages"] = [{"role": "user", "content": PROMPT}]
    if conversation is not None:
        fields["conversation_id"] = f"conversation-{conversation}"
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def measure(port: int, at_once: int, seconds: float, router: psutil.Process | None, *, stream: bool) -> Row:
    """Return what ``at_once`` connections get done in ``seconds``."""
    loop = asyncio.get_running_loop()
    seen = Seen()
    content = request(port, stream=stream)
    pairs = [await loop.create_connection(lambda: Client(content, seen), "127.0.0.1", port) for _ in range(at_once)]
    await asyncio.sleep(0.5)
    seen.seconds, seen.tokens = [], 0
    cpu, began = cpu_seconds(router), time.perf_counter()
    for _ in range(_MOST_WINDOWS):
        await asyncio.sleep(seconds)
        # On a busy machine many connections may all be waiting for their first answer.
        if len(seen.seconds) >= at_once:
            break
    took, used = time.perf_counter() - began, cpu_seconds(router) - cpu
    done = seen.tokens if stream else len(seen.seconds)
    for transport, _ in pairs:
        transport.abort()
    if seen.failed or not done:
        raise SystemExit(f"port {port}: {len(seen.failed)} requests failed, {done} were answered; {seen.failed[:1]}")
    ordered = sorted(seen.seconds) or [float("nan")]
    return Row(
        target="",
        what="tokens" if stream else "requests",
        at_once=at_once,
        per_second=done / took,
        p50_ms=1e3 * ordered[len(ordered) // 2],
        p99_ms=1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        cpu_us=1e6 * used / done,
        spread=0.0,
    )


def cpu_seconds(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def median_of(rows: list[Row], target: str) -> Row:
    rates = sorted(row.per_second for row in rows)
    return Row(
        target=target,
        what=rows[0].what,
        at_once=rows[0].at_once,
        per_second=statistics.median(rates),
        p50_ms=statistics.median(row.p50_ms for row in rows),
        p99_ms=statistics.median(row.p99_ms for row in rows),
        # The least is the one that the rest of the machine disturbed least.
        cpu_us=min(row.cpu_us for row in rows),
        spread=(rates[-1] - rates[0]) / statistics.median(rates),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(stack: ExitStack, core: int, *argv: str) -> psutil.Process:
    child = subprocess.Popen(["taskset", "-c", str(core), *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(child.wait)
    stack.callback(child.terminate)
    return psutil.Process(child.pid)


async def wait_for(port: int, path: str) -> None:
    for _ in range(300):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
            continue
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        line = await reader.readline()
        writer.close()
        if b"200" in line:
            return
        await asyncio.sleep(0.1)
    raise SystemExit(f"nothing serves on port {port}")


async def fill_conversations(port: int, count: int) -> None:
    """Open ``count`` conversations of one turn each."""

    async def some(numbers: range) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in numbers:
            writer.write(request(port, stream=False, conversation=number))
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            assert length, head
            await reader.readexactly(int(length[1]))
        writer.close()

    share = -(-count // 16)
    await asyncio.gather(*(some(range(at, min(at + share, count))) for at in range(0, count, share)))


async def run(options: argparse.Namespace) -> dict[str, object]:
    rows: list[Row] = []
    memory: dict[str, float] = {}
    with ExitStack() as stack:
        prefill, decode = free_port(), free_port()
        for port in (prefill, decode):
            start(stack, LOAD_CORE, sys.executable, str(HERE / "fast_engine.py"), str(port))
            await wait_for(port, "/health")
        targets: dict[str, tuple[int, psutil.Process | None]] = {"direct": (decode, None)}
        urls = f"http://127.0.0.1:{prefill}", f"http://127.0.0.1:{decode}"
        ours = free_port()
        legs = ("--prefill", urls[0], "--decode", urls[1])
        targets["kvops"] = ours, start(
            stack, ROUTER_CORE, sys.executable, "-m", "kvops.cli.main", "router", *legs, "--port", str(ours)
        )  # fmt: skip
        await wait_for(ours, "/readyz")
        if options.vllm_router:
            theirs = free_port()
            targets["vllm-router"] = theirs, start(
                stack, ROUTER_CORE, options.vllm_router, "--vllm-pd-disaggregation", *legs, "--kv-connector", "nixl",
                "--host", "127.0.0.1", "--port", str(theirs), "--prometheus-port", str(free_port()),
                "--policy", "round_robin", "--log-level", "error",
            )  # fmt: skip
            await wait_for(theirs, "/health")
            await asyncio.sleep(2)
        for stream, levels in ((False, CONCURRENCIES), (True, STREAMS)):
            for at_once in levels:
                found: dict[str, list[Row]] = {target: [] for target in targets}
                # In turns, so that what else the machine does hits all targets alike.
                for _ in range(options.repeats):
                    for target, (port, router) in targets.items():
                        found[target].append(await measure(port, at_once, options.seconds, router, stream=stream))
                rows += [median_of(each, target) for target, each in found.items()]
        memory = await measure_memory(stack, urls)
    return {"rows": [asdict(row) for row in rows], "memory_mib": memory, "load_average": os.getloadavg()}


async def measure_memory(stack: ExitStack, urls: tuple[str, str]) -> dict[str, float]:
    port = free_port()
    router = start(
        stack, ROUTER_CORE, sys.executable, "-m", "kvops.cli.main", "router", "--mode", "bidirectional",
        "--prefill", urls[0], "--decode", urls[1], "--port", str(port),
    )  # fmt: skip
    await wait_for(port, "/readyz")
    before = router.memory_info().rss
    await fill_conversations(port, CONVERSATIONS)
    return {"idle": before / 2**20, f"with {CONVERSATIONS} conversations": router.memory_info().rss / 2**20}


def show(result: dict[str, object]) -> None:
    """Print the rows as a Markdown table; latencies of a router are what it adds to those of the direct client."""
    rows = result["rows"]
    assert isinstance(rows, list)
    direct = {(row["what"], row["at_once"]): row for row in rows if row["target"] == "direct"}
    print("| | at once | through | per second | p50 ms | p99 ms | CPU us each | spread |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    for row in rows:
        base, sign, cpu = {"p50_ms": 0.0, "p99_ms": 0.0}, "", ""
        if row["target"] != "direct":
            base, sign, cpu = direct[row["what"], row["at_once"]], "+", f"{row['cpu_us']:.0f}"
        p50, p99 = (f"{row[key] - base[key]:{sign}.2f}" for key in ("p50_ms", "p99_ms"))
        print(
            f"| {row['what']} | {row['at_once']} | {row['target']} | {row['per_second']:.0f} | {p50} | {p99} | {cpu} | "
            f"{row['spread']:.0%} |"
        )
    print(f"\nmemory, MiB: {result['memory_mib']}\nload average at the end: {result['load_average']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-router", help="The vllm-router command; it is left out without.")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.sched_setaffinity(0, {LOAD_CORE})
    result = uvloop.run(run(options))
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
