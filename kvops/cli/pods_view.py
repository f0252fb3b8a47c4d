"""The pods of a fleet in a cluster, as ``kvops status --kubernetes`` shows them."""

from __future__ import annotations

import json
from typing import Any

import click

from kvops import kubectl

Object = dict[str, Any]


def show_pods(namespace: str, *, as_json: bool) -> bool:
    """Print the fleet's pods and return whether all are ready.

    Raises:
        KvopsError: there is none, or the cluster does not answer.
    """
    rows = [row(pod) for pod in kubectl.fleet_pods(namespace)]
    if as_json:
        click.echo(json.dumps(rows))
    else:
        _print(rows)
    return all(each["ready"] for each in rows)


def row(pod: Object) -> Object:
    """Return what is shown of one pod; ``why`` says what keeps it from being ready."""
    status = pod.get("status", {})
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    ready = conditions.get("Ready", {}).get("status") == "True"
    containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    return {
        "pod": pod["metadata"]["name"],
        "role": pod["metadata"].get("labels", {}).get(kubectl.ROLE_LABEL, ""),
        "node": pod["spec"].get("nodeName", ""),
        "address": status.get("podIP", ""),
        "ready": ready,
        "restarts": sum(each.get("restartCount", 0) for each in containers),
        "why": "" if ready else _why(status, conditions, containers),
    }


def _why(status: Object, conditions: Object, containers: list[Object]) -> str:
    for container in containers:
        state, last = container.get("state", {}), container.get("lastState", {})
        # Of a container that keeps ending, its last words say more than "CrashLoopBackOff".
        for ended in (state.get("terminated"), last.get("terminated")):
            if ended and ended.get("exitCode"):
                words = (ended.get("message") or ended.get("reason") or "").strip().splitlines()
                return f"{container['name']} ended with {ended['exitCode']}: {words[-1] if words else 'no message'}"
        if waiting := state.get("waiting"):
            return f"{container['name']}: {waiting.get('message') or waiting.get('reason')}"
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return str(scheduled.get("message", "not scheduled"))
    return "starting" if status.get("phase") in ("Pending", "Running") else str(status.get("phase", "unknown"))


def _print(rows: list[Object]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in ("pod", "role", "node", "address", "state", "restarts"):
        table.add_column(title, overflow="fold")
    for each in rows:
        state = "ready" if each["ready"] else "not ready"
        table.add_row(each["pod"], each["role"], each["node"], each["address"], state, str(each["restarts"]))
    console = Console(highlight=False)
    console.print(table)
    for each in rows:
        if each["why"]:
            console.print(f"{each['pod']}: {each['why']}", markup=False, style="red")
