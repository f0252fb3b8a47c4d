"""An exporter that shows every metric of the catalogue, and vLLM's that the dashboards use, with moving values.

For tests of queries only: it says nothing about what real engines report.
"""

from __future__ import annotations

import itertools
import random
import threading

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from kvops_connectors.catalogue import BASE_LABELS, CATALOGUE, Metric
from kvops_dashboards.promql import VLLM_METRICS

BASE_VALUES = ("kvops-tiny", "0")
# Values of labels that the catalogue leaves open.
OPEN_VALUES = {"peer": ("127.0.0.1:5600", "127.0.0.1:5601"), "engine": ("http://127.0.0.1:8100",), "outcome": ("ok",)}
VLLM_VALUES = {
    "stage": ("waiting_to_start", "in_progress", "completed_waiting"),
    "source": ("local_compute", "external_kv_transfer"),
    "finished_reason": ("stop", "error"),
}


class MetricSource:
    """Serves ``/metrics`` and ``/metrics/`` on a free loopback port until closed."""

    def __init__(self, *, router: bool) -> None:
        self.registry = CollectorRegistry()
        self.random = random.Random(0)
        self.children: list[Counter | Gauge | Histogram] = []
        for metric in CATALOGUE.values():
            if (metric.source == "router") == router:
                self._add(metric)
        if not router:
            for name, (kind, labels) in VLLM_METRICS.items():
                self._register(
                    kind, name, [*BASE_LABELS], [BASE_VALUES], labels, [VLLM_VALUES[each] for each in labels]
                )
        self.server, self.thread = start_http_server(0, "127.0.0.1", self.registry)
        self.address = f"127.0.0.1:{self.server.server_port}"
        self._over = threading.Event()
        self._mover = threading.Thread(target=self._move, daemon=True)
        self._mover.start()

    def close(self) -> None:
        self._over.set()
        self._mover.join()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def _add(self, metric: Metric) -> None:
        base = [] if metric.source == "router" else [*BASE_LABELS]
        values = [label.values or OPEN_VALUES.get(label.name, ("x",)) for label in metric.labels]
        names = tuple(label.name for label in metric.labels)
        self._register(metric.kind, metric.name, base, [BASE_VALUES] if base else [()], names, values)

    def _register(self, kind, name, base, base_values, labels, values) -> None:  # type: ignore[no-untyped-def]
        classes = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
        parent = classes[kind](name, name, [*base, *labels], registry=self.registry)
        for fixed, chosen in itertools.product(base_values, itertools.product(*values)):
            every = (*fixed, *chosen)
            self.children.append(parent.labels(*every) if every else parent)

    def _move(self) -> None:
        while not self._over.wait(0.2):
            for child in self.children:
                if isinstance(child, Counter):
                    child.inc(self.random.random())
                elif isinstance(child, Gauge):
                    child.set(1 + self.random.random())
                else:
                    child.observe(self.random.random())
