"""The router's Prometheus metrics, as the catalogue declares them."""

from __future__ import annotations

import contextlib
import time
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvops_connectors.catalogue import ROUTER

if TYPE_CHECKING:
    from collections.abc import Iterator


_Kind = TypeVar("_Kind", Counter, Gauge, Histogram)


@lru_cache(maxsize=8192)
def _child(metric: _Kind, labels: tuple[str, ...]) -> _Kind:
    # Looking a child up by its labels costs prometheus_client four times what counting does.
    return metric.labels(*labels) if labels else metric


class RouterMetrics:
    """The metrics of one router."""

    def __init__(self) -> None:
        """Register everything that the catalogue declares for the router."""
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in ROUTER:
            labels = [label.name for label in metric.labels]
            if metric.kind == "counter":
                self._counters[metric.name] = Counter(metric.name, metric.help, labels, registry=self.registry)
            elif metric.kind == "gauge":
                self._gauges[metric.name] = Gauge(metric.name, metric.help, labels, registry=self.registry)
            else:
                self._histograms[metric.name] = Histogram(
                    metric.name, metric.help, labels, buckets=metric.buckets, registry=self.registry
                )
            for values in product(*(label.values for label in metric.labels)) if metric.kind == "counter" else ():
                # A counter that appears with its first event has no increase for Prometheus to see.
                _child(self._counters[metric.name], values)
        self._handed_over: dict[str, float] = {}

    def count(self, name: str, *labels: str, amount: float = 1) -> None:
        """Add to a counter."""
        _child(self._counters[name], labels).inc(amount)

    def observe(self, name: str, seconds: float, *labels: str) -> None:
        """Add a duration to a histogram."""
        _child(self._histograms[name], labels).observe(seconds)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        _child(self._gauges[name], labels).set(value)

    @contextmanager
    def handed_over(self, attempt_id: str) -> Iterator[None]:
        """Note that P's blocks wait for D for as long as the block runs, or until ``taken_over``."""
        self._handed_over[attempt_id] = time.monotonic()
        try:
            yield
        finally:
            self._handed_over.pop(attempt_id, None)

    def taken_over(self, attempt_id: str) -> None:
        """Note that D has begun to answer, so that it has the KV."""
        self._handed_over.pop(attempt_id, None)

    def forget(self, role: str, engine: str) -> None:
        """Remove the gauges of an engine that is gone; its counters stay, as a counter must."""
        for name in ("kvops_router_in_flight", "kvops_router_endpoint_up"):
            with contextlib.suppress(KeyError):
                self._gauges[name].remove(role, engine)
        _child.cache_clear()

    def text(self) -> bytes:
        """Return the exposition."""
        oldest = min(self._handed_over.values(), default=None)
        age = 0.0 if oldest is None else time.monotonic() - oldest
        self.set("kvops_router_handed_over_oldest_seconds", age)
        return generate_latest(self.registry)
