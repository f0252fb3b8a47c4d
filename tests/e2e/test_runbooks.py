"""Every query and every harmless command of the runbooks, against a fleet of real engines and a real Prometheus."""

from __future__ import annotations

import asyncio
import json
import shlex
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvops import runbooks
from kvops_dashboards import rules
from local_prometheus import prometheus as local_prometheus
from local_prometheus import targets
from real_fleet import COMPLETIONS, Fleet, Up, completion, kvops

pytestmark = pytest.mark.system("prometheus")


@pytest.fixture(scope="module")
def fleet(up: Up) -> Fleet:
    return up("default")


@pytest.fixture
async def prometheus(fleet: Fleet, tmp_path: Path) -> AsyncIterator[str]:
    """Yield the address of a Prometheus that has scraped the fleet, under load, and evaluated the rules."""
    rules.write(tmp_path)
    with local_prometheus(tmp_path, *targets(fleet.plan), ["kvops-*.yaml"]) as url:
        await load_until_rules_ran(fleet, url)
        yield url


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
