"""The rules against promtool: every alert fires when it should, and stays quiet in a healthy fleet with traffic."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from kvops_dashboards import rules
from kvops_dashboards.alerts import ALERTS, BURNS, INHIBITIONS

HERE = Path(__file__).parent
CASES = yaml.safe_load((HERE / "alert_cases.yaml").read_text())
ALWAYS = "KvopsWatchdog"
ROOT = HERE.parents[2]


def promtool_case(name: str, changes: dict[str, str], firing: set[str]) -> dict:
    series = CASES["healthy"] | changes
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": key, "values": str(value)} for key, value in series.items()],
        "promql_expr_test": [
            {
                "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "179m",
                "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(firing)],
            }
        ],
    }


def run_promtool(folder: Path, cases: list[dict]) -> None:
    rules.write(folder)
    content = {
        "rule_files": ["kvops-recordings.yaml", "kvops-alerts.yaml", "kvops-stock-vllm.yaml"],
        "group_eval_order": ["kvops-recordings"],
        "evaluation_interval": "1m",
        "tests": cases,
    }
    (folder / "tests.yaml").write_text(yaml.safe_dump(content, width=1000))
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yaml"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout


def colons_rewritten(series: dict[str, str]) -> dict[str, str]:
    return {key.replace("vllm:", "vllm_"): value for key, value in series.items()}


@pytest.mark.system("promtool")
def test_a_healthy_fleet_with_traffic_fires_nothing_but_the_watchdog(tmp_path):
    run_promtool(tmp_path, [promtool_case("healthy", {}, {ALWAYS})])


@pytest.mark.system("promtool")
@pytest.mark.heavy
@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_fires_alone_on_its_own_trouble(name, tmp_path):
    changes = dict(CASES["fires"][name])
    also = set(changes.pop("also", ()))
    run_promtool(tmp_path, [promtool_case(name, changes, {ALWAYS, name} | also)])


@pytest.mark.system("promtool")
@pytest.mark.heavy
@pytest.mark.parametrize("name", [name for name in ALERTS if name.startswith("KvopsStock")])
def test_a_stock_alert_fires_where_the_scraper_rewrote_the_colons(name, tmp_path, monkeypatch):
    monkeypatch.setitem(CASES, "healthy", colons_rewritten(CASES["healthy"]))
    run_promtool(tmp_path, [promtool_case(name, colons_rewritten(CASES["fires"][name]), {ALWAYS, name})])


@pytest.mark.system("promtool")
def test_one_failure_in_a_quiet_night_pages_nobody(tmp_path):
    silent = {key: "0x180" for key in CASES["healthy"] if "_total{" in key or "_count{" in key or "_bucket{" in key}
    one_failure = {
        'kvops_requests_total{instance="d1",model_name="m",engine="0",direction="p_to_d",outcome="recomputed"}': "0x100 1x80"
    }
    stuck = {
        'vllm:num_requests_kv_fetch_by_stage{instance="d1",model_name="m",engine="0",stage="in_progress"}': "0x180"
    }
    run_promtool(tmp_path, [promtool_case("night", silent | one_failure | stuck, {ALWAYS})])


@pytest.mark.parametrize("name", rules.files())
def test_a_committed_rule_file_is_what_the_builders_write(name):
    assert (ROOT / "dashboards/kvops_dashboards/rules" / name).read_text() == rules.files()[name]


def test_the_list_of_alerts_in_the_docs_is_what_the_builders_write():
    assert (ROOT / "docs/alerts.md").read_text() == rules.markdown()


@pytest.mark.system("promtool")
def test_promtool_accepts_every_rule_file(tmp_path):
    rules.write(tmp_path)
    names = sorted(name for name in rules.files() if name.startswith("kvops-"))
    done = subprocess.run(
        ["promtool", "check", "rules", *names], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.system("amtool")
def test_alertmanager_accepts_the_inhibitions(tmp_path):
    config = {"route": {"receiver": "nobody"}, "receivers": [{"name": "nobody"}], **rules.inhibitions()}
    (tmp_path / "alertmanager.yml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        ["amtool", "check-config", "alertmanager.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_inhibition_names_alerts_that_exist_and_no_alert_hides_itself():
    for source, targets, _ in INHIBITIONS:
        assert {source, *targets} <= set(ALERTS)
        assert source not in targets


def test_every_value_of_the_values_file_is_used():
    known = rules.values()["alerts"]
    assert set(known) == set(ALERTS)
    for name, settings in known.items():
        alert = ALERTS[name]
        text = alert.measure + alert.breach + alert.guard
        unused = [key for key in settings if key not in {"severity", "for"} and f"${key}" not in text]
        assert not unused or name in BURNS, (name, unused)
