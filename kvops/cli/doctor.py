"""``kvops doctor``: will this host really move KV by RDMA?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvops.doctor.run import Report

WATCH_SECONDS = 5.0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--snapshot", type=click.Path(path_type=Path), help="Judge a captured machine instead of this one.")
@click.option("--instance-type", default="", metavar="TYPE", help="Expect this EC2 type, whatever the machine says.")
@click.option("--only", multiple=True, metavar="GROUP|ID", help="Run only these checks; may be repeated.")
@click.option("--skip", multiple=True, metavar="GROUP|ID", help="Leave these checks out; may be repeated.")
@click.option("-v", "--verbose", is_flag=True, help="Show every check, not only what is wrong.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(  # noqa: PLR0917 - click passes by name
    snapshot: Path | None, instance_type: str, only: Sequence[str], skip: Sequence[str], verbose: bool, as_json: bool
) -> None:
    r"""Check that KV will move by RDMA: EFA, GPUDirect, Neuron, libfabric, NIXL, UCX, vLLM and the network.

    \b
    Example:
      kvops doctor                                  this machine
      kvops doctor --snapshot node7.tar.gz          a machine that somebody captured
    """
    from kvops.doctor.facts import Facts  # noqa: PLC0415
    from kvops.doctor.run import live_host, run, select  # noqa: PLC0415
    from kvops.doctor.snapshot import load  # noqa: PLC0415

    checks = select(only, skip)
    host = load(snapshot) if snapshot else live_host()
    report = run(Facts(host, instance_type=instance_type), checks)
    show(report, verbose=verbose, as_json=as_json)
    sys.exit(report.exit_status)


def show(report: Report, *, verbose: bool, as_json: bool) -> None:
    """Print a report in the form that was asked for."""
    from kvops.doctor import report as writers  # noqa: PLC0415

    if as_json:
        click.echo(json.dumps(writers.as_json(report), indent=2))
    else:
        writers.write_text(report, terminal=sys.stdout.isatty(), verbose=verbose)
