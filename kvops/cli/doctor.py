"""``kvops doctor``: will this host really move KV by RDMA?"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvops.doctor.check import Check, State
    from kvops.doctor.host import Host
    from kvops.doctor.report import Row
    from kvops.doctor.run import Report, Result

WATCH_SECONDS = 5.0
PATH = click.Path(path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--snapshot", type=PATH, metavar="PATH", help="Judge a captured machine instead of this one.")
@click.option("--capture", type=PATH, metavar="FILE", help="Write a redacted snapshot (.tar.gz, .tar.zst) and stop.")
@click.option(
    "--pair",
    type=PATH,
    nargs=2,
    metavar="P D",
    help="Compare prefill and decode: snapshots, or engines of a fleet here.",
)
@click.option("--instance-type", default="", metavar="TYPE", help="Expect this EC2 type, whatever the machine says.")
@click.option("--aws", is_flag=True, help="Ask AWS as well (describe-* calls about this instance).")
@click.option("--probe", is_flag=True, help="Move bytes between two NIXL agents of this host as well.")
@click.option("--kubernetes", is_flag=True, help="Look at the cluster that kubectl reaches: nodes, plugins, pods.")
@click.option("--only", multiple=True, metavar="GROUP|ID", help="Run only these checks; may be repeated.")
@click.option("--skip", multiple=True, metavar="GROUP|ID", help="Leave these checks out; may be repeated.")
@click.option("--explain", metavar="ID", help="Say what a check looks at, why, and where its rule comes from.")
@click.option("--list", "list_checks", is_flag=True, help="List the checks and stop.")
@click.option("--markdown", is_flag=True, help="With --list: the whole reference page.")
@click.option("--watch", is_flag=True, help=f"Look again every {WATCH_SECONDS:.0f} s and print what changes.")
@click.option("-v", "--verbose", is_flag=True, help="Show every check, not only what is wrong.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--junit", type=PATH, metavar="FILE", help="Write the report as JUnit XML as well.")
def command(**options: Any) -> None:
    """Check that KV will move by RDMA: EFA, GPUDirect, Neuron, libfabric, NIXL, UCX, vLLM and the network.

    Reads only. Exit status 0: nothing failed; 1: something failed; 2: nothing could be evaluated.

    \b
    Example:
      kvops doctor                                  this machine
      kvops doctor --capture node7.tar.gz           a redacted bundle for somebody else
      kvops doctor --snapshot node7.tar.gz          judge it
      kvops doctor --pair p.tar.gz d.tar.gz         do prefill and decode fit together?
      kvops doctor --pair prefill-0 decode-0        the same for two engines of kvops up
      kvops doctor --kubernetes                     nodes, device plugins and engine pods of a cluster
      kvops doctor --explain NX-05
    """
    if options["snapshot"] and (options["pair"] or options["aws"] or options["probe"]):
        raise KvopsError("--snapshot judges one captured machine", "leave --pair, --aws and --probe out")
    if options["kubernetes"]:
        _reach_cluster(options)
    if options["explain"]:
        _explain(options["explain"], as_json=options["as_json"])
    elif options["list_checks"] or options["markdown"]:
        _list(markdown=options["markdown"], as_json=options["as_json"])
    elif options["capture"]:
        _capture(options["capture"], options)
    else:
        sys.exit(_judge(options))


def _reach_cluster(options: dict[str, Any]) -> None:
    """Narrow the checks to the cluster's, once it is known to answer: silence would read as health."""
    from kvops import kubectl  # noqa: PLC0415

    if options["only"] or options["snapshot"] or options["pair"]:
        raise KvopsError("--kubernetes chooses the checks and asks a live cluster", "leave --only and snapshots out")
    kubectl.get("nodes")
    options["only"] = ("kubernetes",)


def _judge(options: dict[str, Any]) -> int:
    """Run the checks and print what they found; return the exit status."""
    from kvops.doctor.run import PAIR_CHECKS, select  # noqa: PLC0415

    checks = select(options["only"], options["skip"], among=PAIR_CHECKS if options["pair"] else ())
    if options["probe"]:
        from kvops.doctor.active import bytes_move  # noqa: PLC0415

        checks.append(bytes_move)
    if options["watch"]:
        return _watch(checks, options)
    report = _look(checks, options)
    _show(report, options)
    return report.exit_status


def _look(checks: Sequence[Check], options: dict[str, Any]) -> Report:
    from kvops.doctor.facts import Facts  # noqa: PLC0415
    from kvops.doctor.run import run, wait_for_efas  # noqa: PLC0415
    from kvops.doctor.snapshot import load  # noqa: PLC0415

    kind = options["instance_type"]
    if options["pair"] and any(path.exists() for path in options["pair"]):
        prefill, decode = map(load, options["pair"])
        return run(Facts(prefill, instance_type=kind, peer=Facts(decode)), checks)
    if options["pair"]:
        from kvops.doctor.fleet import pids_of  # noqa: PLC0415

        return run(Facts(_host(options), instance_type=kind, named=pids_of([*map(str, options["pair"])])), checks)

    def look() -> Facts:
        return Facts(_host(options), instance_type=kind)

    return run(look() if options["snapshot"] else wait_for_efas(look(), look), checks)


def _host(options: dict[str, Any]) -> Host:
    from kvops.doctor.run import live_host  # noqa: PLC0415
    from kvops.doctor.snapshot import load  # noqa: PLC0415

    if options["snapshot"]:
        return load(options["snapshot"])
    host = live_host()
    if options["aws"]:
        from kvops.doctor import aws  # noqa: PLC0415

        aws.ask(host)
    return host


def _show(report: Report, options: dict[str, Any]) -> None:
    from kvops.doctor import report as writers  # noqa: PLC0415

    if options["junit"]:
        _write(options["junit"], writers.as_junit(report))
    if options["as_json"]:
        click.echo(json.dumps(writers.as_json(report), indent=2))
    else:
        writers.write_text(writers.rows(report, verbose=options["verbose"]), terminal=sys.stdout.isatty())


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise KvopsError(f"cannot write {path}: {error.strerror}", "choose a folder that you may write to") from error


def _watch(checks: Sequence[Check], options: dict[str, Any]) -> int:
    """Look again and again until interrupted; each look is the base of the next one's counters."""
    from kvops.doctor.facts import Facts  # noqa: PLC0415
    from kvops.doctor.run import changes, run  # noqa: PLC0415

    if options["snapshot"] or options["pair"]:
        raise KvopsError("--watch looks at a live machine", "leave --snapshot and --pair out")
    facts = Facts(_host(options), instance_type=options["instance_type"])
    report = run(facts, checks)
    _show(report, options)
    try:
        while True:
            time.sleep(WATCH_SECONDS)
            facts = Facts(_host(options), instance_type=options["instance_type"], previous=facts)
            before, report = report, run(facts, checks)
            facts.previous = None
            for result, old in changes(before, report):
                click.echo(_change(result, old, as_json=options["as_json"]))
    except KeyboardInterrupt:
        return report.exit_status


def _change(result: Result, old: State, *, as_json: bool) -> str:
    """Return one line about a check whose finding changed."""
    now, message = time.strftime("%Y-%m-%dT%H:%M:%S%z"), result.finding.message
    if as_json:
        return json.dumps(
            {"time": now, "id": result.check.id, "before": old, "after": result.state, "message": message}
        )
    return f"{now} {result.check.id} {old} -> {result.state}: {message}"


def _capture(path: Path, options: dict[str, Any]) -> None:
    from kvops.doctor.capture import capture, write  # noqa: PLC0415

    members = capture(_host(options))
    write(members, path)
    click.echo(f"{path}: {len(members)} members, {path.stat().st_size} bytes; look through it before you send it")


def _explain(name: str, *, as_json: bool) -> None:
    from kvops.doctor.report import explanation, write_text  # noqa: PLC0415
    from kvops.doctor.run import find_check  # noqa: PLC0415

    rows = list(explanation(find_check(name)))
    if as_json:
        click.echo(json.dumps(_as_object(rows), indent=2))
    else:
        write_text(rows, terminal=sys.stdout.isatty())


def _as_object(rows: list[Row]) -> dict[str, object]:
    found: dict[str, object] = {"id": rows[0].label, "title": rows[0].text}
    found.update((row.label, row.text) for row in rows[1:] if row.label != "source")
    return {**found, "sources": [row.text for row in rows if row.label == "source"]}


def _list(*, markdown: bool, as_json: bool) -> None:
    from kvops.doctor.catalogue import markdown as reference_page  # noqa: PLC0415
    from kvops.doctor.checks import CHECKS  # noqa: PLC0415

    if markdown:
        click.echo(reference_page(), nl=False)
    elif as_json:
        keys = ("id", "group", "title", "quick")
        click.echo(json.dumps([{key: getattr(check, key) for key in keys} for check in CHECKS], indent=2))
    else:
        for check in CHECKS:
            click.echo(f"{check.id:<8} {check.group:<11} {check.title}")
