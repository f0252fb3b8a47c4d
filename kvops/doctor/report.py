"""Writers: one report as text for a terminal or a pipe, as JSON, or as JUnit XML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvops import __version__
from kvops.doctor.check import State
from kvops.doctor.sources import url

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvops.doctor.check import Check
    from kvops.doctor.run import Report, Result

SCHEMA = 1
STYLES = {
    State.PASS: "green",
    State.WARN: "yellow",
    State.FAIL: "bold red",
    State.UNKNOWN: "magenta",
    State.SKIP: "dim",
}
ORDER = (State.FAIL, State.WARN, State.UNKNOWN, State.PASS, State.SKIP)
# Of the checks without evidence, as many as fit two lines are named.
MANY = 10
WORDS = {
    State.FAIL: "failed",
    State.WARN: "warned",
    State.UNKNOWN: "unknown",
    State.PASS: "passed",
    State.SKIP: "skipped",
}


class Row(NamedTuple):
    """One line of the report: a short label, the text beside it, and a style for the label."""

    label: str
    text: str
    style: str = "dim"


def rows(report: Report, *, verbose: bool = False) -> Iterator[Row]:
    """Yield the lines: causes with what they explain, then one line a group, then the verdict."""
    yield Row("host", f"{report.instance_type or 'unknown instance type'} ({report.host})")
    for problem in report.problems:
        yield Row("note", problem, "yellow")
    for cause in report.causes:
        yield Row("", "")
        yield from _cause_rows(report, cause)
    yield Row("", "")
    if verbose:
        yield from _every_result(report)
    else:
        yield from _group_rows(report)
    yield Row("", "")
    hint = "" if verbose else " (-v shows each check)"
    yield Row("verdict", _verdict(report) + hint, STYLES[_overall(report)])


def _cause_rows(report: Report, cause: Result) -> Iterator[Row]:
    yield Row(cause.state.upper(), f"{cause.check.id}  {cause.finding.message}", STYLES[cause.state])
    if cause.finding.evidence:
        yield Row("evidence", cause.finding.evidence)
    if cause.fix:
        yield Row("fix", cause.fix)
    yield Row("source", "  ".join(url(key) for key in cause.check.sources[:2]))
    others = report.consequences(cause)
    if others:
        yield Row("explains", f"{len(others)} other{'s' if len(others) > 1 else ''}:")
    for other in others:
        yield Row("", f"{other.state:<7} {other.check.id}  {other.finding.message}")


def _group_rows(report: Report) -> Iterator[Row]:
    for group in dict.fromkeys(result.check.group for result in report.results):
        states = [result.state for result in report.results if result.check.group == group]
        counts = [f"{states.count(state)} {WORDS[state]}" for state in ORDER if state in states]
        worst = next(state for state in ORDER if state in states)
        yield Row(group, ", ".join(counts), STYLES[worst])
    unknown = [result.check.id for result in report.results if result.state is State.UNKNOWN]
    if unknown:
        more = f" and {len(unknown) - MANY}" if len(unknown) > MANY else ""
        yield Row("", "")
        yield Row("unknown", f"no evidence for {', '.join(unknown[:MANY])}{more}: -v says why", STYLES[State.UNKNOWN])


def _every_result(report: Report) -> Iterator[Row]:
    group = ""
    for result in report.results:
        if result.check.group != group:
            group = result.check.group
            yield Row(group, "", "bold")
        yield Row(result.state, f"{result.check.id}  {result.finding.message}", STYLES[result.state])


def _overall(report: Report) -> State:
    return {0: State.PASS, 1: State.FAIL, 2: State.UNKNOWN}[report.exit_status]


def _verdict(report: Report) -> str:
    counts = ", ".join(f"{report.count(state)} {WORDS[state]}" for state in ORDER if report.count(state))
    sentence = {0: "nothing failed", 1: "KV will not move as it should", 2: "there is no evidence to judge by"}
    return f"{sentence[report.exit_status]}: {counts}"


def write_text(lines: Iterable[Row], *, terminal: bool) -> None:
    """Print rows, with colours and wrapping on a terminal, one line a row in a pipe."""
    if terminal:
        _write_rich(lines)
        return
    import click  # noqa: PLC0415

    for row in lines:
        click.echo(f"{row.label:<10} {row.text}".rstrip())


def _write_rich(lines: Iterable[Row]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=10, no_wrap=True)
    grid.add_column(overflow="fold")
    for row in lines:
        grid.add_row(Text(row.label, row.style), Text(row.text, "bold" if row.label in {"FAIL", "WARN"} else ""))
    Console(highlight=False).print(grid)


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as the documented JSON object; `docs/checks.md` lists its keys."""
    return {
        "schema": SCHEMA,
        "kvops": __version__,
        "host": report.host,
        "instance_type": report.instance_type,
        "exit": report.exit_status,
        "summary": {state.value: report.count(state) for state in State},
        "problems": report.problems,
        "findings": [_result_as_json(result) for result in report.results],
    }


def _result_as_json(result: Result) -> dict[str, Any]:
    return {
        "id": result.check.id,
        "group": result.check.group,
        "title": result.check.title,
        "state": result.state.value,
        "message": result.finding.message,
        "evidence": result.finding.evidence,
        "fix": result.fix,
        "sources": [url(key) for key in result.check.sources],
        "explained_by": result.explained_by or None,
        "explains": result.explains,
    }


def as_junit(report: Report) -> bytes:
    """Return the report as JUnit XML: FAIL is a failure, SKIP and UNKNOWN are skipped, WARN is system-out."""
    from xml.etree import ElementTree as ET  # noqa: PLC0415

    suite = ET.Element(
        "testsuite",
        name="kvops doctor",
        tests=str(len(report.results)),
        failures=str(report.count(State.FAIL)),
        skipped=str(report.count(State.SKIP) + report.count(State.UNKNOWN)),
    )
    for result in report.results:
        case = ET.SubElement(suite, "testcase", classname=result.check.group, name=result.check.id)
        text = _printable(f"{result.finding.message}\n{result.finding.evidence}\n{result.fix}".strip())
        if result.state is State.FAIL:
            ET.SubElement(case, "failure", message=_printable(result.finding.message)).text = text
        elif result.state in {State.SKIP, State.UNKNOWN}:
            ET.SubElement(case, "skipped", message=_printable(f"{result.state}: {result.finding.message}"))
        elif result.state is State.WARN:
            ET.SubElement(case, "system-out").text = text
    ET.indent(suite)
    return cast("bytes", ET.tostring(suite, encoding="utf-8", xml_declaration=True))


def _printable(text: str) -> str:
    """Drop what XML 1.0 cannot hold; evidence may carry control characters."""
    return "".join(char for char in text if char in "\t\n" or (char.isprintable() and not 0xD800 <= ord(char) < 0xE000))


def explanation(check: Check) -> Iterator[Row]:
    """Yield everything that is known about a check."""
    yield Row(check.id, check.title, "bold")
    yield Row("group", check.group)
    yield Row("why", " ".join(check.why.split()))
    yield Row("evidence", check.evidence)
    yield Row("rule", check.rule)
    yield Row("fix", check.fix or "nothing to fix: informational")
    for key in check.sources:
        yield Row("source", url(key))
