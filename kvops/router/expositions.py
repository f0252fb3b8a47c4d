"""The metrics of several processes as those of one."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Everything else adds up: counters, histograms, and gauges that count something.
_NO_SUM: dict[str, Callable[[float, float], float]] = {
    "kvops_router_endpoint_up": min,
    "kvops_router_handed_over_oldest_seconds": max,
}


def merge(texts: Sequence[bytes]) -> bytes:
    """Return one exposition in Prometheus' text format for those of several processes of the same program."""
    families: dict[str, tuple[list[str], dict[str, float]]] = {}
    for text in texts:
        samples: dict[str, float] = {}
        head: list[str] = []
        for line in text.decode().splitlines():
            if line.startswith("# "):
                name = line.split(" ", 3)[2]
                head, samples = families.setdefault(name, ([], {}))
                if line not in head:
                    head.append(line)
                continue
            key, _, value = line.rpartition(" ")
            combine = _NO_SUM.get(key.partition("{")[0], _add)
            samples[key] = reduce(combine, [samples[key]] if key in samples else [], float(value))
    lines: list[str] = []
    for head, samples in families.values():
        lines += [*head, *(f"{key} {value!r}" for key, value in samples.items())]
    return "\n".join([*lines, ""]).encode()


def totals(text: bytes) -> bytes:
    """Return the part of an exposition that must not be lost when its process ends: what only ever grows."""
    kept, grows = [], False
    for line in text.decode().splitlines():
        if line.startswith("# TYPE "):
            grows = line.endswith((" counter", " histogram"))
        if line.startswith("# HELP "):
            # Its type is on the next line.
            pending = line
        elif grows:
            kept += [pending, line] if line.startswith("# TYPE ") else [line]
    return "\n".join([*kept, ""]).encode() if kept else b""


def _add(one: float, other: float) -> float:
    return one + other
