"""``kvops runbook``: what to do about an alert."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, BinaryIO

import click

from kvops.cli.options import json_option
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from kvops.runbooks import Page


@click.command()
@click.argument("alert", required=False)
@click.option("--list", "list_all", is_flag=True, help="List all pages.")
@click.option("--search", metavar="WORDS", help="List the pages that hold all WORDS, best first.")
@click.option(
    "--for-alert-json",
    "payload",
    type=click.File("rb"),
    help="Show the pages of an Alertmanager webhook payload, most severe first, its labels filled into the queries.",
)
@json_option
def command(*, alert: str | None, list_all: bool, search: str | None, payload: BinaryIO | None, as_json: bool) -> None:
    """Show what an alert means, how to find its cause, and what to do.

    \b
    Example:
      kvops runbook KvopsTransferStuck
      kvops runbook --search "slow first token"
      curl -s http://alertmanager/... | kvops runbook --for-alert-json -
    """
    from kvops import runbooks  # noqa: PLC0415

    if sum(choice is not None for choice in (alert, search, payload)) + list_all != 1:
        raise KvopsError("nothing or several things to show", "give one of ALERT, --list, --search, --for-alert-json")
    if alert is not None:
        _show([(runbooks.find(alert), {})], as_json=as_json)
    elif payload is not None:
        _show_firing(payload.read(), as_json=as_json)
    else:
        found = list(runbooks.pages().values()) if search is None else runbooks.search(search)
        _table(found, as_json=as_json)
        if not found:
            raise SystemExit(1)


def _show_firing(payload: bytes, *, as_json: bool) -> None:
    from kvops import runbooks  # noqa: PLC0415

    shown: list[tuple[Page, dict[str, str]]] = []
    for alert, page in runbooks.firing(payload):
        if page is None:
            click.echo(f"no runbook for {alert.labels.get('alertname', 'an alert without a name')!r}", err=True)
        else:
            shown.append((runbooks.with_labels(page, alert.labels), alert.labels))
    _show(shown, as_json=as_json)
    if not shown:
        raise SystemExit(1)


def _show(shown: list[tuple[Page, dict[str, str]]], *, as_json: bool) -> None:
    from kvops.runbooks import as_dict  # noqa: PLC0415

    if as_json:
        click.echo(json.dumps([as_dict(page, labels) for page, labels in shown], indent=2))
        return
    for page, labels in shown:
        text = _labels_line(labels) + page.text
        if not sys.stdout.isatty():
            click.echo(text)
            continue
        from rich.console import Console  # noqa: PLC0415
        from rich.markdown import Markdown  # noqa: PLC0415

        Console().print(Markdown(text, code_theme="ansi_dark"))


def _labels_line(labels: dict[str, str]) -> str:
    parts = ", ".join(f"`{name}={value}`" for name, value in sorted(labels.items()) if name != "alertname")
    return f"{parts}\n\n" if parts else ""


def _table(pages: list[Page], *, as_json: bool) -> None:
    if as_json:
        rows = [
            {"name": page.name, "severity": page.severity, "symptom": page.facts.get("symptom", "")} for page in pages
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    if not pages:
        click.echo("no page holds all these words; kvops runbook --list shows all", err=True)
        return
    if not sys.stdout.isatty():
        for page in pages:
            click.echo(f"{page.name}\t{page.severity}\t{page.facts.get('symptom', page.title)}")
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None)
    table.add_column("page", no_wrap=True)
    table.add_column("severity")
    table.add_column("what people report")
    for page in pages:
        table.add_row(page.name, page.severity, page.facts.get("symptom", page.title))
    Console().print(table)
