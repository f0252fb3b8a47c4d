"""``kvops status``: the fleets of this user and the state of their processes."""

from __future__ import annotations

import click
import msgspec

from kvops.cli.options import json_option
from kvops.errors import KvopsError
from kvops.launch.rundir import FleetState, RunDir, known_names


@click.command()
@click.option("--name", help="One fleet; all if left out.")
@click.option("--kubernetes", "in_cluster", is_flag=True, help="The fleet's pods, through kubectl.")
@click.option("--namespace", default="kvops", show_default=True, help="With --kubernetes: the fleet's namespace.")
@json_option
def command(*, name: str | None, in_cluster: bool, namespace: str, as_json: bool) -> None:
    """Show the processes of each fleet and their state.

    Exit status 0 if every fleet shown is ready, 1 if one is not.

    \b
    Example:
      kvops status
      kvops status --name default --json
      kvops status --kubernetes
    """
    if in_cluster:
        from kvops.cli.pods_view import show_pods  # noqa: PLC0415

        raise SystemExit(0 if show_pods(namespace, as_json=as_json) else 1)
    states = [state for each in ([name] if name else known_names()) if (state := _read(each))]
    if not states:
        raise KvopsError(f"no fleet named {name} was started here" if name else "no fleet was started here", "kvops up")
    if as_json:
        click.echo(msgspec.json.encode(states).decode())
    else:
        _print(states)
    if any(state.phase != "ready" for state in states):
        raise SystemExit(1)


def _read(name: str) -> FleetState | None:
    run_dir = RunDir(name)
    state = run_dir.read_state()
    if state and state.phase not in ("stopped", "failed") and not run_dir.is_running():
        state.phase = "stale"
        state.problem = f"its supervisor is gone; 'kvops down --name {name}' ends what it left"
    return state


def _print(states: list[FleetState]) -> None:
    from rich.console import Console  # noqa: PLC0415

    from kvops.cli.fleet_view import fleet_table  # noqa: PLC0415

    console = Console()
    for index, state in enumerate(states):
        if index:
            console.print()
        console.print(fleet_table(state))
        if state.problem:
            console.print(state.problem, style="red", markup=False, highlight=False)
