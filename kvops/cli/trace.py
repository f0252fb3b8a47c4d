"""``kvops trace``: what happened to a request on the router, on prefill and on decode."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvops.cli.options import json_option, name_option
from kvops.errors import KvopsError
from kvops.launch.rundir import RunDir

if TYPE_CHECKING:
    from kvops.journal.reading import Lines
    from kvops.journal.requests import Request


@click.command()
@click.argument("request_id", required=False)
@click.option("--conversation", metavar="HASH", help="All turns of a conversation, by the hash that trace shows.")
@click.option("--slowest", type=click.IntRange(1, 1000), metavar="N", help="The N that waited longest for a token.")
@click.option("--failed", is_flag=True, help="All that did not end well, or whose KV was lost.")
@name_option
@click.option("--journal", type=click.Path(path_type=Path), help="A folder of journals instead of the fleet's.")
@json_option
def command(
    *,
    request_id: str | None,
    conversation: str | None,
    slowest: int | None,
    failed: bool,
    name: str,
    journal: Path | None,
    as_json: bool,
) -> None:
    """Join what router, prefill and decode wrote about a request into one timeline.

    REQUEST_ID is the client's X-Request-Id, the router's id of an attempt, or vLLM's own id. Exit status 1 if a request
    shown did not end well.

    \b
    Example:
      kvops trace 6f1d3c0c9a3e4a51b0a5b7a5a2f0c9de
      kvops trace --slowest 5
      kvops trace --failed --json
    """
    from kvops.journal.reading import Lines  # noqa: PLC0415

    if sum(bool(choice) for choice in (request_id, conversation, slowest, failed)) != 1:
        raise KvopsError(
            "nothing or several things to trace", "give one of REQUEST_ID, --conversation, --slowest, --failed"
        )
    folder = journal or RunDir(name).journal_dir
    lines = Lines(folder)
    requests = _find(lines, request_id=request_id, conversation=conversation, slowest=slowest)
    if not requests and not failed:
        raise KvopsError(
            f"no line in {folder} is about {request_id or conversation or 'a finished request'}", "check the id"
        )
    if as_json:
        _print_json(requests)
    else:
        _print(requests, table=request_id is None)
    if lines.unreadable:
        click.echo(f"{lines.unreadable} lines could not be read and were skipped", err=True)
    if any(request.outcome != "ok" for request in requests):
        raise SystemExit(1)


def _find(lines: Lines, *, request_id: str | None, conversation: str | None, slowest: int | None) -> list[Request]:
    from kvops.journal import requests  # noqa: PLC0415

    if request_id:
        return requests.find_by_id(lines, request_id)
    if conversation:
        return requests.find_by_conversation(lines, conversation)
    return requests.find_slowest(lines, slowest) if slowest else requests.find_failed(lines)


def _print(requests: list[Request], *, table: bool) -> None:
    from rich.console import Console  # noqa: PLC0415

    from kvops.cli.trace_view import request_view, requests_table  # noqa: PLC0415

    console = Console(highlight=False)
    if not requests:
        console.print("no request failed")
    elif table:
        console.print(requests_table(requests))
        console.print("\nkvops trace REQUEST shows one of them", style="dim")
    else:
        for request in requests:
            console.print(request_view(request))


def _print_json(requests: list[Request]) -> None:
    import msgspec  # noqa: PLC0415

    rows = [
        {
            "legs": sorted(request.legs),
            "began": request.began,
            "mode": request.mode,
            "outcome": request.outcome,
            "conversation": request.conversation,
            "turn": request.turn,
            "seconds_to_first_token": request.seconds_to_first_token,
            "spans": [span._asdict() for span in request.spans()],
            "router": request.router,
            "records": request.records,
            "holds": request.holds,
        }
        for request in requests
    ]
    click.echo(msgspec.json.encode(rows).decode())
