"""Prometheus pages of engines, as far as the checks count."""

from __future__ import annotations

import re


def total(page: str, name: str) -> float:
    """Return a sample summed over its labels; the name is a regular expression, 0 without a sample."""
    values = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\d+(?:\.\d+)?(?:e[+-]?\d{{1,2}})?)\b", page, re.MULTILINE)
    return sum(map(float, values))
