"""Reading an engine's ``/metrics``."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


class Samples:
    """One scrape, asked by sample name and labels."""

    def __init__(self, text: str) -> None:
        """Parse the classic Prometheus text format.

        Raises:
            ValueError: ``text`` is not in that format.
        """
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of all samples called ``name`` that carry ``labels``; 0 where there is none."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items())
        )

    def has(self, name: str) -> bool:
        """Return whether any sample is called ``name``: "no data" and "zero" mean different things."""
        return any(sample.name == name for sample in self._samples)
