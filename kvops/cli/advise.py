"""kvops advise: settings from what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvops.cli.options import json_option
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from kvops.journal.advice import Advice


@click.command(short_help="Say which mode, threshold and TTL fit, from what was measured.")
@click.argument("sources", nargs=-1, metavar="[RUN|JOURNAL]...", type=click.Path(path_type=Path))
@click.option("--journal", type=click.Path(path_type=Path), help="A file or folder of journals; the same as JOURNAL.")
@click.option("--prometheus", metavar="URL", help="A Prometheus server instead: averages only.")
@click.option("--patch", "as_patch", is_flag=True, help="Print only what to change in kvops.yaml.")
@json_option
def command(
    *, sources: tuple[Path, ...], journal: Path | None, prometheus: str | None, as_patch: bool, as_json: bool
) -> None:
    """Say which mode, threshold, TTL, lease, block size and P:D ratio fit, each with its reason.

    RUN is a folder that kvops bench wrote; with legs of several modes the mode comes from comparing them. JOURNAL is a
    file or a folder of journals; give those of the router, prefill and decode together. Exit status 1 if nothing could
    be said for want of data.

    \b
    Example:
      kvops advise /var/log/kvops
      kvops advise runs/2026-11-30 --patch > patch.yaml
      kvops advise --prometheus http://127.0.0.1:9090 --json
    """
    paths = [*sources, *([journal] if journal else [])]
    if bool(paths) == bool(prometheus):
        raise KvopsError("nothing or two things to learn from", "give a RUN or JOURNAL, or --prometheus URL")
    if as_patch and as_json:
        raise KvopsError("--json and --patch exclude each other", "--json holds the patch, too")
    advice = _from_prometheus(prometheus) if prometheus else _from_journals(paths)
    _print(advice, as_patch=as_patch, as_json=as_json)
    if all(one.missing and not one.reason for one in advice):
        raise SystemExit(1)


def _from_prometheus(url: str) -> list[Advice]:
    from kvops.journal.prometheus import advise  # noqa: PLC0415

    return advise(url)


def _from_journals(paths: list[Path]) -> list[Advice]:
    from kvops.journal.advice import advise  # noqa: PLC0415
    from kvops.journal.legs import legs_of_paths  # noqa: PLC0415

    return advise(legs_of_paths(paths))


def _print(advice: list[Advice], *, as_patch: bool, as_json: bool) -> None:
    from kvops.journal.advice import patch  # noqa: PLC0415

    changes = patch(advice)
    if as_json:
        import msgspec  # noqa: PLC0415

        click.echo(msgspec.json.encode({"advice": advice, "patch": changes}).decode())
    elif as_patch:
        import yaml  # noqa: PLC0415

        click.echo(yaml.safe_dump(changes, sort_keys=False) if changes else "# nothing to change", nl=False)
    else:
        for one in advice:
            _print_one(one)


def _print_one(advice: Advice) -> None:
    value = "" if advice.value is None else f": {advice.value}"
    click.secho(f"{advice.topic}{value}", bold=True)
    if advice.reason:
        click.echo(f"  {advice.reason}")
    if advice.missing:
        click.echo(f"  not enough data: needs {advice.missing}")
    if advice.curve:
        click.echo("       TTL s   tokens reused   block-seconds")
    for point in advice.curve:
        mark = "->" if point.ttl_seconds == advice.value else "  "
        click.echo(f"  {mark} {point.ttl_seconds:7}  {point.reused_tokens:14,}  {point.block_seconds:14,.0f}")
