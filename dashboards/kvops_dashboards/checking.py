"""Running every query of every panel and rule against a live Prometheus, to find those that show nothing."""

from __future__ import annotations

import asyncio
import math
import re
import time
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from kvops.errors import KvopsError
from kvops_dashboards import stored

State = Literal["data", "empty", "error"]
# Prometheus answers about as many queries at once as it has cores; more only wait in its queue.
_AT_ONCE = 4
_POINTS = 240
_METRIC = re.compile(r"(?<![\w:])(?:[a-z_]+:)?(?:kvops|vllm)[_:]\w+(?::\w+)*")
# What stands in quotes or in a grouping names labels and values, not metrics.
_NOT_METRICS = re.compile(r'"[^"]*"|\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)')


@dataclass(frozen=True)
class Ask:
    """One query and where it comes from."""

    source: str
    title: str
    expr: str
    is_alert: bool = False


@dataclass(frozen=True)
class Answer:
    """What Prometheus said to one query; ``series`` counts those with a finite value."""

    source: str
    title: str
    expr: str
    state: State
    series: int = 0
    message: str = ""


def queries(window: str, rate_window: str) -> list[Ask]:
    """Return every query of the committed dashboards and rules, with Grafana's variables filled in.

    Args:
        window: what ``$__range`` stands for, such as ``30m``.
        rate_window: what ``$__rate_interval`` stands for.
    """
    found = [
        Ask(board["title"], panel["title"], fill_in(target["expr"], window, rate_window))
        for board in stored.dashboards().values()
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]
    found += [
        Ask("rules", rule.get("alert") or rule["record"], rule["expr"], is_alert="alert" in rule)
        for rule in stored.rules()
    ]
    return found


def fill_in(expr: str, window: str, rate_window: str) -> str:
    """Return ``expr`` as Grafana would send it with every variable at "All"."""
    for name, value in (("__rate_interval", rate_window), ("__range", window), ("__interval", rate_window)):
        expr = expr.replace(f"${name}", value)
    return re.sub(r"\$(model|role|engine|router)\b", ".*", expr)


def metrics_of(expr: str) -> set[str]:
    """Return the names of kvops and vLLM metrics (recorded ones too) in a PromQL expression."""
    return set(_METRIC.findall(_NOT_METRICS.sub("", expr)))


async def check(url: str, *, window_seconds: int, rate_window: str) -> list[Answer]:
    """Return the answer to every query over the last ``window_seconds``.

    A quiet alert has no series, so an alert counts as having data when every metric that it names has some.

    Raises:
        KvopsError: there is no Prometheus at ``url``.
    """
    places = asyncio.Semaphore(_AT_ONCE)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        await _require_prometheus(session, url)

        async def ask(query: Ask) -> Answer:
            async with places:
                return await _ask(session, url, query, window_seconds)

        return list(await asyncio.gather(*(ask(each) for each in queries(f"{window_seconds}s", rate_window))))


async def _require_prometheus(session: aiohttp.ClientSession, url: str) -> None:
    try:
        async with session.get(f"{url}/api/v1/status/buildinfo") as response:
            body = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise KvopsError(
            f"no Prometheus answers at {url}: {error}", "give its base URL, such as http://127.0.0.1:9090"
        ) from None
    if not isinstance(body, dict) or body.get("status") != "success":
        raise KvopsError(f"what answers at {url} is no Prometheus", "give the base URL of Prometheus' own API")


async def _ask(session: aiohttp.ClientSession, url: str, ask: Ask, window_seconds: int) -> Answer:
    exprs = _alternatives_as_one(metrics_of(ask.expr)) if ask.is_alert else [ask.expr]
    counts = []
    for expr in exprs:
        body = await _query_range(session, url, expr, window_seconds)
        if body.get("status") != "success":
            return Answer(ask.source, ask.title, ask.expr, "error", message=str(body.get("error", "no answer")))
        counts.append(sum(_has_value(series) for series in body["data"]["result"]))
    empty = [expr for expr, count in zip(exprs, counts, strict=True) if count == 0]
    message = f"no series of {', '.join(empty)}" if empty and ask.is_alert else ""
    return Answer(ask.source, ask.title, ask.expr, "empty" if empty else "data", sum(counts), message)


def _alternatives_as_one(names: set[str]) -> list[str]:
    """Return queries for ``names``; the two spellings that Prometheus 2 and 3 give a vLLM metric are one."""
    spelled_both = {name for name in names if name.startswith("vllm:") and name.replace(":", "_") in names}
    rest = names - spelled_both - {name.replace(":", "_") for name in spelled_both}
    return sorted(rest | {f"{name} or {name.replace(':', '_')}" for name in spelled_both})


async def _query_range(session: aiohttp.ClientSession, url: str, expr: str, window_seconds: int) -> dict[str, Any]:
    now = time.time()
    step = max(1, window_seconds // _POINTS)
    form = {"query": expr, "start": str(now - window_seconds), "end": str(now), "step": str(step)}
    try:
        async with session.post(f"{url}/api/v1/query_range", data=form) as response:
            body: dict[str, Any] = await response.json()
            return body
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return {"status": "error", "error": f"{type(error).__name__}: {error}"}


def _has_value(series: dict[str, Any]) -> bool:
    return any(math.isfinite(float(value)) for _, value in series["values"])
