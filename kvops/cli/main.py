"""The ``kvops`` command: a group that imports a verb's module only when that verb runs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import click

from kvops import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

# Verb -> the line that `kvops --help` shows. Kept here so that the help needs no verb's imports.
VERBS = {
    "up": "Start prefill and decode engines and a router, and prove that KV moves.",
    "down": "Stop a fleet and everything it started.",
    "status": "Show the processes of a fleet and their state.",
    "logs": "Show what the processes of a fleet wrote.",
    "doctor": "Check that this host will really move KV by RDMA.",
    "probe": "Move real bytes between two NIXL agents, check them, and say how fast.",
    "top": "Watch the engines of a fleet: requests, KV cache, where tokens come from, waits.",
    "trace": "Show what happened to a request on the router, on prefill and on decode.",
    "runbook": "Show what an alert means, how to find its cause, and what to do.",
    "dashboards": "Generate, push, provision and check the Grafana dashboards and Prometheus rules.",
    "bench": "Measure fleets under single requests or growing conversations, in turns.",
    "report": "Show latencies and what KV did, of a bench run or of journals.",
    "advise": "Say which mode, threshold and TTL fit, from what was measured.",
    "render": "Write the fleet as Kubernetes manifests, as a Slurm batch script or as a compose file.",
    "collect": "Bring the journals of a cluster's pods, or of run folders, into one folder, redacted.",
    "router": "Run the reference router in front of engines that are already up.",
}


class VerbGroup(click.Group):
    """A click group whose commands live in ``kvops.cli.<verb>.command``."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the verbs in the order in which a user meets them."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Return the command of one verb, importing its module; None for an unknown verb."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"kvops.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of verbs from ``VERBS``."""
        rows: Iterable[tuple[str, str]] = VERBS.items()
        with formatter.section("Commands"):
            formatter.write_dl(list(rows))


@click.group(cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, package_name="kvops", message="kvops %(version)s")
def main() -> None:
    """Run, check and trace a disaggregated vLLM fleet that moves its KV cache over NIXL.

    \b
    Example:
      kvops up                 start 1 prefill + 1 decode engine, the router, and a canary
      kvops up -d && kvops status
    """


if __name__ == "__main__":
    main()
