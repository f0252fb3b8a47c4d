"""Metric samples on their way from the engine's process to the API server."""

from __future__ import annotations

from typing import Any

# [metric, label values, value, request id for an exemplar or None]: lists, because msgpack turns tuples into lists
# anyway and vLLM joins payloads of several steps by extending lists.
Sample = list[Any]


class Samples:
    """Collects samples between two steps; counts of the same series are added up."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[str, ...]], Sample] = {}
        self._observed: list[Sample] = []
        self._levels: dict[tuple[str, tuple[str, ...]], float] = {}

    def count(self, metric: str, amount: float = 1, *labels: str, request_id: str | None = None) -> None:
        """Add to a counter; an amount of 0 or less is ignored, Prometheus would raise on it."""
        if amount > 0:
            sample = self._counts.setdefault((metric, labels), [metric, labels, 0, None])
            sample[2] += amount
            sample[3] = request_id or sample[3]

    def known(self, metric: str, *labels: str) -> None:
        """Make a counter's series without adding to it."""
        self._counts.setdefault((metric, labels), [metric, labels, 0, None])

    def observe(self, metric: str, value: float | None, *labels: str, request_id: str | None = None) -> None:
        """Add an observation to a histogram; None is no observation."""
        if value is not None:
            self._observed.append([metric, labels, max(value, 0.0), request_id])

    def level(self, metric: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._levels[metric, labels] = value

    def __bool__(self) -> bool:
        return bool(self._counts or self._observed or self._levels)

    def drain(self) -> list[Sample]:
        """Return everything since the last call."""
        levels = [[metric, labels, value, None] for (metric, labels), value in self._levels.items()]
        samples = [*self._counts.values(), *self._observed, *levels]
        self._counts, self._observed, self._levels = {}, [], {}
        return samples
