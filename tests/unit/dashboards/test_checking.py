"""Queries as Grafana would send them."""

from __future__ import annotations

import pytest

from kvops_dashboards.checking import fill_in, metrics_of, queries


def test_grafana_s_variables_are_filled_in():
    filled = fill_in('rate(x{role=~"$role"}[$__rate_interval]) / increase(x[$__range])', "1h", "1m")
    assert filled == 'rate(x{role=~".*"}[1m]) / increase(x[1h])'


def test_no_query_keeps_a_variable():
    assert not [ask for ask in queries("1h", "1m") if "$" in ask.expr]


@pytest.mark.parametrize(
    ("expr", "names"),
    [
        ('sum by (kvops_x) (rate(kvops_requests_total{a="kvops_no"}[5m]))', {"kvops_requests_total"}),
        ("vllm:nixl_xfer_time_seconds_bucket > 0", {"vllm:nixl_xfer_time_seconds_bucket"}),
        ("model_name:kvops_request_errors:ratio_rate5m > 1", {"model_name:kvops_request_errors:ratio_rate5m"}),
        ('up == 1 unless on (instance) kvops_connector_info{x="y"}', {"kvops_connector_info"}),
    ],
)
def test_metric_names_are_told_from_labels_and_values(expr, names):
    assert metrics_of(expr) == names
