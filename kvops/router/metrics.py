"""The router's Prometheus metrics, as the catalogue declares them.

They are counted in plain dictionaries, on the one thread that there is, and become Prometheus' families when somebody
scrapes: prometheus_client's own counters cost a tenth of a request.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from itertools import accumulate, product
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvops_connectors.catalogue import ROUTER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.metrics_core import Metric as Family

    from kvops_connectors.catalogue import Metric

_Labels = tuple[str, ...]


class _Histogram:
    """Observations of one set of labels."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return upper bound and cumulated count of each bucket."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True))


class RouterMetrics(Collector):
    """The metrics of one router."""

    def __init__(self) -> None:
        """Start everything that the catalogue declares for the router."""
        self._values: dict[str, dict[_Labels, float]] = {}
        self._histograms: dict[str, dict[_Labels, _Histogram]] = {}
        self._bounds = {metric.name: tuple(metric.buckets) for metric in ROUTER if metric.kind == "histogram"}
        for metric in ROUTER:
            if metric.kind == "histogram":
                self._histograms[metric.name] = {}
                if not metric.labels:
                    self._histograms[metric.name][()] = _Histogram(self._bounds[metric.name])
            else:
                # A counter that appears with its first event has no increase for Prometheus to see.
                known = product(*(label.values for label in metric.labels)) if metric.kind == "counter" else ()
                self._values[metric.name] = dict.fromkeys(known if metric.labels else [()], 0.0)
        self._handed_over: dict[str, float] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def count(self, name: str, *labels: str, amount: float = 1) -> None:
        """Add to a counter."""
        values = self._values[name]
        values[labels] = values.get(labels, 0.0) + amount

    def observe(self, name: str, seconds: float, *labels: str) -> None:
        """Add a duration to a histogram."""
        histograms = self._histograms[name]
        histogram = histograms.get(labels)
        if histogram is None:
            histogram = histograms[labels] = _Histogram(self._bounds[name])
        histogram.observe(seconds)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._values[name][labels] = value

    def handed_over(self, attempt_id: str) -> None:
        """Note that P's blocks wait for D, until ``taken_over``."""
        self._handed_over[attempt_id] = time.monotonic()

    def taken_over(self, attempt_id: str) -> None:
        """Note that D has begun to answer, so that it has the KV, or never will."""
        self._handed_over.pop(attempt_id, None)

    def forget(self, role: str, engine: str) -> None:
        """Remove the gauges of an engine that is gone; its counters stay, as a counter must."""
        for name in ("kvops_router_in_flight", "kvops_router_endpoint_up"):
            self._values[name].pop((role, engine), None)

    def collect(self) -> Iterator[Family]:
        """Yield all metrics as prometheus_client writes them."""
        for metric in ROUTER:
            yield self._histogram_family(metric) if metric.kind == "histogram" else self._value_family(metric)

    def _value_family(self, metric: Metric) -> Family:
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=[label.name for label in metric.labels])
        for labels, value in self._values[metric.name].items():
            family.add_metric(labels, value)
        return family

    def _histogram_family(self, metric: Metric) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=[label.name for label in metric.labels])
        for labels, histogram in self._histograms[metric.name].items():
            family.add_metric(labels, buckets=histogram.buckets(), sum_value=histogram.sum)
        return family

    def text(self) -> bytes:
        """Return the exposition."""
        oldest = min(self._handed_over.values(), default=None)
        age = 0.0 if oldest is None else time.monotonic() - oldest
        self.set("kvops_router_handed_over_oldest_seconds", age)
        return generate_latest(self.registry)
