"""PromQL from the metric catalogue: a name, label or label value that does not exist fails when the query is built."""

from __future__ import annotations

from kvops_connectors.catalogue import BASE_LABELS, CATALOGUE, ROUTED_ENGINE, Metric

# vLLM's own metrics that the dashboards use, with their kind and the labels on top of the base labels.
VLLM_METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "vllm:time_to_first_token_seconds": ("histogram", ()),
    "vllm:inter_token_latency_seconds": ("histogram", ()),
    "vllm:e2e_request_latency_seconds": ("histogram", ()),
    "vllm:request_queue_time_seconds": ("histogram", ()),
    "vllm:request_prefill_time_seconds": ("histogram", ()),
    "vllm:request_decode_time_seconds": ("histogram", ()),
    "vllm:num_requests_running": ("gauge", ()),
    "vllm:num_requests_waiting": ("gauge", ()),
    "vllm:num_requests_kv_fetch_by_stage": ("gauge", ("stage",)),
    "vllm:kv_cache_usage_perc": ("gauge", ()),
    "vllm:num_preemptions_total": ("counter", ()),
    "vllm:prompt_tokens_by_source_total": ("counter", ("source",)),
    "vllm:request_success_total": ("counter", ("finished_reason",)),
    "vllm:nixl_xfer_time_seconds": ("histogram", ()),
    "vllm:nixl_post_time_seconds": ("histogram", ()),
    "vllm:nixl_bytes_transferred": ("histogram", ()),
    "vllm:nixl_num_descriptors": ("histogram", ()),
    "vllm:nixl_num_failed_transfers_total": ("counter", ()),
    "vllm:nixl_num_failed_notifications_total": ("counter", ()),
    "vllm:nixl_num_kv_expired_reqs_total": ("counter", ()),
    "vllm:nixl_num_notifications_after_expiry_total": ("counter", ()),
}
# Labels that the scrape configuration adds to engines (see docs/dashboards.md).
SCRAPE_LABELS = ("instance", "job", "role")
_ENGINE_FILTER = 'model_name=~"$model",role=~"$role",instance=~"$engine"'
_ROUTER_FILTER = 'instance=~"$router"'
_RATE_WINDOW = "[$__rate_interval]"


def select(name: str, suffix: str = "", **where: str) -> str:
    """Return the series of ``name`` that the dashboard's variables and ``where`` choose.

    Args:
        name: a metric of the catalogue or of ``VLLM_METRICS``.
        suffix: ``_bucket``, ``_sum`` or ``_count`` of a histogram.
        where: label values that must match; a value with ``|`` is a choice of several.

    Raises:
        ValueError: no such metric, label or label value.
    """
    kind, labels = _declaration(name)
    if (kind == "histogram") != bool(suffix):
        raise ValueError(f"{name} is a {kind}; suffix {suffix!r} does not fit")
    for label, value in where.items():
        _check_label(name, label)
        _check_value(name, label, value)
    metric = CATALOGUE.get(name)
    on_router = metric is not None and metric.source == "router"
    base = _ROUTER_FILTER if on_router else _ENGINE_FILTER
    if "role" in where and "role" not in labels:
        base = base.replace('role=~"$role",', "")
    chosen = "".join(f',{label}{"=~" if "|" in value else "="}"{value}"' for label, value in where.items())
    return f"{name}{suffix}{{{base}{chosen}}}"


def rate(name: str, *by: str, suffix: str = "", **where: str) -> str:
    """Return the rate a second of a counter, summed ``by`` labels."""
    return f"{_sum(name, by)}(rate({select(name, suffix, **where)}{_RATE_WINDOW}))"


def increase(name: str, *by: str, window: str = "$__range", suffix: str = "", **where: str) -> str:
    """Return the growth of a counter over ``window``, summed ``by`` labels."""
    return f"{_sum(name, by)}(increase({select(name, suffix, **where)}[{window}]))"


def total(name: str, *by: str, suffix: str = "", **where: str) -> str:
    """Return a gauge, or what a histogram has counted since its engine started, summed ``by`` labels."""
    return f"{_sum(name, by)}({select(name, suffix, **where)})"


def highest(name: str, *by: str, **where: str) -> str:
    """Return the largest value of a gauge ``by`` labels."""
    return f"{_sum(name, by, 'max')}({select(name, **where)})"


def lowest(name: str, *by: str, **where: str) -> str:
    """Return the smallest value of a gauge ``by`` labels."""
    return f"{_sum(name, by, 'min')}({select(name, **where)})"


def quantile(share: float, name: str, *by: str, **where: str) -> str:
    """Return a quantile of a histogram ``by`` labels."""
    return f"histogram_quantile({share}, {rate(name, 'le', *by, suffix='_bucket', **where)})"


def mean(name: str, *by: str, **where: str) -> str:
    """Return the mean of a histogram ``by`` labels."""
    return f"{rate(name, *by, suffix='_sum', **where)} / {rate(name, *by, suffix='_count', **where)}"


def ratio(part: str, whole: str) -> str:
    """Return ``part / whole``; no series where nothing happened, which is not the same as zero."""
    return f"({part}) / ({whole} > 0)"


def or_zero(expr: str, like: str) -> str:
    """Return ``expr``, and 0 for series of ``like`` that it lacks: labels whose bad outcome never came up."""
    return f"{expr} or 0 * {like}"


def _sum(name: str, by: tuple[str, ...], operator: str = "sum") -> str:
    for label in by:
        _check_label(name, label)
    return f"{operator} by ({', '.join(by)}) " if by else operator


def _declaration(name: str) -> tuple[str, tuple[str, ...]]:
    if name in VLLM_METRICS:
        return VLLM_METRICS[name]
    metric = _metric(name)
    return metric.kind, tuple(label.name for label in metric.labels)


def _metric(name: str) -> Metric:
    if name not in CATALOGUE:
        raise ValueError(f"{name} is not in the metric catalogue")
    return CATALOGUE[name]


def _check_label(name: str, label: str) -> None:
    known = (*_declaration(name)[1], *BASE_LABELS, *SCRAPE_LABELS, "le")
    if label not in known:
        raise ValueError(f"{name} has no label {label}; it has {', '.join(known)}")


def _check_value(name: str, label: str, value: str) -> None:
    if name in VLLM_METRICS or label in SCRAPE_LABELS:
        return
    declared = next((each for each in _metric(name).labels if each.name == label and each is not ROUTED_ENGINE), None)
    for each in value.split("|"):
        if declared is not None and declared.values and each not in declared.values:
            raise ValueError(f"{name}: {label} is never {each!r}; it is one of {', '.join(declared.values)}")
