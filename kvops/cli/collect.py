"""``kvops collect``: journals from a cluster's pods or a local run, redacted, in one folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvops.cli.options import json_option, name_option
from kvops.errors import KvopsError
from kvops.launch.rundir import RunDir

if TYPE_CHECKING:
    from kvops.journal.collect import Collected


@click.command()
@click.option("--kubernetes", "from_cluster", is_flag=True, help="From the fleet's pods, through kubectl.")
@click.option("--namespace", default="kvops", show_default=True, help="Namespace of the fleet.")
@name_option
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, metavar="DIR", help="New folder.")
@json_option
def command(*, from_cluster: bool, namespace: str, name: str, output: Path, as_json: bool) -> None:
    """Bring the journals of all engines and routers into one folder, without addresses, host names and secrets.

    Exit status 1 if a pod could not be read; what the others had is kept.

    \b
    Example:
      kvops collect --kubernetes -o monday && kvops trace --journal monday --slowest 5
      kvops collect --name demo -o monday
    """
    failures: list[str] = []
    result = _from_pods(output, namespace, failures) if from_cluster else _from_run(output, name)
    if as_json:
        shown: dict[str, Any] = {"lines": result.lines, "unreadable": result.unreadable, "files": result.files}
        click.echo(json.dumps(shown | {"failures": failures}))
    else:
        click.echo(f"{output}: {result.lines} lines in {len(result.files)} files; kvops trace --journal {output}")
        if result.unreadable:
            click.echo(f"{result.unreadable} lines were no JSON and were left out", err=True)
    for failure in failures:
        click.echo(failure, err=True)
    if failures:
        raise SystemExit(1)


def _from_run(output: Path, name: str) -> Collected:
    from kvops.journal.collect import Collector, from_folder  # noqa: PLC0415

    collector = Collector(output)
    from_folder(collector, RunDir(name).journal_dir)
    return collector.result


def _from_pods(output: Path, namespace: str, failures: list[str]) -> Collected:
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    from kvops import kubectl  # noqa: PLC0415
    from kvops.journal.collect import Collector, from_pod  # noqa: PLC0415

    pods = kubectl.fleet_pods(namespace)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("", total=len(pods))
        collector = Collector(output)
        for pod in pods:
            progress.update(task, description=str(pod["metadata"]["name"]))
            try:
                from_pod(collector, namespace, pod)
            except KvopsError as error:
                failures.append(str(error))
            progress.advance(task)
    return collector.result
