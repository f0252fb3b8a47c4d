"""Rules, dashboards, runbooks and docs name only what exists, and link only to what is there."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvops import runbooks
from kvops_connectors.catalogue import CATALOGUE
from kvops_dashboards import rules, stored
from kvops_dashboards.alerts import ALERTS, RECORDINGS

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
SUFFIXES = ("", "_bucket", "_sum", "_count")
VLLM = {
    "num_requests_waiting",
    "num_requests_kv_fetch_by_stage",
    "prompt_tokens_by_source_total",
    "nixl_num_failed_transfers_total",
    "nixl_num_failed_notifications_total",
    "nixl_num_kv_expired_reqs_total",
    "nixl_num_notifications_after_expiry_total",
    "nixl_xfer_time_seconds",
    "time_to_first_token_seconds",
}
# Names that look like metrics and are modules.
NOT_METRICS = {"kvops_connectors", "kvops_dashboards", "kvops_image"}
# Metrics in no rule and no runbook, and why.
ELSEWHERE = {
    "kvops_prompt_tokens_total": "a whole to divide by; shown by kvops top",
    "kvops_handshake_duration_seconds": "a price paid once per peer",
    "kvops_held_requests": "blocks are what runs out",
    "kvops_holds_total": "equals ended plus held",
    "kvops_mends_total": "a mend that steps in is no trouble",
    "kvops_router_request_seconds": "depends on the length of answers",
    "kvops_router_first_byte_seconds": "a dashboard's figure until the fleet has an objective for it",
    "kvops_router_leg_seconds": "depends on the length of answers",
}


@functools.cache
def texts() -> dict[str, str]:
    found = {f"rules/{name}": text for name, text in rules.files().items()}
    for folder, pattern in (
        ("runbooks", "*.md"),
        ("docs", "*.md"),
        ("dashboards/kvops_dashboards/json", "*.json"),
    ):
        found |= {str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / folder).glob(pattern)}
    return found


@functools.cache
def cases() -> dict[str, Any]:
    return yaml.safe_load((HERE / "alert_cases.yaml").read_text())


def known(name: str) -> bool:
    return any(name == metric + suffix for metric in CATALOGUE for suffix in SUFFIXES)


@pytest.mark.parametrize("place", texts())
def test_every_metric_named_is_in_the_catalogue(place):
    without_recordings = re.sub(r"\w+:kvops_\w+:\w+", "", texts()[place])
    named = set(re.findall(r"\bkvops_[a-z_]+[a-z]\b(?!/)", without_recordings)) - NOT_METRICS
    assert not {name for name in named if not known(name)}


@pytest.mark.parametrize("place", [place for place in texts() if place.startswith(("rules/", "runbooks/"))])
def test_every_vllm_metric_named_is_one_that_vllm_has(place):
    named = set(re.findall(r"\bvllm[:_]((?:num|prompt|nixl|kv|request|external|time)_\w+)", texts()[place]))
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in named} <= VLLM


@pytest.mark.parametrize("place", [place for place in texts() if not place.startswith("docs/")])
def test_every_recording_named_is_recorded(place):
    assert set(re.findall(r"\b\w+:kvops_\w+:\w+", texts()[place])) <= set(RECORDINGS)


def test_every_metric_is_in_a_rule_a_runbook_or_a_dashboard_or_is_listed_with_a_reason():
    used = "\n".join(text for place, text in texts().items() if not place.startswith("docs/"))
    unused = {metric for metric in CATALOGUE if not re.search(rf"\b{metric}(_bucket|_sum|_count)?\b", used)}
    assert unused <= set(ELSEWHERE)
    assert set(ELSEWHERE) <= set(CATALOGUE)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_has_a_severity_a_runbook_a_dashboard_and_a_case(name):
    rule = rules.alert_rule(ALERTS[name])
    page = runbooks.pages()[name]
    assert rule["labels"]["severity"] == page.severity
    assert rule["annotations"]["runbook"] == f"kvops runbook {name}"
    assert rule["annotations"]["dashboard_url"].endswith(f"/{page.facts['dashboard']}")
    assert name in cases()["fires"]


@pytest.mark.parametrize("name", ALERTS)
def test_the_verification_of_a_runbook_is_the_figure_that_the_alert_judges(name):
    assert rules.measure(ALERTS[name]) in runbooks.pages()[name].code("promql")


def test_every_dashboard_that_an_alert_names_is_there():
    built = {file.stem for file in (ROOT / "dashboards/kvops_dashboards/json").glob("*.json")}
    named = {alert.dashboard for alert in ALERTS.values()}
    # Dashboards are built beside the rules; before the first one is generated there is nothing to compare with.
    assert named <= built or not built


@pytest.mark.parametrize("file", sorted((ROOT / "runbooks").glob("*.md")), ids=lambda file: file.stem)
def test_every_link_and_every_alert_of_a_runbook_resolves(file):
    text = file.read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (file.parent / target).is_file(), target
    assert set(re.findall(r"\bKvops[A-Z]\w+", text)) <= set(ALERTS)


def test_every_runbook_command_of_dashboards_and_rules_shows_a_page():
    named = {page for text in texts().values() for page in re.findall(r"`?kvops runbook ([A-Za-z][\w-]+)", text)}
    assert set(ALERTS) | {"reading-the-phase-split"} <= named
    assert not [page for page in named - {"ALERT", "NAME"} if runbooks.find(page).name != page]


def test_every_published_link_is_a_file_of_the_runbooks():
    url = "https://wiki.example.com/runbooks"
    boards, files = stored.dashboards(f"{url}/"), stored.rule_files(url)
    linked = re.findall(re.escape(url) + r"/([^)\s]+)", yaml.safe_dump(boards, width=10**6) + "".join(files.values()))
    assert {f"{name}.md" for name in ALERTS} <= set(linked)
    assert not [name for name in linked if not (ROOT / "runbooks" / name).is_file()]
    assert "`kvops runbook" not in yaml.safe_dump(
        [panel.get("description") for b in boards.values() for panel in b["panels"]]
    )


def test_the_index_lists_every_page():
    index = (ROOT / "runbooks/README.md").read_text()
    assert not [name for name in runbooks.pages() if f"({name}.md)" not in index]
