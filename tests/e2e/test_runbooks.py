"""Every query and every harmless command of the runbooks, against a fleet of real engines and a real Prometheus."""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvops import runbooks
from kvops_dashboards import rules
from real_fleet import COMPLETIONS, Fleet, Up, completion, kvops

pytestmark = pytest.mark.system("prometheus")


@pytest.fixture(scope="module")
def fleet(up: Up) -> Fleet:
    return up("default")


@pytest.fixture
async def prometheus(fleet: Fleet, tmp_path: Path) -> AsyncIterator[str]:
    """Yield the address of a Prometheus that has scraped the fleet, under load, and evaluated the rules."""
    rules.write(tmp_path)
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration(fleet)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(  # noqa: ASYNC220
            ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address={address}"],
            cwd=tmp_path,
            stdout=log,
            stderr=log,
        )
    try:
        await load_until_rules_ran(fleet, f"http://{address}")
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def configuration(fleet: Fleet) -> dict[str, Any]:
    def job(name: str, path: str, *urls: str) -> dict[str, Any]:
        targets = [url.removeprefix("http://") for url in urls]
        return {"job_name": name, "metrics_path": path, "static_configs": [{"targets": targets}]}

    engines = [engine.url for role in ("prefill", "decode") for engine in fleet.plan.role(role)]
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["kvops-*.yaml"],
        "scrape_configs": [
            job("kvops-engines", "/metrics/", *engines),
            job("kvops-router", "/metrics", fleet.process("router").url),
        ],
    }


def ask(prometheus: str, expr: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": expr})) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


async def load_until_rules_ran(fleet: Fleet, prometheus: str) -> None:
    # As long as a busy machine needs; the time limit of the test ends a wait in vain.
    while True:
        await fleet.post(COMPLETIONS, completion())
        try:
            if ask(prometheus, "sum(increase(kvops_transfers_total[5m])) > 0") and ask(prometheus, "ALERTS"):
                return
        except urllib.error.URLError:
            pass
        await asyncio.sleep(1)


async def test_prometheus_answers_every_query_and_a_healthy_fleet_fires_only_the_watchdog(prometheus: str) -> None:
    for page in runbooks.pages().values():
        for expr in page.code("promql"):
            ask(prometheus, expr)
    firing = {alert["metric"]["alertname"] for alert in ask(prometheus, 'ALERTS{alertstate="firing"}')}
    assert firing == {"KvopsWatchdog"}


def test_every_command_of_every_page_runs(fleet: Fleet) -> None:
    blocks = [block for page in runbooks.pages().values() for block in page.code("console")]
    lines = {line.removeprefix("$ ") for block in blocks for line in block.splitlines()}
    for words in sorted(shlex.split(line) for line in lines if line.startswith("kvops ")):
        done = kvops(*words[1:])
        assert done.returncode in {0, 1}, (words, done.stdout, done.stderr)
        # An engine's own traceback may stand in its log; one of kvops would go to standard error.
        assert "Traceback" not in done.stderr, words
