"""kvops report: latencies and KV of a run or of journals."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvops.cli.options import json_option
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvops.journal.advice import Advice
    from kvops.journal.figures import Figures
    from kvops.journal.intervals import Estimate
    from kvops.journal.legs import Leg

    Compared = dict[str, dict[str, Estimate]]


@click.command(short_help="Show latencies and what KV did, of a bench run or of journals.")
@click.argument("sources", nargs=-1, metavar="[RUN|JOURNAL]...", type=click.Path(path_type=Path))
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write a page with plots here.")
@click.option("--compare", nargs=2, metavar="A B", help="Ratios of A to B: legs of the run, or two runs or journals.")
@json_option
def command(*, sources: tuple[Path, ...], html: Path | None, compare: tuple[str, str] | None, as_json: bool) -> None:
    """Show latencies with intervals, and what the KV of the requests did.

    RUN is a folder that kvops bench wrote. JOURNAL is a file or a folder of journals; several are joined, so give those
    of the router, of prefill and of decode together.

    \b
    Example:
      kvops report runs/2026-11-30 --html report.html
      kvops report runs/2026-11-30 --compare push pull
      kvops report --compare /var/log/kvops/monday /var/log/kvops/tuesday
    """
    from kvops.journal import text  # noqa: PLC0415
    from kvops.journal.figures import compare as compare_legs  # noqa: PLC0415
    from kvops.journal.figures import differences, figures  # noqa: PLC0415
    from kvops.journal.legs import legs_of_paths  # noqa: PLC0415

    if not sources and not compare:
        raise KvopsError("nothing to report on", "give a folder of kvops bench or of journals")
    legs = legs_of_paths(sources)
    pair = None
    if compare:
        pair = (_named(legs, compare[0]), _named(legs, compare[1]))
        legs += [leg for leg in pair if leg not in legs]
    found = [figures(leg) for leg in legs]
    compared = compare_legs(*pair) if pair else None
    if pair and not compared:
        raise KvopsError(f"{pair[0].name} and {pair[1].name} have no cell in common", "compare runs of one workload")
    notes = text.notes(found, differences(*pair) if pair else ())
    names = (pair[0].name, pair[1].name) if pair else None
    if html:
        from kvops.journal.page import page  # noqa: PLC0415

        _write_page(html, page(found, compared, names, remarks=notes, ttls=_ttls(legs)))
    if as_json:
        import msgspec  # noqa: PLC0415

        click.echo(msgspec.json.encode({"legs": found, "compared": compared, "notes": notes}).decode())
    else:
        _print(found, compared, names, notes)


def _named(legs: Sequence[Leg], name: str) -> Leg:
    """Return the leg called ``name``, or the one leg at the path ``name``.

    Raises:
        KvopsError: there is no such leg, or the path holds several.
    """
    from kvops.journal.legs import legs_of_paths  # noqa: PLC0415

    for leg in legs:
        if name == leg.name:
            return leg
    if not Path(name).exists():
        known = ", ".join(leg.name for leg in legs) or "none was given"
        raise KvopsError(f"no leg or path is called {name}", f"the legs are: {known}")
    found = legs_of_paths([Path(name)])
    if len(found) != 1:
        raise KvopsError(
            f"{name} has the legs {', '.join(leg.name for leg in found)}", "give the run and name two of its legs"
        )
    found[0].name = name
    return found[0]


def _ttls(legs: Sequence[Leg]) -> dict[str, Advice]:
    from kvops.journal import observations  # noqa: PLC0415
    from kvops.journal.advice import decoder_ttl  # noqa: PLC0415

    return {leg.name: decoder_ttl(observations.turns(leg.journal)) for leg in legs if leg.journal}


def _write_page(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise KvopsError(f"cannot write {path}: {error.strerror}", "give another file with --html") from None
    click.echo(f"wrote {path}, {path.stat().st_size / 1e3:.0f} kB", err=True)


def _print(
    found: list[Figures], compared: Compared | None, names: tuple[str, str] | None, notes: Sequence[str]
) -> None:
    from kvops.journal import text  # noqa: PLC0415

    for sentence in text.about(found):
        click.echo(sentence)
    for title, columns, rows in text.tables(found, compared, names):
        _print_table(title, columns, rows)
    for note in notes:
        click.echo(note, err=True)


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as it is wide: on a terminal cells fold, in a pipe every row stays one line."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=400)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()
