"""``kvops up``: from a topology to a fleet that is proven to move KV."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvops import tiny_model
from kvops.cli.options import json_option, name_option
from kvops.errors import KvopsError
from kvops.launch.plan import make_plan, without_secrets
from kvops.launch.rundir import RunDir, reserved_ports
from kvops.topology import PRESETS, Mode, load_topology

if TYPE_CHECKING:
    from rich.console import Console

    from kvops.cli.fleet_view import FleetView
    from kvops.launch.plan import Plan
    from kvops.launch.rundir import FleetState


@click.command()
@click.option("-f", "--file", type=click.Path(path_type=Path), help="A kvops.yaml; the preset alone if left out.")
@click.option("--mode", type=click.Choice([mode.value for mode in Mode]), help="How KV moves between P and D.")
@click.option("--prefill", type=int, metavar="N", help="Number of prefill engines.")
@click.option("--decode", type=int, metavar="M", help="Number of decode engines.")
@click.option("--model", help="Model id or folder.")
@click.option("--preset", type=click.Choice(PRESETS), help="What fits this machine if left out.")
@name_option
@click.option("-d", "--detach", is_flag=True, help="Return once the fleet is proven; it stays until 'kvops down'.")
@click.option("--dry-run", is_flag=True, help="Print the launch plan and start nothing.")
@json_option
@click.option("--force", is_flag=True, help="Start although the doctor's quick checks say that KV will not move.")
@click.option("--observe", is_flag=True, help="Start Prometheus (and Grafana where it is installed) beside the fleet.")
@click.option("--stock-connectors", is_flag=True, help="Use vLLM's own connectors instead of the instrumented ones.")
def command(
    *,
    file: Path | None,
    mode: str | None,
    prefill: int | None,
    decode: int | None,
    model: str | None,
    preset: str | None,
    name: str,
    detach: bool,
    dry_run: bool,
    as_json: bool,
    force: bool,
    observe: bool,
    stock_connectors: bool,
) -> None:
    """Start prefill and decode engines and a router, and prove that KV moves between them.

    \b
    Example:
      kvops up                                  1 prefill + 1 decode engine
      kvops up --decode 2 -d                    two decode engines, in the background
      kvops up --preset p5en --dry-run          the whole plan for a p5en, on any machine
      kvops up -f kvops.yaml --mode push
      kvops up --observe -d                     with Prometheus; kvops status shows its port
    """
    overrides = _overrides(mode=mode, model=model, prefill=prefill, decode=decode)
    if observe:
        overrides["observability"] = {"enabled": True}
    run_dir = RunDir(name)
    topology = load_topology(file, overrides, preset)
    plan = make_plan(
        topology, name=name, folder=run_dir.path, stock_connectors=stock_connectors, reserved=reserved_ports()
    )
    if dry_run:
        _print_plan(plan, as_json=as_json)
        return
    _refuse_what_cannot_run(plan, run_dir)
    if not force:
        _refuse_what_will_not_move_kv(plan)
    if topology.model == tiny_model.MODEL_NAME:
        tiny_model.ensure_model(Path(plan.model))
    if topology.observability.enabled:
        _prepare_observers(plan, run_dir)
    state = _run_detached(plan, run_dir, as_json=as_json) if detach else _run(plan, run_dir, as_json=as_json)
    if state.phase == "failed":
        click.echo(f"Error: {state.problem}", err=True)
        raise SystemExit(1)


def _overrides(*, mode: str | None, model: str | None, prefill: int | None, decode: int | None) -> dict[str, Any]:
    overrides: dict[str, Any] = {key: value for key, value in {"mode": mode, "model": model}.items() if value}
    for role, replicas in (("prefill", prefill), ("decode", decode)):
        if replicas is not None:
            overrides[role] = {"replicas": replicas}
    return overrides


def _prepare_observers(plan: Plan, run_dir: RunDir) -> None:
    from kvops.launch import observers  # noqa: PLC0415

    run_dir.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    observers.write_files(plan, run_dir.path)
    for sentence in observers.missing_advice(run_dir.path):
        click.echo(sentence, err=True)


def _refuse_what_cannot_run(plan: Plan, run_dir: RunDir) -> None:
    from kvops.launch.supervisor import already_running  # noqa: PLC0415

    if run_dir.is_running():
        raise already_running(run_dir.name)
    if elsewhere := [engine for engine in plan.engines if not engine.is_local()]:
        host = elsewhere[0].env["VLLM_NIXL_SIDE_CHANNEL_HOST"]
        raise KvopsError(
            f"{elsewhere[0].name} runs on {host}, which is no address of this machine",
            "kvops up starts processes here only; set hosts to this machine's address",
        )


def _refuse_what_will_not_move_kv(plan: Plan) -> None:
    import os  # noqa: PLC0415

    from kvops.doctor.check import State  # noqa: PLC0415
    from kvops.doctor.engines import Engine  # noqa: PLC0415
    from kvops.doctor.run import run_quick  # noqa: PLC0415

    report = run_quick([Engine(engine.name, engine.argv, os.environ | engine.env) for engine in plan.engines])
    causes = [result for result in report.causes if result.state is State.FAIL]
    if causes:
        found = "\n".join(f"{cause.check.id}: {cause.finding.message}; {cause.fix}" for cause in causes)
        raise KvopsError(
            f"KV will not move as planned:\n{found}\nkvops doctor shows the evidence", "mend it, or use --force"
        )


def _run(plan: Plan, run_dir: RunDir, *, as_json: bool) -> FleetState:
    from kvops.cli.fleet_view import FleetView  # noqa: PLC0415
    from kvops.launch.supervisor import Supervisor  # noqa: PLC0415

    printed = False

    def show(state: FleetState) -> None:
        nonlocal printed
        view(state)
        if as_json and not printed and state.phase in ("ready", "failed"):
            _print_state(state)
            printed = True

    with FleetView(_console(as_json=as_json)) as view:
        return asyncio.run(Supervisor(plan, run_dir, show).run())


def _run_detached(plan: Plan, run_dir: RunDir, *, as_json: bool) -> FleetState:
    import msgspec  # noqa: PLC0415

    from kvops.cli.fleet_view import FleetView  # noqa: PLC0415

    run_dir.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    own_log = run_dir.path / "supervisor.log"
    with own_log.open("wb") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "kvops.launch.supervisor", run_dir.name],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    if supervisor.stdin:
        supervisor.stdin.write(msgspec.json.encode(plan))
        supervisor.stdin.close()
    with FleetView(_console(as_json=as_json)) as view:
        state = _follow(run_dir, supervisor, view)
    if as_json:
        _print_state(state)
    return state


def _follow(run_dir: RunDir, supervisor: subprocess.Popen[bytes], view: FleetView) -> FleetState:
    """Show the detached supervisor's state until its fleet is ready or it has ended, and return that state.

    Raises:
        KvopsError: the supervisor ended without a state of its own.
    """
    while True:
        ended = supervisor.poll() is not None
        state = run_dir.read_state()
        if state is not None and state.supervisor_pid == supervisor.pid:
            view(state)
            if state.phase == "ready" or ended:
                return state
        elif ended:
            log = (run_dir.path / "supervisor.log").read_text(errors="replace").strip()
            raise KvopsError(f"the supervisor ended at once: {log.splitlines()[-1] if log else 'it wrote nothing'}")
        time.sleep(0.2)


def _console(*, as_json: bool) -> Console:
    from rich.console import Console  # noqa: PLC0415

    # With --json standard output holds the JSON alone.
    return Console(stderr=as_json)


def _print_state(state: FleetState) -> None:
    import msgspec  # noqa: PLC0415

    click.echo(msgspec.json.encode(state).decode())


def _print_plan(plan: Plan, *, as_json: bool) -> None:
    plan = without_secrets(plan)
    if as_json:
        import msgspec  # noqa: PLC0415

        click.echo(msgspec.json.format(msgspec.json.encode(plan)).decode())
        return
    import shlex  # noqa: PLC0415

    click.echo(f"fleet {plan.name}: {plan.served_model_name}, mode {plan.mode}, preset {plan.preset}")
    for process in plan.processes:
        click.echo(f"\n{process.name}  {process.url}")
        if process.devices:
            click.echo(f"  devices        {', '.join(map(str, process.devices))}")
        if process.side_channel_ports:
            host = process.env["VLLM_NIXL_SIDE_CHANNEL_HOST"]
            ports = ", ".join(map(str, process.side_channel_ports))
            click.echo(f"  side channel   {host} port {ports}")
        if process.engine_id:
            click.echo(f"  engine id      {process.engine_id}")
        click.echo(f"  log            {process.log_file}")
        for key, value in sorted(process.env.items()):
            click.echo(f"  env            {key}={shlex.quote(value)}")
        click.echo(f"  command        {shlex.join(process.argv)}")
