"""``kvops bench``: measure a fleet, or several in turns, under a workload that can be repeated."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from kvops.cli.options import json_option
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvops.bench.fleets import Target
    from kvops.bench.workload import Sweep, Turns
    from kvops.launch.plan import Plan

_FILE = click.Path(path_type=Path)
_CACHE = click.Choice(["cold", "warm"])


def _numbers(least: float) -> Callable[[click.Context, click.Parameter, str], tuple[float, ...]]:
    """Return the callback that reads numbers with commas between them, none below ``least``."""

    def read(_: click.Context, __: click.Parameter, value: str) -> tuple[float, ...]:
        try:
            numbers = tuple(float(part) for part in value.split(","))
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,2,4") from None
        if not all(least <= number < float("inf") for number in numbers):
            raise click.BadParameter(f"{value!r} has a number below {least:g} or without end")
        return numbers

    return read


def _common(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of both workloads."""
    options = [
        click.option("--out", type=_FILE, help="Folder of the run; made up from the time if left out."),
        click.option("--leg", "legs", multiple=True, metavar="NAME,KEY=VALUE,...",
                     help="A fleet that is already up, instead of starting some: fleet=NAME of kvops up, or mode=MODE, "
                          "router=URL, prefill=URL, decode=URL, journal=FOLDER; also connectors=instrumented|stock, "
                          "dispatch=serial|concurrent, conversations=on|off. Repeat it."),
        click.option("-f", "--file", type=_FILE, help="The kvops.yaml of the fleets to start."),
        click.option("--preset", help="Preset instead of the one that fits this machine."),
        click.option("--model", help="Model instead of that of kvops.yaml."),
        click.option("--output-tokens", type=click.IntRange(1, 100_000), default=128, show_default=True,
                     help="Length of every answer."),
        click.option("--arrivals", type=click.Choice(["poisson", "constant"]), default="poisson", show_default=True,
                     help="How gaps between arrivals are distributed."),
        click.option("--rounds", type=click.IntRange(1, 1000), default=1, show_default=True,
                     help="How often everything is repeated; the legs take turns."),
        click.option("--prefill-cache", type=_CACHE, default="cold", show_default=True,
                     help="Whether prefill's own prefix cache may know the prompts."),
        click.option("--seed", type=int, default=0, show_default=True, help="Of prompts, arrivals and gaps."),
        click.option("--api-key-file", type=_FILE, help="File whose first line is the API key for the legs' routers."),
        json_option,
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


@click.group()
def command() -> None:
    """Measure fleets under a workload that can be repeated, the legs of a comparison in turns.

    Arrivals are open-loop, latencies count from when a request was due, every answer is checked, and a run in which KV
    did not move, or was read after its time, fails (exit status 1).

    \b
    Example:
      kvops bench sweep --input-tokens 1024,8192 --rates 2,4
      kvops bench turns --start-tokens 2048 --end-tokens 24576 --conversations 10 --turns 10
    """


@command.command("sweep")
@click.option(
    "--input-tokens",
    metavar="N,...",
    callback=_numbers(1),
    default="512,2048",
    show_default=True,
    help="Lengths of prompts.",
)
@click.option("--rates", metavar="N,...", callback=_numbers(0), default="1", show_default=True,
              help="Requests a second; 0 for one at a time.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0.1), default=30, show_default=True,
              help="How long requests arrive, per cell and round.")  # fmt: skip
@click.option("--mode", "modes", type=click.Choice(["pull", "push"]), multiple=True, default=("pull", "push"),
              show_default=True, help="Legs to start; repeat it.")  # fmt: skip
@click.option("--connectors", type=click.Choice(["instrumented", "stock", "both"]), default="instrumented",
              show_default=True, help="Which connectors the started engines load.")  # fmt: skip
@click.option(
    "--side-by-side", is_flag=True, help="All legs' engines up at once, rounds alternating: needs the memory."
)
@click.option("--warm-up", type=click.IntRange(0, 1000), default=2, show_default=True,
              help="Requests before each cell that are in no figure.")  # fmt: skip
@click.option("--same-prompt", is_flag=True, help="Send one prompt over and over instead of unique ones.")
@_common
def sweep(
    *,
    input_tokens: tuple[float, ...],
    rates: tuple[float, ...],
    seconds: float,
    modes: tuple[str, ...],
    connectors: str,
    side_by_side: bool,
    warm_up: int,
    same_prompt: bool,
    **common: Any,
) -> None:
    """Send single requests, every length at every rate, on pull and push in one run.

    \b
    Example:
      kvops bench sweep --input-tokens 1024,16384 --rates 2,4,6 --mode pull --mode push
      kvops bench sweep --rates 4 --rounds 5 \\
        --leg a,mode=pull,router=http://h:8000,prefill=http://h:8100,decode=http://h:8200 \\
        --leg b,mode=push,router=http://h:8001,prefill=http://h:8101,decode=http://h:8201
    """
    from kvops.bench.results import Cell  # noqa: PLC0415
    from kvops.bench.workload import Sweep  # noqa: PLC0415

    workload = Sweep(
        cells=tuple(Cell(input_tokens=int(length), rate_per_second=rate) for length in input_tokens for rate in rates),
        seconds=seconds,
        output_tokens=common["output_tokens"],
        arrivals=common["arrivals"],
        rounds=common["rounds"],
        warm_up=warm_up,
        prefill_cache=common["prefill_cache"],
        unique_prompts=not same_prompt,
        seed=common["seed"],
    )
    # As in published comparisons decode keeps no prefixes: with a warm prefill nothing would be left to move.
    off = ("prefill", "decode") if workload.prefill_cache == "cold" else ("decode",)
    targets = _given(common) or [
        _start(common, mode, stock=kind == "stock", cache_off=off)
        for kind in (("instrumented", "stock") if connectors == "both" else (connectors,))
        for mode in modes
    ]
    _run("sweep", workload, targets, common, side_by_side=side_by_side)


@command.command("turns")
@click.option("--conversations", type=click.IntRange(1, 100_000), default=4, show_default=True, help="In a round.")
@click.option("--turns", "turn_count", type=click.IntRange(1, 1000), default=4, show_default=True, help="Of each.")
@click.option("--start-tokens", type=click.IntRange(1), default=2048, show_default=True, help="First turn's prompt.")
@click.option("--end-tokens", type=click.IntRange(1), default=24576, show_default=True,
              help="Last turn's prompt, history included.")  # fmt: skip
@click.option("--think-seconds", type=click.FloatRange(min=0), default=1, show_default=True,
              help="Mean gap between an answer and the next turn.")  # fmt: skip
@click.option("--rate", type=click.FloatRange(min=0), default=0.5, show_default=True,
              help="New conversations a second; 0 for one after the other.")  # fmt: skip
@click.option("--abort-rate", type=click.FloatRange(0, 1), default=0, show_default=True,
              help="Share of turns that the client leaves after the first token.")  # fmt: skip
@_common
def turns(
    *,
    conversations: int,
    turn_count: int,
    start_tokens: int,
    end_tokens: int,
    think_seconds: float,
    rate: float,
    abort_rate: float,
    **common: Any,
) -> None:
    """Hold conversations that grow, with decode's KV read back and without, in one run.

    Both legs use the same bidirectional fleet; without the conversation's id on the wire nothing is read back.

    \b
    Example:
      kvops bench turns --start-tokens 2048 --end-tokens 24576 --conversations 10 --turns 10
      kvops bench turns --abort-rate 0.1 --think-seconds 20 --rate 0.2
    """
    from kvops.bench.workload import Turns  # noqa: PLC0415

    workload = Turns(
        conversations=conversations,
        turns=turn_count,
        start_tokens=start_tokens,
        end_tokens=end_tokens,
        output_tokens=common["output_tokens"],
        think_seconds=think_seconds,
        rate_per_second=rate,
        abort_rate=abort_rate,
        arrivals=common["arrivals"],
        rounds=common["rounds"],
        prefill_cache=common["prefill_cache"],
        seed=common["seed"],
    )
    workload.check()
    _run("turns", workload, _given(common) or _start_on_and_off(common), common, side_by_side=True)


def _given(common: dict[str, Any]) -> list[Target]:
    from kvops.bench.fleets import given  # noqa: PLC0415

    targets = [given(text, prefill_cache=common["prefill_cache"]) for text in common["legs"]]
    if len({target.leg.name for target in targets}) != len(targets):
        raise KvopsError("two --leg have one name", "give each its own")
    return targets


def _start(common: dict[str, Any], mode: str, *, stock: bool, cache_off: tuple[str, ...]) -> Target:
    from kvops.bench.fleets import planned  # noqa: PLC0415

    name = f"{mode}-stock" if stock else mode
    plan = _plan(common, mode, f"bench-{name}", stock=stock, cache_off=cache_off)
    return planned(plan, name, prefill_cache=common["prefill_cache"])


def _start_on_and_off(common: dict[str, Any]) -> list[Target]:
    from kvops.bench.fleets import planned  # noqa: PLC0415

    off = ("prefill",) if common["prefill_cache"] == "cold" else ()
    plan = _plan(common, "bidirectional", "bench-bidirectional", stock=False, cache_off=off)
    return [
        planned(plan, name, prefill_cache=common["prefill_cache"], conversation_ids=ids)
        for name, ids in (("bidirectional-off", False), ("bidirectional-on", True))
    ]


def _plan(common: dict[str, Any], mode: str, name: str, *, stock: bool, cache_off: tuple[str, ...]) -> Plan:
    from kvops.launch.plan import make_plan  # noqa: PLC0415
    from kvops.launch.rundir import RunDir, reserved_ports  # noqa: PLC0415
    from kvops.topology import load_topology  # noqa: PLC0415

    overrides: dict[str, Any] = {role: {"args": ["--no-enable-prefix-caching"]} for role in cache_off}
    overrides["mode"] = mode
    if common["model"]:
        overrides["model"] = common["model"]
    topology = load_topology(common["file"], overrides, common["preset"])
    run_dir = RunDir(name)
    taken = reserved_ports() | _planned_ports
    plan = make_plan(topology, name=name, folder=run_dir.path, stock_connectors=stock, reserved=taken)
    _planned_ports.update(plan.ports())
    return plan


_planned_ports: set[int] = set()


def _run(
    kind: Literal["turns", "sweep"],
    workload: Sweep | Turns,
    targets: list[Target],
    common: dict[str, Any],
    *,
    side_by_side: bool,
) -> None:
    from kvops.bench.session import Session  # noqa: PLC0415
    from kvops.cli.bench_view import show_run  # noqa: PLC0415

    out = common["out"] or Path(f"kvops-bench-{kind}-{time.strftime('%Y%m%d-%H%M%S')}")
    session = Session(kind, workload, targets, out, key=_key(common["api_key_file"]), side_by_side=side_by_side)
    run = session.run(quiet=common["as_json"])
    show_run(run, session.results, out, as_json=common["as_json"])
    if not run.verdict.ok:
        raise SystemExit(1)


def _key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text().split()[0]
    except (OSError, IndexError):
        raise KvopsError(f"{file} holds no API key", "give a file whose first line is the key") from None


@command.command("import")
@click.argument("file", type=_FILE)
@click.option("--out", type=_FILE, required=True, help="Folder of the run.")
@click.option("--leg-name", default="imported", show_default=True, help="What the leg is called.")
@click.option("--mode", type=click.Choice(["pull", "push", "bidirectional"]), default="pull", show_default=True,
              help="How KV moved in it.")  # fmt: skip
def import_(*, file: Path, out: Path, leg_name: str, mode: str) -> None:
    """Turn a result of vllm bench serve or AIPerf into a run that kvops report reads.

    FILE comes from vllm bench serve --save-result --save-detailed, or is AIPerf's profile_export.jsonl. Nothing shows
    whether KV moved in it, so the run's verdict says that.

    \b
    Example:
      kvops bench import vllm-result.json --out imported-run --mode push
    """
    from kvops.bench import environment, imports  # noqa: PLC0415
    from kvops.bench.results import Leg, Run, RunWriter, Verdict  # noqa: PLC0415

    leg = Leg(name=leg_name, mode=mode)
    results = imports.read(file, leg)
    with RunWriter(out) as writer:
        for result in results:
            writer.add(result)
        run = Run(
            kind="imported",
            started=min(result.sent for result in results),
            command=["kvops", "bench", "import", file.name],
            seed=0,
            environment=environment.describe(),
            workload={},
            legs=[leg],
            counters=[],
            verdict=Verdict(ok=True, problems=["imported: nothing shows whether KV moved"]),
        )
        writer.finish(run)
    click.echo(f"{len(results)} requests in {out}")
