"""``kvops top``: the live fleet in one screen, from its engines' /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import TYPE_CHECKING, NamedTuple

import click

from kvops.cli.options import json_option, name_option
from kvops.errors import KvopsError

if TYPE_CHECKING:
    import aiohttp
    from rich.table import Table

    from kvops.metrics_text import Samples

_DIRECTIONS = ("p_to_d", "d_to_p")
_SCRAPE_TIMEOUT_SECONDS = 5


class Row(NamedTuple):
    """One engine at one moment; rates are per second over the last interval, None where nothing was measured."""

    engine: str
    running: int
    waiting: int
    kv_share: float
    """Share of the KV cache in use, 0 to 1."""
    held_blocks: int | None
    """Blocks kept for a peer; None for an engine with stock connectors."""
    prompt_tokens: float
    transferred_tokens: float
    """Prompt tokens whose KV came from a peer."""
    generated_tokens: float
    kv_bytes: float
    """KV bytes that this engine read or wrote."""
    kv_wait_seconds: float | None
    """Mean wait for KV of the requests whose KV arrived in the interval."""
    oldest_wait_seconds: float
    """Age of the oldest request that waits for KV."""
    failed: int
    """Requests that lost their KV or their answer to it, since the engine started."""


@click.command()
@click.argument("urls", nargs=-1)
@name_option
@click.option(
    "--interval", default=2.0, show_default=True, type=click.FloatRange(0.2, 60), help="Seconds between looks."
)
@json_option
def command(*, urls: tuple[str, ...], name: str, interval: float, as_json: bool) -> None:
    """Show what each engine of a fleet is doing: requests, KV cache, where tokens come from, waits, failures.

    Shows one interval and ends where the output is no terminal, and with --json. URLS name engines that kvops did not
    start.

    \b
    run, wait   requests that run, that wait
    KV, held    share of the KV cache in use, blocks kept for a peer
    in/s        prompt tokens a second; by KV: the share whose KV came from a peer
    out/s       generated tokens a second
    KV/s        bytes read or written; KV wait: mean wait of a request for its KV
    oldest      age of the oldest request that waits for KV
    bad         requests that lost their KV or their answer, since the engine started

    \b
    Example:
      kvops top
      kvops top http://10.0.0.1:8100 http://10.0.0.2:8200 --json
    """
    engines = {url.removeprefix("http://"): url for url in urls} or _engines_of(name)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(engines, interval, as_json=as_json))


def _engines_of(name: str) -> dict[str, str]:
    from kvops.launch.rundir import RunDir  # noqa: PLC0415

    run_dir = RunDir(name)
    if not run_dir.is_running():
        raise KvopsError(f"no fleet named {name} is running", "start one with 'kvops up', or give engines' URLs")
    return {engine.name: engine.url for engine in run_dir.read_plan().engines}


async def _watch(engines: dict[str, str], interval: float, *, as_json: bool) -> None:
    import aiohttp  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    console = Console()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SCRAPE_TIMEOUT_SECONDS)) as client:
        before = await _scrape_all(client, engines)
        if not any(before.values()):
            raise KvopsError(f"none of {', '.join(engines.values())} answers /metrics", "check that they are up")
        if as_json or not console.is_terminal:
            rows, _ = await _rows_after(client, engines, before, interval)
            if as_json:
                click.echo(json.dumps([row._asdict() for row in rows]))
            else:
                console.print(table_of(rows, []))
            return
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                rows, before = await _rows_after(client, engines, before, interval)
                live.update(table_of(rows, [engine for engine in engines if not before[engine]]), refresh=True)


async def _rows_after(
    client: aiohttp.ClientSession, engines: dict[str, str], before: dict[str, Samples | None], interval: float
) -> tuple[list[Row], dict[str, Samples | None]]:
    started = time.monotonic()
    await asyncio.sleep(interval)
    after = await _scrape_all(client, engines)
    seconds = time.monotonic() - started
    pairs = [(engine, before[engine], after[engine]) for engine in engines]
    return [row_of(engine, early, late, seconds) for engine, early, late in pairs if early and late], after


async def _scrape_all(client: aiohttp.ClientSession, engines: dict[str, str]) -> dict[str, Samples | None]:
    scrapes = await asyncio.gather(*(_scrape(client, url) for url in engines.values()))
    return dict(zip(engines, scrapes, strict=True))


async def _scrape(client: aiohttp.ClientSession, url: str) -> Samples | None:
    import aiohttp  # noqa: PLC0415

    from kvops.metrics_text import Samples  # noqa: PLC0415

    try:
        async with client.get(f"{url}/metrics") as answer:
            return Samples(await answer.text())
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None


def row_of(engine: str, before: Samples, after: Samples, seconds: float) -> Row:
    """Return an engine's row from two scrapes ``seconds`` apart."""

    def per_second(name: str, **labels: str) -> float:
        return max(0.0, after.total(name, **labels) - before.total(name, **labels)) / seconds

    waits = per_second("kvops_request_kv_wait_seconds_count")
    return Row(
        engine=engine,
        running=round(after.total("vllm:num_requests_running")),
        waiting=round(after.total("vllm:num_requests_waiting")),
        kv_share=after.total("vllm:kv_cache_usage_perc"),
        held_blocks=round(after.total("kvops_held_blocks")) if after.has("kvops_connector_info") else None,
        prompt_tokens=per_second("vllm:prompt_tokens_total"),
        transferred_tokens=per_second("vllm:prompt_tokens_by_source_total", source="external_kv_transfer"),
        generated_tokens=per_second("vllm:generation_tokens_total"),
        kv_bytes=per_second("vllm:nixl_bytes_transferred_sum"),
        kv_wait_seconds=per_second("kvops_request_kv_wait_seconds_sum") / waits if waits else None,
        oldest_wait_seconds=max(
            after.total("kvops_oldest_waiting_kv_age_seconds", direction=direction) for direction in _DIRECTIONS
        ),
        failed=round(
            after.total("kvops_requests_total", outcome="failed") + after.total("kvops_reads_after_expiry_total")
        ),
    )


def table_of(rows: list[Row], silent: list[str]) -> Table:
    """Return the screen: a row an engine, and the names of those that do not answer."""
    from rich.filesize import decimal  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    caption = Text(f"no answer from {', '.join(silent)}", style="bold red") if silent else None
    # 80 columns hold every figure whole; a long name takes a second line before a figure is cut.
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", caption=caption, caption_justify="left")
    table.add_column("engine", overflow="fold")
    for column in ("run", "wait", "KV", "held", "in/s", "by KV", "out/s", "KV/s", "KV wait", "oldest", "bad"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        share = f"{100 * row.transferred_tokens / row.prompt_tokens:.0f}%" if row.prompt_tokens else "-"
        table.add_row(
            row.engine,
            str(row.running),
            str(row.waiting),
            f"{row.kv_share:.0%}",
            "-" if row.held_blocks is None else str(row.held_blocks),
            _short(row.prompt_tokens),
            share,
            _short(row.generated_tokens),
            decimal(round(row.kv_bytes)) if row.kv_bytes else "-",
            "-" if row.kv_wait_seconds is None else _short_time(row.kv_wait_seconds),
            f"{row.oldest_wait_seconds:.0f} s" if row.oldest_wait_seconds else "-",
            Text(str(row.failed), style="bold red" if row.failed else ""),
        )
    return table


def _short(figure: float) -> str:
    """Return a rate in at most five characters."""
    if figure < 10_000:
        return f"{figure:.0f}"
    return f"{figure / 1000:.0f}k" if figure < 1_000_000 else f"{figure / 1_000_000:.1f}M"


def _short_time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
