"""The router's Prometheus metrics, declared in one place."""

from __future__ import annotations

import contextlib
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvops.router.journal import LegRecord

DURATIONS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: full name as Prometheus shows it.
        kind: counter, gauge or histogram.
        help: what is counted or measured, and where.
        question: what the engineer on call asks when looking at it.
        labels: its labels; the values of each are bounded.
        buckets: upper bounds of a histogram, in seconds.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    question: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS = (
    Metric(
        "kvops_router_requests_total",
        "counter",
        "Client requests that ended, by mode and outcome: ok, refused (the engine's own 4xx), client_gone, "
        "broken_off and stream_error (after the first byte), or the type of the error that the client got.",
        "Do requests succeed?",
        ("mode", "outcome"),
    ),
    Metric(
        "kvops_router_request_seconds",
        "histogram",
        "Time from the arrival of a client's request to the end of its answer.",
        "How long do clients wait?",
        ("mode",),
        DURATIONS,
    ),
    Metric(
        "kvops_router_first_byte_seconds",
        "histogram",
        "Time from the arrival of a client's request to the first byte of its answer.",
        "How long is the time to first token, seen from outside?",
        ("mode",),
        DURATIONS,
    ),
    Metric(
        "kvops_router_legs_total",
        "counter",
        "Requests of the router to engines that ended, by role, engine and outcome: ok, refused, cancelled, connect, "
        "broken, timeout, http_error, overloaded, no_handle, stream_error, restarted, kv_wait.",
        "Which engine fails, and how?",
        ("role", "engine", "outcome"),
    ),
    Metric(
        "kvops_router_leg_seconds",
        "histogram",
        "Time from sending a leg to the end of its answer.",
        "Which engine is slow?",
        ("role", "engine"),
        DURATIONS,
    ),
    Metric(
        "kvops_router_leg_skew_seconds",
        "histogram",
        "Push: time between the starts of the two legs.",
        "Are push's legs really sent together?",
        (),
        DURATIONS,
    ),
    Metric(
        "kvops_router_handover_seconds",
        "histogram",
        "Pull and bidirectional: time from P's answer to the sending of D's leg; P's lease runs meanwhile.",
        "Does the router hold KV back?",
        (),
        DURATIONS,
    ),
    Metric(
        "kvops_router_retries_total",
        "counter",
        "Second attempts, by the reason of the first one's failure.",
        "What do retries hide?",
        ("role", "reason"),
    ),
    Metric(
        "kvops_router_handles_total",
        "counter",
        "Bidirectional: turns by whether decode's handle of the turn before could be used (hit) or why not.",
        "Why is KV not read back?",
        ("outcome",),
    ),
    Metric(
        "kvops_router_turns_without_handle_total",
        "counter",
        "Bidirectional: answers of decode that ended well and brought no handle, by whether they streamed.",
        "Does decode return its handles?",
        ("streamed",),
    ),
    Metric(
        "kvops_router_releases_total",
        "counter",
        "Blocks that the router had an engine give back unread, by why and whether the request for it was sent.",
        "Is KV stranded?",
        ("reason", "outcome"),
    ),
    Metric("kvops_router_in_flight", "gauge", "Legs under way.", "How busy is each engine?", ("role", "engine")),
    Metric("kvops_router_queued", "gauge", "Requests that wait for a place.", "Is the fleet full?", ("role",)),
    Metric(
        "kvops_router_endpoint_up",
        "gauge",
        "1 for an engine that takes requests.",
        "Which engine is out?",
        ("role", "engine"),
    ),
    Metric("kvops_router_conversations", "gauge", "Handles kept.", "How many conversations are warm?"),
    Metric("kvops_router_conversation_bytes", "gauge", "Memory of the kept handles.", "What do they cost?"),
    Metric(
        "kvops_router_handed_over_oldest_seconds",
        "gauge",
        "Age of the oldest answer of P whose blocks D has not begun to answer for; 0 without one.",
        "Is KV waiting unread?",
    ),
    Metric("kvops_router_journal_dropped", "gauge", "Journal lines lost.", "Can the journal be trusted?"),
)
_KINDS = {"counter": Counter, "gauge": Gauge}


class RouterMetrics:
    """The metrics of one router."""

    def __init__(self) -> None:
        """Register everything that ``METRICS`` declares."""
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in METRICS:
            if metric.kind == "counter":
                self._counters[metric.name] = Counter(metric.name, metric.help, metric.labels, registry=self.registry)
            elif metric.kind == "gauge":
                self._gauges[metric.name] = Gauge(metric.name, metric.help, metric.labels, registry=self.registry)
            else:
                self._histograms[metric.name] = Histogram(
                    metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=self.registry
                )
        self._handed_over: dict[str, float] = {}

    def count(self, name: str, *labels: str) -> None:
        """Add one to a counter."""
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc()

    def observe(self, name: str, seconds: float, *labels: str) -> None:
        """Add a duration to a histogram."""
        histogram = self._histograms[name]
        (histogram.labels(*labels) if labels else histogram).observe(seconds)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        gauge = self._gauges[name]
        (gauge.labels(*labels) if labels else gauge).set(value)

    @contextmanager
    def leg(self, leg: LegRecord) -> Iterator[None]:
        """Measure and count a leg for as long as the block runs."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.observe("kvops_router_leg_seconds", time.perf_counter() - started, leg.role, leg.engine)
            self.count("kvops_router_legs_total", leg.role, leg.engine, leg.outcome)

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

    def text(self) -> bytes:
        """Return the exposition."""
        oldest = min(self._handed_over.values(), default=None)
        age = 0.0 if oldest is None else time.monotonic() - oldest
        self.set("kvops_router_handed_over_oldest_seconds", age)
        return generate_latest(self.registry)
