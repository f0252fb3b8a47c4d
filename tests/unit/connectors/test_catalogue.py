"""The metric catalogue and the page generated from it."""

from pathlib import Path

import pytest

from kvops_connectors.catalogue import CATALOGUE, Metric, markdown

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def test_the_committed_page_is_the_one_that_the_catalogue_gives():
    assert PAGE.read_text() == markdown(), "run: python -m kvops_connectors.catalogue > docs/metrics.md"


@pytest.mark.parametrize("metric", CATALOGUE.values(), ids=CATALOGUE)
def test_a_metric_is_named_as_prometheus_wants_it(metric: Metric):
    assert metric.name.startswith("kvops_")
    assert ":" not in metric.name
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(metric.buckets)


@pytest.mark.parametrize("metric", CATALOGUE.values(), ids=CATALOGUE)
def test_every_label_has_a_bound(metric: Metric):
    assert all(label.limit > 0 for label in metric.labels)
    assert "request_id" not in {label.name for label in metric.labels}


def test_an_engine_exports_fewer_than_1500_series_in_the_worst_case():
    assert sum(metric.series_limit for metric in CATALOGUE.values()) < 1500
