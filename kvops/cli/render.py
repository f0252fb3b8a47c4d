"""``kvops render``: the fleet for those who run it, Kubernetes, Slurm or compose."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvops.errors import KvopsError
from kvops.topology import PRESETS, Mode, Topology, load_topology

if TYPE_CHECKING:
    from collections.abc import Callable


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Write the fleet of a kvops.yaml for another launcher. Nothing is started and no cluster is asked.

    \b
    Example:
      kvops render kubernetes -f kvops.yaml -o manifests && kubectl apply -f manifests
      kvops render slurm -f kvops.yaml -o . && sbatch kvops.sbatch
      kvops render compose -f kvops.yaml -o fleet && docker compose --project-directory fleet up -d
    """


def _options(function: Callable[..., None]) -> Callable[..., None]:
    path = click.Path(path_type=Path)
    for option in (
        click.option(
            "-o", "--output", type=path, metavar="DIR", help="Folder to write to; standard output if left out."
        ),
        click.option("--mode", type=click.Choice([mode.value for mode in Mode]), help="How KV moves between P and D."),
        click.option("--preset", type=click.Choice(PRESETS), help="The file's if left out."),
        click.option("-f", "--file", type=path, required=True, help="The fleet's kvops.yaml."),
    ):
        function = option(function)
    return function


@command.command()
@click.option("--helm", is_flag=True, help="Write a Helm chart instead; needs -o.")
@_options
def kubernetes(*, file: Path, preset: str | None, mode: str | None, output: Path | None, helm: bool) -> None:
    """Write Kubernetes manifests: engines, router, services, policies, monitor.

    An engine on one node becomes a StatefulSet, one that spans nodes a LeaderWorkerSet. `kubernetes.image` must be set.

    \b
    Example:
      kvops render kubernetes -f kvops.yaml -o manifests
      kvops render kubernetes -f kvops.yaml --helm -o chart && helm install kvops ./chart -n kvops --create-namespace
    """
    from kvops.launch import helm as chart  # noqa: PLC0415
    from kvops.launch import kubernetes as manifests  # noqa: PLC0415

    if helm and output is None:
        raise KvopsError("a chart is a folder of files", "name the folder with -o")
    _write((chart if helm else manifests).render(_load(file, preset, mode)), output)


@command.command()
@_options
def slurm(*, file: Path, preset: str | None, mode: str | None, output: Path | None) -> None:
    """Write a batch script that takes a node for each engine and runs the router on the first.

    \b
    Example:
      kvops render slurm -f kvops.yaml -o . && sbatch kvops.sbatch
    """
    from kvops.launch.slurm import render  # noqa: PLC0415

    _write(render(_load(file, preset, mode)), output)


@command.command()
@_options
def compose(*, file: Path, preset: str | None, mode: str | None, output: Path | None) -> None:
    """Write a docker compose project for one GPU host: engines, router, Prometheus and Grafana.

    `compose.image` must be set. Everything listens on loopback unless `router.host` says otherwise.

    \b
    Example:
      kvops render compose -f kvops.yaml -o fleet && docker compose --project-directory fleet up -d
    """
    from kvops.launch.compose import render  # noqa: PLC0415

    _write(render(_load(file, preset, mode)), output)


def _load(file: Path, preset: str | None, mode: str | None) -> Topology:
    return load_topology(file, {"mode": mode} if mode else None, preset)


def _write(files: dict[str, str], folder: Path | None) -> None:
    if folder is None:
        click.echo("".join(files.values()), nl=False)
        return
    try:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    except OSError as error:
        raise KvopsError(
            f"cannot write to {folder}: {error.strerror}", "choose a folder that you may write to"
        ) from None
    for name in files:
        click.echo(folder / name)
