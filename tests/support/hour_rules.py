"""The shipped rules at twenty times their speed, and what they said: an hour of them passes in three minutes."""

from __future__ import annotations

import copy
import json
import re
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvops_dashboards import rules

SPEED = 20
# The lease of the hour's fleets is half of vLLM's, and so are the ages that alerts judge.
LIFETIMES_SHARE = 0.5
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?<=\[)(\d+)([smhd])(?=\])|(?<=offset )(\d+)([smhd])|(?<=for: )(\d+)([smhd])")


def quickened(text: str) -> str:
    """Return rules whose ranges, offsets and ``for`` are divided by ``SPEED``; names of recordings stay."""

    def quicken(match: re.Match[str]) -> str:
        count, unit = (group for group in match.groups() if group is not None)
        return f"{int(count) * _UNIT_SECONDS[unit] * 1000 // SPEED}ms"

    return _DURATION.sub(quicken, text)


def write_quick_rules(folder: Path) -> list[str]:
    """Write the quickened rules to ``folder`` and return the files' paths."""
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        values = copy.deepcopy(rules.values())
        for settings in values["alerts"].values():
            if "seconds" in settings:
                settings["seconds"] *= LIFETIMES_SHARE
        patch.setattr(rules, "values", lambda: values)
        texts = {name: text for name, text in rules.files().items() if name.startswith("kvops-")}
    for name, text in texts.items():
        (folder / name).write_text(quickened(text))
    return [str(folder / name) for name in texts]


def firing(prometheus: str, start: float, end: float) -> dict[str, list[float]]:
    """Return at which times (unix seconds) each alert fired, for any engine.

    A range selector gives what was written; anything else would take an alert for firing for five minutes after the
    Prometheus of the scene before was stopped.
    """
    asked = {"query": f'ALERTS{{alertstate="firing"}}[{end - start:.0f}s]', "time": end}
    with urllib.request.urlopen(f"{prometheus}/api/v1/query?{urllib.parse.urlencode(asked)}", timeout=60) as got:
        series: list[dict[str, Any]] = json.load(got)["data"]["result"]
    times: dict[str, set[float]] = {}
    for each in series:
        times.setdefault(each["metric"]["alertname"], set()).update(at for at, _ in each["values"])
    return {name: sorted(of) for name, of in times.items()}


def began(times: list[float], start: float) -> bool:
    """Return whether what fired at ``times`` began after ``start``, rather than going on from before."""
    return any(at >= start and at - before > 5 for before, at in zip([0.0, *times], times, strict=False))
