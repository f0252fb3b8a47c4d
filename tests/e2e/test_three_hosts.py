"""Prefill, decode and router on three hosts made of network namespaces; real engines, KV over TCP.

The engines load the connectors from a delivered folder, as those of a pod do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvops import tiny_model
from kvops.launch.deliver import deliver
from kvops.launch.plan import Plan, make_plan
from kvops.topology import load_topology
from namespaces import Cluster, cluster, run_on

P, D, ROUTER = 0, 1, 2
PATIENCE_SECONDS = 150
# Well below the 30 s for which P keeps the KV, and long enough for TCP to have lost what was on its way.
OUTAGE_SECONDS = 5

pytestmark = [pytest.mark.system("ip", "tc"), pytest.mark.timeout(4 * PATIENCE_SECONDS)]

CLIENT = """
import json, sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode() or None, {"Content-Type": "application/json"})
try:
    with urllib.request.urlopen(request, timeout=float(sys.argv[3])) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except OSError as error:
    print(0, error)
"""


class Fleet:
    def __init__(self, hosts: Cluster, folder: Path, mode: str) -> None:
        self.hosts, self.folder, self.delivered = hosts, folder, folder / "delivered"
        # What was imported leaves its compiled form behind, even where the caller wants none.
        env = {"PYTHONPATH": str(self.delivered), "PYTHONDONTWRITEBYTECODE": ""}
        engine = {"port": 8100, "side_channel_port": 5600, "env": env}
        overrides = {
            "mode": mode,
            "prefill": {"hosts": [hosts.addresses[P]], **engine},
            "decode": {"hosts": [hosts.addresses[D]], **engine},
            "router": {"host": hosts.addresses[ROUTER], "port": 8000},
            # In push mode decode waits as long for a write that does not come.
            "kv": {"decoder_ttl": 25},
            # Hosts share a kernel here, so shared memory would carry KV that no network link does.
            "transport": {"env": {"UCX_TLS": "tcp"}},
        }
        self.plan: Plan = make_plan(load_topology(None, overrides, "cpu-demo"), name="hosts", folder=folder)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        tiny_model.ensure_model(Path(self.plan.model))
        for name in ("logs", "journal", "delivered"):
            (self.folder / name).mkdir(parents=True)
        deliver(self.delivered)
        for process in self.plan.processes:
            host = {"prefill": P, "decode": D, "router": ROUTER}[process.role]
            with Path(process.log_file).open("wb") as log:
                argv = self.hosts.on(host, *process.argv)
                self.processes.append(subprocess.Popen(argv, env=os.environ | process.env, stdout=log, stderr=log))

    def stop(self) -> None:
        for host in (P, D, ROUTER):
            for pid in self.hosts.pids(host):
                os.kill(int(pid), signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def client(self, prompt: str, url: str = "", seconds: float = 120) -> subprocess.Popen[str]:
        """Start to ask, from the router's host, the router or the engine at ``url``."""
        body = {"model": self.plan.served_model_name, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        argv = [sys.executable, "-c", CLIENT, f"{url or self.plan.router.url}/v1/completions", json.dumps(body)]
        return subprocess.Popen(self.hosts.on(ROUTER, *argv, str(seconds)), stdout=subprocess.PIPE, text=True)

    def ask(self, prompt: str, url: str = "", seconds: float = 120) -> tuple[int, str]:
        return answer_of(self.client(prompt, url, seconds))

    def ready(self) -> bool:
        urls = [f"{process.url}/health" for process in self.plan.engines] + [f"{self.plan.router.url}/readyz"]
        answers = [run_on(self.hosts, ROUTER, [sys.executable, "-c", CLIENT, url, "", "5"]) for url in urls]
        return all(answer.stdout.startswith("200 ") for answer in answers)

    def transfers(self) -> list[dict[str, Any]]:
        journals = sorted((self.folder / "journal").glob("*.jsonl"))
        lines = [json.loads(line) for path in journals for line in path.read_text().splitlines()]
        return [line for line in lines if line.get("transfer")]

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            assert all(process.poll() is None for process in self.processes), self.logs()
            time.sleep(0.2)

    def cut_during_a_transfer(self, prompt: str) -> subprocess.Popen[str]:
        """Ask for a prompt whose KV is sent slowly, and cut the link once a part of it has arrived."""
        rate = ["rate", "4mbit", "burst", "32kbit", "latency", "500ms"]
        assert run_on(self.hosts, P, ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *rate]).returncode == 0
        before = self.hosts.received_bytes(D)
        client = self.client(prompt)
        self.until(lambda: self.hosts.received_bytes(D) - before > 500_000)
        self.hosts.cut_between(P, D)
        assert run_on(self.hosts, P, ["tc", "qdisc", "del", "dev", "eth0", "root"]).returncode == 0
        return client

    def give_connections_up_early(self) -> None:
        """Let TCP report a silent peer after about 12 seconds; Linux' default is a quarter of an hour."""
        for host in (P, D):
            command = ["sh", "-c", "echo 5 > /proc/sys/net/ipv4/tcp_retries2"]
            assert run_on(self.hosts, host, command).returncode == 0

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in (self.folder / "logs").iterdir())


def answer_of(client: subprocess.Popen[str]) -> tuple[int, str]:
    status, _, body = client.communicate(timeout=PATIENCE_SECONDS)[0].partition(" ")
    return int(status), json.loads(body)["choices"][0]["text"] if status == "200" else body


@pytest.fixture(scope="module", params=["pull", "push"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with cluster(3, net=82) as hosts:
        fleet = Fleet(hosts, tmp_path_factory.mktemp("hosts"), request.param)
        try:
            fleet.start()
            fleet.until(fleet.ready)
            yield fleet
        finally:
            fleet.stop()


def test_kv_crosses_the_network_between_two_hosts(fleet: Fleet) -> None:
    prompt = "one host computes, another one goes on " * 20
    before = fleet.hosts.received_bytes(D)
    status, text = fleet.ask(prompt)
    assert status == 200, fleet.logs()
    fleet.until(fleet.transfers)
    moved = sum(line["transfer"]["bytes"] for line in fleet.transfers())
    assert 0 < moved < fleet.hosts.received_bytes(D) - before
    assert text == fleet.ask(prompt, fleet.plan.engines[P].url)[1]
    assert (fleet.delivered / "kvops_connectors" / "__pycache__").is_dir()


@pytest.mark.parametrize("fleet", ["pull", "push"], indirect=True)
def test_a_link_that_is_back_within_the_lease_costs_time_only(fleet: Fleet) -> None:
    prompt = "words that nobody has computed before this " * 100
    client = fleet.cut_during_a_transfer(prompt)
    time.sleep(OUTAGE_SECONDS)
    assert client.poll() is None
    fleet.hosts.mend_between(P, D)
    assert answer_of(client) == fleet.ask(prompt, fleet.plan.engines[P].url)


@pytest.mark.parametrize("fleet", ["pull", "push"], indirect=True)
def test_a_link_that_stays_cut_fails_the_request_and_the_fleet_recovers_by_itself(fleet: Fleet) -> None:
    fleet.give_connections_up_early()
    client = fleet.cut_during_a_transfer("other words that nobody has computed before this " * 85)
    status, body = answer_of(client)
    assert status in (500, 502, 503, 504), (body, fleet.logs())
    fleet.hosts.mend_between(P, D)
    prompt = "the first words after the mend " * 30
    fleet.until(lambda: fleet.ask(prompt)[0] == 200)
    before = len(fleet.transfers())
    prompt = "words that only P has computed when D is asked " * 30
    assert fleet.ask(prompt) == fleet.ask(prompt, fleet.plan.engines[P].url)
    fleet.until(lambda: len(fleet.transfers()) > before)
