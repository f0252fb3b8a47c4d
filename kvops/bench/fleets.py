"""The fleets of a run: brought up for it from plans, or given by URL."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import msgspec

from kvops.bench.results import Leg
from kvops.errors import KvopsError
from kvops.launch.rundir import RunDir
from kvops.launch.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

    from kvops.launch.plan import Plan
    from kvops.launch.rundir import FleetState

_CHOICES = {
    "mode": ("pull", "push", "bidirectional"),
    "connectors": ("instrumented", "stock"),
    "dispatch": ("serial", "concurrent"),
    "prefill_cache": ("cold", "warm"),
    "conversations": ("on", "off"),
}
_LEG_KEYS = (*_CHOICES, "fleet", "router", "prefill", "decode", "journal")
# The journals' threads write what is queued within a second.
_JOURNAL_SECONDS = 1.0

# Per leg, when its cells ran: unix seconds.
Windows = dict[str, list[tuple[float, float]]]


class Target(NamedTuple):
    """A leg, where its journals are, and the plan if kvops starts its engines."""

    leg: Leg
    journal: Path | None
    plan: Plan | None = None


def planned(plan: Plan, name: str, *, prefill_cache: str, conversation_ids: bool = False) -> Target:
    """Return the leg of a fleet that is to be started."""
    leg = Leg(
        name=name,
        mode=plan.mode,
        connectors="stock" if plan.connectors == "stock" else "instrumented",
        dispatch="concurrent" if plan.mode == "push" else "serial",
        prefill_cache="warm" if prefill_cache == "warm" else "cold",
        conversation_ids=conversation_ids,
        router=plan.router.url,
        prefill=tuple(process.url for process in plan.role("prefill")),
        decode=tuple(process.url for process in plan.role("decode")),
    )
    return Target(leg, RunDir(plan.name).journal_dir, plan)


def given(text: str, *, prefill_cache: str) -> Target:
    """Return the leg that ``--leg NAME,key=value,...`` describes; prefill and decode may be given more than once.

    Raises:
        KvopsError: something is missing, unknown or not up.
    """
    name, *parts = text.split(",")
    values = _values_of(name, parts)
    if "fleet" in values:
        values = _values_of_fleet(values["fleet"][0]) | values
    missing = [key for key in ("router", "prefill", "decode") if key not in values]
    if missing or not name or "=" in name or "/" in name:
        raise KvopsError(
            f"--leg {text!r} lacks {', '.join(missing) or 'a name'}",
            "write --leg NAME,mode=pull,router=URL,prefill=URL,decode=URL, or --leg NAME,fleet=FLEET",
        )
    first = {key: found[0] for key, found in values.items()}
    mode = first.get("mode", "pull")
    described = {
        "mode": mode,
        "connectors": first.get("connectors", "instrumented"),
        "dispatch": first.get("dispatch", "concurrent" if mode == "push" else "serial"),
        "prefill_cache": first.get("prefill_cache", prefill_cache),
        "conversation_ids": first.get("conversations", "on") == "on" and mode == "bidirectional",
    }
    urls = {"router": first["router"], "prefill": values["prefill"], "decode": values["decode"]}
    leg = msgspec.convert({"name": name, **described, **urls}, Leg)
    return Target(leg, Path(first["journal"]) if "journal" in first else None)


def _values_of(name: str, parts: Iterable[str]) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for part in parts:
        key, _, value = part.partition("=")
        if key not in _LEG_KEYS or not value:
            raise KvopsError(f"--leg {name} has {part!r}", f"write key=value with one of {', '.join(_LEG_KEYS)}")
        if value not in _CHOICES.get(key, (value,)):
            raise KvopsError(f"--leg {name} has {part}", f"write one of {', '.join(_CHOICES[key])}")
        values.setdefault(key, []).append(value.rstrip("/"))
    return values


def _values_of_fleet(name: str) -> dict[str, list[str]]:
    """Return what ``--leg`` would say of a fleet that ``kvops up`` started on this machine."""
    run_dir = RunDir(name)
    if not run_dir.is_running():
        raise KvopsError(f"no fleet called {name} is up", "kvops status shows those that are")
    plan = run_dir.read_plan()
    return {
        "mode": [plan.mode],
        "connectors": ["stock" if plan.connectors == "stock" else "instrumented"],
        "router": [plan.router.url],
        "prefill": [process.url for process in plan.role("prefill")],
        "decode": [process.url for process in plan.role("decode")],
        "journal": [str(run_dir.journal_dir)],
    }


@contextlib.asynccontextmanager
async def running(plans: Iterable[Plan], show: Callable[[FleetState], None]) -> AsyncIterator[None]:
    """Bring fleets up one after the other, prove each by its canary, and end them all afterwards.

    Raises:
        KvopsError: one did not come up.
    """
    async with contextlib.AsyncExitStack() as stack:
        for plan in plans:
            await stack.enter_async_context(_running(plan, show))
        yield


@contextlib.asynccontextmanager
async def _running(plan: Plan, show: Callable[[FleetState], None]) -> AsyncIterator[None]:
    settled = asyncio.Event()

    def watch(state: FleetState) -> None:
        show(state)
        if state.phase in ("ready", "failed", "stopped"):
            settled.set()

    supervisor = Supervisor(plan, RunDir(plan.name), watch)
    fleet = asyncio.create_task(supervisor.run())
    waiting = asyncio.create_task(settled.wait())
    try:
        await asyncio.wait([fleet, waiting], return_when=asyncio.FIRST_COMPLETED)
        if supervisor.state.phase != "ready":
            raise KvopsError(f"fleet {plan.name} did not come up: {supervisor.state.problem or 'it was stopped'}")
        yield
        if fleet.done():
            raise KvopsError(f"fleet {plan.name} ended during the run: {supervisor.state.problem}")
    finally:
        waiting.cancel()
        supervisor.stop()
        await fleet


async def model_of(session: aiohttp.ClientSession, leg: Leg, headers: Mapping[str, str], longest_tokens: int) -> str:
    """Return the name under which a leg serves its model.

    Args:
        session: to ask with.
        leg: whose router is asked.
        headers: for the router.
        longest_tokens: of prompt and answer together, that will be asked for.

    Raises:
        KvopsError: its router does not say, or the model takes no request so long.
    """
    url = f"{leg.router}/v1/models"
    try:
        async with session.get(url, headers=headers, timeout=aiohttp.ClientTimeout(total=30)) as answer:
            card: dict[str, Any] = (await answer.json())["data"][0]
            found: str = card["id"]
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
        raise KvopsError(f"{url} names no model: {error or type(error).__name__}", "check the leg's router") from None
    most = card.get("max_model_len")
    if isinstance(most, int) and longest_tokens > most:
        raise KvopsError(
            f"prompt and answer of {longest_tokens} tokens do not fit {found}, which takes {most}",
            "lower --input-tokens or --end-tokens, or raise --max-model-len in the args of kvops.yaml",
        )
    return found


async def copy_journals(targets: Iterable[Target], windows: Windows, folder_of: Callable[[str], Path]) -> None:
    """Copy what the legs' engines and routers wrote while their cells ran; legs may share engines."""
    await asyncio.sleep(_JOURNAL_SECONDS)
    for target in targets:
        if target.journal is None or not target.journal.is_dir():
            continue
        for path in sorted(target.journal.glob("*.jsonl*")):
            copy = folder_of(target.leg.name) / path.name
            await asyncio.to_thread(_copy_lines, path, copy, windows.get(target.leg.name, []))


class _Stamped(msgspec.Struct):
    ts: float


def _copy_lines(path: Path, copy: Path, windows: list[tuple[float, float]]) -> None:
    stamp = msgspec.json.Decoder(_Stamped).decode
    with path.open("rb") as lines, copy.open("wb") as file:
        for line in lines:
            # A line that is being written has no end yet.
            with contextlib.suppress(msgspec.DecodeError):
                ts = stamp(line).ts
                if any(begin <= ts <= end for begin, end in windows):
                    file.write(line)
