"""The dashboards: what is committed, and what every panel must have."""

from __future__ import annotations

import json
import re

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from kvops_connectors.catalogue import CATALOGUE
from kvops_dashboards import stored
from kvops_dashboards.alerts import ALERTS
from kvops_dashboards.checking import metrics_of
from kvops_dashboards.generate import BOARDS, dashboard_json, write_dashboards
from kvops_dashboards.panels import Board, Row, number
from kvops_dashboards.promql import VLLM_METRICS

PANELS = [(board, panel) for board in BOARDS for panel in board.panels]
PANEL_NAMES = [f"{board.title}: {panel.title}" for board, panel in PANELS]
# Facts about the set-up for kvops doctor and alerts, not for a graph.
NOT_ON_A_DASHBOARD = {"kvops_holds_total"}
boards = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)


@boards
def test_the_committed_json_is_what_the_builders_make(board, tmp_path):
    write_dashboards(tmp_path)
    assert json.loads((tmp_path / f"{board.uid}.json").read_text()) == stored.dashboards()[board.uid]


@boards
def test_the_sdk_reads_and_writes_the_committed_json_unchanged(board):
    register_default_plugins()
    text = dashboard_json(board)
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(json.loads(text))))
    # Reading fills in the SDK's own default where we left the key out on purpose; see panels._links.
    for part in (*again["annotations"]["list"], *again["links"]):
        assert part.pop("placement") == "inControlsMenu"
    assert again == json.loads(text)


@boards
def test_panel_ids_are_unique_and_no_panels_overlap(board):
    panels = json.loads(dashboard_json(board))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23


@boards
def test_a_dashboard_links_to_the_others_with_variables_and_time_and_to_the_alerts(board):
    others, alerts = json.loads(dashboard_json(board))["links"]
    assert others["includeVars"]
    assert others["keepTime"]
    assert others["tags"] == ["kvops"]
    assert "placement" not in others
    assert alerts["url"].startswith("/alerting/")


@boards
def test_variables_choose_datasource_model_role_and_engine(board):
    names = [variable["name"] for variable in json.loads(dashboard_json(board))["templating"]["list"]]
    assert names[:4] == ["datasource", "model", "role", "engine"]


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=PANEL_NAMES)
def test_a_panel_says_what_it_means_and_where_to_read_on(board, panel):
    assert len(panel.meaning) > 20
    assert panel.pages
    assert panel.unit
    # Longer ones are cut off at a width of 1440 pixels.
    assert len(panel.title) <= (21 if panel.width == 4 else 34)
    assert all(re.fullmatch(r"Kvops[A-Za-z]+|[a-z-]+", page) for page in panel.pages)


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=PANEL_NAMES)
def test_a_panel_asks_only_for_known_metrics(board, panel):
    known = {*CATALOGUE, *VLLM_METRICS}
    for query in panel.queries:
        named = metrics_of(query.expr)
        assert named
        assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} <= known


def test_every_metric_is_on_a_dashboard_or_left_out_on_purpose():
    asked = {name for _, panel in PANELS for query in panel.queries for name in metrics_of(query.expr)}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert set(CATALOGUE) - shown == NOT_ON_A_DASHBOARD


def test_runbook_pages_of_panels_are_alerts_or_reference_pages():
    named = {page for _, panel in PANELS for page in panel.pages if page.startswith("Kvops")}
    assert named <= set(ALERTS)


def test_every_alert_s_dashboard_exists():
    assert {alert.dashboard for alert in ALERTS.values()} <= {board.uid for board in BOARDS}


def test_uids_are_unique_and_say_kvops():
    uids = [board.uid for board in BOARDS]
    assert len(set(uids)) == len(uids)
    assert all(uid.startswith("kvops-") for uid in uids)


def test_a_line_that_does_not_fill_the_width_is_refused():
    short = Row("r", (number("n", "some long meaning of it", ("KvopsTransferStuck",), "1", "short"),))
    with pytest.raises(ValueError, match="does not fill 24 columns"):
        Board("u", "t", "a", (short,)).build()
