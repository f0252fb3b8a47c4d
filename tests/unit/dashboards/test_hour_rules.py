"""The quickened rules of the scripted hour."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from hour_rules import SPEED, began, quickened, write_quick_rules
from kvops_dashboards import rules


def test_ranges_offsets_and_for_pass_faster_and_names_stay():
    text = "expr: a:b:rate5m > rate(x[10m]) + avg_over_time(a:b:rate30m[6h] offset 1h)\nfor: 2m"
    assert (
        quickened(text)
        == "expr: a:b:rate5m > rate(x[30000ms]) + avg_over_time(a:b:rate30m[1080000ms] offset 180000ms)\nfor: 6000ms"
    )


def test_the_shipped_values_are_left_alone(tmp_path):
    before = rules.values()["alerts"]["KvopsKvWaitStuck"]["seconds"]
    files = write_quick_rules(tmp_path)
    assert rules.values()["alerts"]["KvopsKvWaitStuck"]["seconds"] == before
    alerts = [rule for group in yaml.safe_load(Path(files[1]).read_text())["groups"] for rule in group["rules"]]
    stuck = next(rule for rule in alerts if rule["alert"] == "KvopsKvWaitStuck")
    assert stuck["expr"].endswith(f"> {before / 2}")
    assert stuck["for"] == f"{60_000 // SPEED}ms"


@pytest.mark.system("promtool")
def test_promtool_accepts_the_quickened_rules(tmp_path):
    done = subprocess.run(
        ["promtool", "check", "rules", *write_quick_rules(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_fires_on_from_the_act_before_does_not_begin_again():
    assert not began([98.0, 99.0, 100.0, 101.0], 100.0)
    assert began([100.0, 101.0], 100.0)
    assert began([80.0, 81.0, 103.0], 100.0)
