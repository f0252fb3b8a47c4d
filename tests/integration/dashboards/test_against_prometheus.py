"""Every query of every panel and rule, on a real Prometheus that scrapes every metric of the catalogue."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from kvops.errors import KvopsError
from kvops_dashboards import stored
from kvops_dashboards.checking import check
from kvops_dashboards.provision import write_provisioning
from kvops_dashboards.scraping import Target
from local_prometheus import prometheus as local_prometheus
from metric_source import MetricSource

# One after another in one worker: each needs the Prometheus that the module starts.
pytestmark = [pytest.mark.system("prometheus", "promtool"), pytest.mark.timeout(180)]
SCRAPES = 8


def ask(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def wait_for_scrapes(url: str) -> None:
    query = f"{url}/api/v1/query?query=min(sum_over_time(up%5B5m%5D))"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            result = ask(query)["data"]["result"]
        except OSError:
            result = []
        if result and float(result[0]["value"][1]) >= SCRAPES:
            return
        time.sleep(0.5)
    pytest.fail("Prometheus did not scrape")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prometheus")
    engines, router = [MetricSource(router=False), MetricSource(router=False)], MetricSource(router=True)
    targets = [Target(each.address, {"role": role}) for each, role in zip(engines, ("prefill", "decode"), strict=True)]
    (folder / "rules").mkdir()
    for name, text in stored.rule_files().items():
        (folder / "rules" / name).write_text(text)
    try:
        with local_prometheus(folder, targets, [Target(router.address)], ["rules/*.yaml"]) as url:
            wait_for_scrapes(url)
            yield url
    finally:
        for source in (*engines, router):
            source.close()


async def test_every_panel_has_data(prometheus):
    answers = await check(prometheus, window_seconds=60, rate_window="1m")
    panels = [answer for answer in answers if answer.source != "rules"]
    assert len(panels) > 100
    assert [(answer.source, answer.title, answer.expr) for answer in panels if answer.state != "data"] == []


async def test_every_rule_has_data(prometheus):
    answers = await check(prometheus, window_seconds=60, rate_window="1m")
    rules = [answer for answer in answers if answer.source == "rules"]
    assert len(rules) > 50
    assert [(answer.title, answer.message or answer.expr) for answer in rules if answer.state != "data"] == []


async def test_a_query_without_data_is_named(prometheus, monkeypatch):
    board = {"title": "T", "panels": [{"title": "P", "targets": [{"expr": "kvops_nothing"}, {"expr": "sum("}]}]}
    monkeypatch.setattr("kvops_dashboards.stored.dashboards", lambda: {"t": board})
    monkeypatch.setattr("kvops_dashboards.stored.rules", list)
    empty, broken = await check(prometheus, window_seconds=60, rate_window="1m")
    assert (empty.title, empty.state) == ("P", "empty")
    assert broken.state == "error"
    assert "parse error" in broken.message


def test_vllm_names_keep_their_colon_though_scraped_as_openmetrics(prometheus):
    names = ask(f"{prometheus}/api/v1/label/__name__/values")["data"]
    assert "vllm:num_requests_running" in names
    assert not [name for name in names if name.startswith("vllm_")]


async def test_what_is_no_prometheus_is_said():
    with pytest.raises(KvopsError, match="no Prometheus answers"):
        await check("http://127.0.0.1:9", window_seconds=60, rate_window="1m")


def test_promtool_accepts_the_provisioned_configuration(tmp_path: Path):
    write_provisioning(tmp_path, [Target("127.0.0.1:8100", {"role": "prefill"})], [Target("127.0.0.1:8000")])
    config = tmp_path / "prometheus/prometheus.yml"
    told = subprocess.run(["promtool", "check", "config", config], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
