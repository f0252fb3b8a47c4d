"""PromQL is built from the catalogue, and nothing else."""

from __future__ import annotations

import pytest

from kvops_dashboards.promql import increase, mean, quantile, rate, select


def test_a_rate_is_filtered_by_the_variables_and_summed_by_its_labels():
    assert rate("kvops_requests_total", "outcome", direction="p_to_d") == (
        'sum by (outcome) (rate(kvops_requests_total{model_name=~"$model",role=~"$role",instance=~"$engine",'
        'direction="p_to_d"}[$__rate_interval]))'
    )


def test_several_values_become_a_regular_expression():
    assert 'outcome=~"ok|failed"' in select("kvops_requests_total", outcome="ok|failed")


def test_router_metrics_are_filtered_by_the_router_alone():
    assert select("kvops_router_queued", role="prefill") == 'kvops_router_queued{instance=~"$router",role="prefill"}'


def test_a_fixed_role_replaces_the_variable():
    assert 'role=~"$role"' not in select("kvops_kv_blocks", role="decode")


def test_a_histogram_needs_its_part_named():
    with pytest.raises(ValueError, match="is a histogram"):
        select("kvops_request_kv_wait_seconds")


def test_a_mean_is_sum_over_count():
    assert "_sum{" in mean("kvops_push_wait_seconds")
    assert "_count{" in mean("kvops_push_wait_seconds")


def test_a_quantile_keeps_le_and_its_labels():
    assert "sum by (le, direction)" in quantile(0.99, "kvops_request_kv_wait_seconds", "direction")


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: rate("kvops_request_total"), "not in the metric catalogue"),
        (lambda: rate("kvops_requests_total", "peer"), "has no label peer"),
        (lambda: increase("kvops_requests_total", outcome="good"), "never 'good'"),
    ],
)
def test_a_typo_fails_when_the_query_is_built(build, says):
    with pytest.raises(ValueError, match=says):
        build()
