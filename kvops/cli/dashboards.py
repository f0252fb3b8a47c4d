"""``kvops dashboards``: generate, push, provision and check the Grafana dashboards and Prometheus rules."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvops.cli.options import json_option
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from kvops_dashboards.checking import Answer
    from kvops_dashboards.grafana_api import Change


def _published(_: click.Context, __: click.Parameter, url: str) -> str:
    if url and not re.fullmatch(r"https?://[^\s\"'\\()]+", url):
        raise KvopsError(f"--runbook-url {url!r} is no address", "write it as https://wiki.example.com/runbooks")
    return url


runbook_url_option = click.option(
    "--runbook-url",
    default="",
    metavar="URL",
    callback=_published,
    help="Where you publish the folder runbooks/: panels and alerts link URL/NAME.md. Without it they name the command "
    "that shows the page, 'kvops runbook NAME'.",
)


@click.group()
def command() -> None:
    """Grafana dashboards and Prometheus rules of a fleet.

    \b
    Example:
      kvops dashboards provision ./observe && docker compose --project-directory ./observe up
      kvops dashboards check --prometheus http://127.0.0.1:9090
    """


@command.command()
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default="dashboards", show_default=True, help="Folder."
)
@runbook_url_option
@json_option
def generate(*, output: Path, runbook_url: str, as_json: bool) -> None:
    """Write the dashboards as Grafana's JSON, one file each.

    \b
    Example:
      kvops dashboards generate -o ./dashboards
    """
    from kvops_dashboards import stored  # noqa: PLC0415

    files = []
    try:
        output.mkdir(parents=True, exist_ok=True)
        for uid, board in stored.dashboards(runbook_url).items():
            files.append(output / f"{uid}.json")
            files[-1].write_text(json.dumps(board, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise _cannot_write(output, error) from None
    _print_files(files, as_json=as_json)


@command.command()
@click.option("--url", required=True, help="Base URL of Grafana.")
@click.option(
    "--token-file",
    required=True,
    type=click.Path(path_type=Path),
    help="File with a service account's token; it is never taken from the command line, which others can read.",
)
@click.option("--folder", default="kvops", show_default=True, help="Folder in Grafana; made if it is not there.")
@click.option("--dry-run", is_flag=True, help="Show what would change and change nothing.")
@runbook_url_option
@json_option
def push(*, url: str, token_file: Path, folder: str, dry_run: bool, runbook_url: str, as_json: bool) -> None:
    """Put the dashboards into a running Grafana; those that are the same there are left alone.

    \b
    Example:
      kvops dashboards push --url https://grafana.example.com --token-file token --dry-run
    """
    from kvops_dashboards import stored  # noqa: PLC0415
    from kvops_dashboards.grafana_api import Grafana  # noqa: PLC0415

    token = _read_token(token_file)

    async def run() -> list[Change]:
        async with Grafana(url, token, folder) as grafana:
            return await grafana.push(stored.dashboards(runbook_url), dry_run=dry_run)

    changes = asyncio.run(run())
    if as_json:
        click.echo(json.dumps([asdict(change) for change in changes], indent=2))
        return
    for change in changes:
        click.echo(f"{change.uid}: {'would ' if dry_run and change.action != 'unchanged' else ''}{change.action}")
        if dry_run and change.diff:
            click.echo(change.diff)


@command.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--prefill", multiple=True, metavar="HOST:PORT", help="A prefill engine to scrape; may be repeated.")
@click.option("--decode", multiple=True, metavar="HOST:PORT", help="A decode engine to scrape; may be repeated.")
@click.option("--router", multiple=True, metavar="HOST:PORT", help="A router to scrape; may be repeated.")
@runbook_url_option
@json_option
def provision(
    *,
    folder: Path,
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    router: tuple[str, ...],
    runbook_url: str,
    as_json: bool,
) -> None:
    """Write the files that Grafana, Prometheus, docker compose and kube-prometheus take.

    Without addresses it is the fleet that 'kvops up' starts on free default ports.

    \b
    Example:
      kvops dashboards provision ./observe --prefill 10.0.0.1:8100 --decode 10.0.0.2:8200 --router 10.0.0.1:8000
    """
    from kvops_dashboards.provision import write_provisioning  # noqa: PLC0415
    from kvops_dashboards.scraping import Target  # noqa: PLC0415

    if not (prefill or decode or router):
        prefill, decode, router = ("127.0.0.1:8100",), ("127.0.0.1:8200",), ("127.0.0.1:8000",)
    engines = [Target(_address(each), {"role": "prefill"}) for each in prefill]
    engines += [Target(_address(each), {"role": "decode"}) for each in decode]
    try:
        routers = [Target(_address(each)) for each in router]
        files = write_provisioning(folder, engines, routers, runbook_url=runbook_url)
    except OSError as error:
        raise _cannot_write(folder, error) from None
    _print_files(files, as_json=as_json)


@command.command()
@click.option("--prometheus", "url", required=True, help="Base URL of Prometheus.")
@click.option("--window", type=click.IntRange(60, 7 * 86400), default=3600, show_default=True, help="Seconds back.")
@click.option("--rate-window", default="1m", show_default=True, help="Range of rates; four scrape intervals or more.")
@json_option
def check(*, url: str, window: int, rate_window: str, as_json: bool) -> None:
    """Run every query of every panel and rule, and list those without data.

    A quiet alert counts as having data when every metric that it names has some. Exit status 1 if any query has no
    data or fails.

    \b
    Example:
      kvops dashboards check --prometheus http://127.0.0.1:9090
    """
    from kvops_dashboards.checking import check as run_check  # noqa: PLC0415

    if not re.fullmatch(r"\d+[smh]", rate_window):
        raise KvopsError(f"--rate-window {rate_window!r} is no duration", "write it as 30s, 5m or 1h")
    answers = asyncio.run(run_check(url.rstrip("/"), window_seconds=window, rate_window=rate_window))
    if as_json:
        click.echo(json.dumps([asdict(answer) for answer in answers], indent=2))
    else:
        _print_answers(answers)
    if any(answer.state != "data" for answer in answers):
        raise SystemExit(1)


def _print_answers(answers: list[Answer]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console()
    bad = [answer for answer in answers if answer.state != "data"]
    if bad:
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        for column in ("where", "panel or rule", "state", "query"):
            table.add_column(column, overflow="fold")
        for answer in bad:
            style = "red" if answer.state == "error" else "yellow"
            detail = answer.message or answer.expr
            table.add_row(Text(answer.source), Text(answer.title), Text(answer.state, style=style), Text(detail))
        console.print(table)
    console.print(f"{len(answers) - len(bad)} of {len(answers)} queries have data", highlight=False)


def _read_token(file: Path) -> str:
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise KvopsError(f"cannot read {file}: {error}", "write the token of a Grafana service account to it") from None
    if not token or any(character.isspace() for character in token):
        raise KvopsError(f"{file} does not hold one token", "write the token of a Grafana service account to it")
    return token


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or "/" in text:
        raise KvopsError(f"{text!r} is no HOST:PORT", "write it as 10.0.0.1:8100, without http://")
    return text


def _cannot_write(folder: Path, error: OSError) -> KvopsError:
    return KvopsError(f"cannot write to {folder}: {error.strerror}", "give a folder that you may write to")


def _print_files(files: list[Path], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([str(file) for file in files], indent=2))
        return
    for file in files:
        click.echo(file)
