"""A bad hour in minutes: real fleets in every mode, with all that goes wrong, each under a real Prometheus.

``python tests/support/scripted_hour.py FOLDER SCENE`` starts one fleet, plays its acts and says which alerts each act
fired, against those that it should fire; exit status 1 if they differ. Then it runs every query of every panel and rule
over the scene; its data and answers stay in FOLDER/SCENE. ``... FOLDER check`` says which queries had data in no scene.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

from hour_rules import began, firing, write_quick_rules
from kvops.launch.plan import Plan
from kvops.launch.rundir import RunDir
from kvops_dashboards.checking import Answer, check
from local_prometheus import prometheus, targets

KVOPS = [sys.executable, "-m", "kvops.cli.main"]
# Short lifetimes, so that they run out within an act.
LEASE_SECONDS, TTL_SECONDS, REGISTRATION_SECONDS = 15, 30, 25
CLIENTS = 4
Leg = dict[str, Any]


@dataclass
class Stage:
    """A fleet that is up, and what plays on it."""

    run_dir: RunDir
    plan: Plan
    session: aiohttp.ClientSession
    outcomes: dict[str, int]

    def pid(self, name: str) -> int:
        state = self.run_dir.read_state()
        assert state
        pid = next(process.pid for process in state.processes if process.name == name)
        assert pid
        return pid

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    async def leg(self, role: str, prompt: str, transfer: dict[str, Any], request_id: str = "", tokens: int = 1) -> Leg:
        """Ask an engine itself, as a router does, and return its answer's ``kv_transfer_params``."""
        body = {"model": "kvops-tiny", "prompt": prompt, "max_tokens": tokens, "kv_transfer_params": transfer}
        headers = {"X-Request-Id": request_id} if request_id else {}
        url = f"{self.plan.role(role)[0].url}/v1/completions"
        try:
            async with self.session.post(url, json=body, headers=headers) as answer:
                self.count(f"{role} leg {answer.status}")
                return (await answer.json()).get("kv_transfer_params") or {}
        except (aiohttp.ClientError, TimeoutError) as error:
            self.count(f"{role} leg {type(error).__name__}")
            return {}


KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
READ = {"do_remote_decode": False, "do_remote_prefill": True}


def words(count: int) -> str:
    return " ".join(f"{random.randrange(10**8):08d}" for _ in range(count)) + " "


async def ask(stage: Stage, conversation: str, prompt: str, leave_after: float | None = None) -> str:
    """Ask the router for a streamed answer and return its text; a client that leaves early gets none."""
    tokens = 16 if leave_after is None else 400
    body = {"model": "kvops-tiny", "prompt": prompt, "max_tokens": tokens, "stream": True}
    outcome, text = "gone", ""
    try:
        async with asyncio.timeout(leave_after or 60):
            url = f"{stage.plan.router.url}/v1/completions"
            async with stage.session.post(url, json=body | {"conversation_id": conversation}) as answer:
                text = answer_text(await answer.text())
                outcome = str(answer.status)
    except (TimeoutError, aiohttp.ClientError) as error:
        outcome = type(error).__name__ if leave_after is None else "gone"
    stage.count(outcome)
    return text


def answer_text(stream: str) -> str:
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event).get("choices", []))


async def converse(stage: Stage, *, leaving: float = 0.0, late: float = 0.0) -> None:
    """Hold conversations of four turns for ever; a share of the turns are broken off or come after decode's TTL."""
    while True:
        name, history = f"c-{random.randrange(10**12)}", words(60)
        for _ in range(4):
            history += await ask(stage, name, history, 0.1 if random.random() < leaving else None)
            history += words(40)
            await asyncio.sleep(TTL_SECONDS + 3 if random.random() < late else random.uniform(0.5, 2.5))


async def traffic(stage: Stage, seconds: float, **shares: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(converse(stage, **shares))


async def healthy(stage: Stage) -> None:
    await traffic(stage, 20)


async def aborted_clients(stage: Stage) -> None:
    await traffic(stage, 15, leaving=0.4)


async def stranded_on_prefill(stage: Stage) -> None:
    """Prefill requests whose KV nobody reads, so that their leases run out."""

    async def strand() -> None:
        for _ in range(10):
            await stage.leg("prefill", words(60), KEEP)
            await asyncio.sleep(2)

    await asyncio.gather(traffic(stage, 45), strand())


async def read_too_late(stage: Stage) -> None:
    """Let decode read blocks of prefill whose lease has ended."""

    async def late() -> None:
        prompt = words(60)
        handle = await stage.leg("prefill", prompt, KEEP)
        await asyncio.sleep(LEASE_SECONDS + 4)
        await stage.leg("decode", prompt, handle | READ, tokens=4)

    await asyncio.gather(traffic(stage, 28), late())


async def readbacks_too_late(stage: Stage) -> None:
    """Play a router that sends decode's handles on after their TTL, beside users who come late themselves."""

    async def late_turn(begin: float) -> None:
        await asyncio.sleep(begin)
        prompt = words(60)
        handle = await stage.leg("prefill", prompt, KEEP)
        held = await stage.leg("decode", prompt, handle | READ, tokens=4)
        await asyncio.sleep(TTL_SECONDS + 2)
        longer = prompt + words(40)
        handle = await stage.leg("prefill", longer, held | KEEP)
        await stage.leg("decode", longer, handle | READ, tokens=4)

    await asyncio.gather(traffic(stage, 105, late=0.05), *(late_turn(2.0 * number) for number in range(36)))


async def slow_peer(stage: Stage) -> None:
    """Let the engine of one prefill run a tenth of the time."""
    children = psutil.Process(stage.pid("prefill-2")).children(recursive=True)

    async def throttle() -> None:
        try:
            while True:
                _signal(children, signal.SIGSTOP)
                await asyncio.sleep(0.9)
                _signal(children, signal.SIGCONT)
                await asyncio.sleep(0.1)
        finally:
            _signal(children, signal.SIGCONT)

    task = asyncio.create_task(throttle())
    await traffic(stage, 90)
    task.cancel()


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        # Children of a killed engine may be gone before their turn comes.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


async def registrations_without_prefill(stage: Stage) -> None:
    """Play a router that sends push requests to decode alone: prefill never gets them."""
    known = await stage.leg("prefill", words(4), KEEP)
    identity = {key: known[key] for key in ("remote_engine_id", "remote_host", "remote_port", "tp_size")}

    async def stuck(number: int) -> None:
        await asyncio.sleep(number)
        name = f"stuck-{number}"
        transfer = identity | READ | {"remote_request_id": name, "transfer_id": name}
        await stage.leg("decode", words(60), transfer, name)

    await asyncio.gather(traffic(stage, 50), *(stuck(number) for number in range(8)))


async def killed_prefill(stage: Stage) -> None:
    await _killed(stage, "prefill-0")


async def killed_decode(stage: Stage) -> None:
    await _killed(stage, "decode-0")


async def _killed(stage: Stage, name: str) -> None:
    """Kill an engine under load. The supervisor, which would end the fleet, sleeps meanwhile: a cluster goes on too."""
    engine = psutil.Process(stage.pid(name))
    supervisor = psutil.Process(engine.ppid())
    supervisor.send_signal(signal.SIGSTOP)
    try:
        family = [engine, *engine.children(recursive=True)]

        async def kill() -> None:
            await asyncio.sleep(3)
            _signal(family, signal.SIGKILL)

        await asyncio.gather(traffic(stage, 35), kill())
    finally:
        supervisor.send_signal(signal.SIGCONT)


@dataclass(frozen=True)
class Act:
    """One scene: what is played, the alerts that it must fire and those that may follow from them, and no others."""

    play: Callable[[Stage], Awaitable[None]]
    fires: frozenset[str] = frozenset()
    may_fire: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.play.__name__


def act(play: Callable[[Stage], Awaitable[None]], *fires: str, may: tuple[str, ...] = ()) -> Act:
    return Act(play, frozenset(fires), frozenset(may))


WATCHDOG = "KvopsWatchdog"
# Consequences of trouble that already has its alert: they depend on how many requests were under way at that moment.
BURN = ("KvopsHandoffErrorBudgetBurn", "KvopsHandoffErrorBudgetBurnSlow", "KvopsRecomputeHigh")
# A prefill that ends just as its client leaves keeps its blocks until the lease ends, for the router has no handle yet;
# the alert may come an act later.
UNREAD = ("KvopsLeaseExpired", "KvopsStockLeaseExpired")
OF_A_DEAD_PEER = (
    *BURN,
    *UNREAD,
    "KvopsKvFailedRequests",
    "KvopsHandshakeFailures",
    "KvopsHeartbeatFailing",
    "KvopsPeerErrors",
    "KvopsStockTransferFailures",
    "KvopsRouterRetriesHigh",
    "KvopsRouterReleasesFailing",
    "KvopsRouterErrorBudgetBurnSlow",
    "KvopsThroughputCollapse",
)
SCRIPT: dict[str, tuple[Act, ...]] = {
    "pull": (
        act(healthy),
        act(aborted_clients, may=UNREAD),
        act(stranded_on_prefill, "KvopsLeaseExpired", "KvopsStockLeaseExpired"),
        act(read_too_late, "KvopsReadAfterExpiry", "KvopsStockReadAfterExpiry", may=UNREAD),
    ),
    "pull-from-three": (
        act(healthy),
        act(slow_peer, "KvopsPeerSlow", may=("KvopsThroughputCollapse", "KvopsKvWaitHigh")),
        act(killed_prefill, "KvopsTargetDown", "KvopsRouterEngineOut", may=OF_A_DEAD_PEER),
    ),
    "bidirectional": (
        act(healthy),
        # Blocks that were read in time are given back once more when the client leaves: vLLM counts that as a late read.
        act(aborted_clients, may=(*UNREAD, "KvopsStockReadAfterExpiry")),
        act(readbacks_too_late, "KvopsReadbackDeclined", may=(*BURN, *UNREAD)),
        act(
            killed_decode,
            *("KvopsTargetDown", "KvopsRouterNoEngine", "KvopsRouterEngineOut", "KvopsRouterErrorBudgetBurn"),
            may=OF_A_DEAD_PEER,
        ),
    ),
    "push": (
        act(healthy),
        act(aborted_clients, may=UNREAD),
        act(
            registrations_without_prefill,
            *("KvopsPushRegistrationStuck", "KvopsPushTimeouts", "KvopsKvFailedRequests"),
            may=(*BURN, *UNREAD),
        ),
        act(
            killed_prefill,
            *("KvopsTargetDown", "KvopsRouterNoEngine", "KvopsRouterEngineOut", "KvopsRouterErrorBudgetBurn"),
            may=(*OF_A_DEAD_PEER, "KvopsPushTimeouts"),
        ),
    ),
}
# Which peer is slow can be said of three or more.
PREFILLS = {"pull-from-three": 3}


async def play(run_dir: RunDir, acts: tuple[Act, ...], prometheus: str) -> list[str]:
    """Play the acts and return a sentence for everything that fired and should not have, or the reverse."""
    wrong = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        stage = Stage(run_dir, run_dir.read_plan(), session, {})
        for each in acts:
            begun = time.time()
            await each.play(stage)
            # What an act has done may take some evaluations to fire.
            await asyncio.sleep(4)
            print(f"{stage.plan.mode} {each.name}, {begun:.0f} to {time.time():.0f}: {stage.outcomes}", flush=True)
            stage.outcomes = {}
            # From a little earlier on, to tell what began to fire from what was firing already.
            alerts = await asyncio.to_thread(firing, prometheus, begun - 30, time.time())
            wrong += verdict(each, begun, alerts)
    return wrong


def verdict(played: Act, begun: float, alerts: dict[str, list[float]]) -> list[str]:
    """Return what is wrong: an alert that did not fire during the act, or one that began to and should not have."""
    during = {name for name, times in alerts.items() if times[-1] >= begun}
    new = {name for name, times in alerts.items() if began(times, begun)} - {WATCHDOG}
    print(f"{played.name} fired: {sorted(new) or 'nothing'}", flush=True)
    missing = [f"{played.name} should have fired {name}" for name in sorted(played.fires - during)]
    others = new - played.fires - played.may_fire
    return missing + [f"{played.name} should not have fired {name}" for name in sorted(others)]


@contextlib.contextmanager
def fleet(folder: Path, scene: str) -> Iterator[RunDir]:
    """Bring up the fleet of a scene with short lifetimes, and end it whatever happens."""
    name, topology, mode = f"hour-{scene}", folder / f"{scene}.yaml", scene.partition("-")[0]
    kv = {"lease": LEASE_SECONDS, "decoder_ttl": TTL_SECONDS, "recompute_threshold": 64}
    settings: dict[str, Any] = {"model": "kvops-tiny", "mode": mode, "kv": kv}
    settings |= {"prefill": {"replicas": PREFILLS.get(scene, 1)}, "decode": {"replicas": 1}}
    command = [*KVOPS, "up", "-f", str(topology), "--preset", "cpu-demo", "--name", name]
    if scene == "pull-from-three":
        # Over shared memory decode reads at full speed from a prefill that hardly runs.
        settings["transport"] = {"env": {"UCX_TLS": "tcp"}}
    if mode == "bidirectional":
        # With a prefix cache of its own prefill has the history already, and what is left is below the threshold.
        settings["prefill"]["args"] = ["--no-enable-prefix-caching"]
    topology.write_text(yaml.safe_dump(settings))
    if mode == "push":
        for role, argument in registration_timeout([*command, "--dry-run", "--json"]).items():
            settings[role]["args"] = ["--kv-transfer-config", argument]
        topology.write_text(yaml.safe_dump(settings))
    started = time.monotonic()
    try:
        subprocess.run([*command, "-d"], check=True)
        print(f"{scene}: up after {time.monotonic() - started:.0f} s", flush=True)
        yield RunDir(name)
    finally:
        subprocess.run([*KVOPS, "down", "--name", name], check=False)


def registration_timeout(dry_run: list[str]) -> dict[str, str]:
    """Return the connector's configuration of each role with a short ``push_registration_timeout``."""
    plan = json.loads(subprocess.run(dry_run, check=True, capture_output=True).stdout)
    found = {}
    for process in plan["processes"]:
        if "--kv-transfer-config" in process["argv"]:
            config = json.loads(process["argv"][process["argv"].index("--kv-transfer-config") + 1])
            config["kv_connector_extra_config"]["push_registration_timeout"] = REGISTRATION_SECONDS
            found[process["role"]] = json.dumps(config)
    return found


def play_scene(folder: Path, scene: str) -> tuple[list[str], list[Answer]]:
    """Return what fired wrongly in one scene, and the answers to every query about its acts."""
    own = folder / scene
    own.mkdir(parents=True)
    with fleet(own, scene) as run_dir:
        engines, routers = targets(run_dir.read_plan())
        # Data of its own: rates and error budgets would otherwise go on from the scene before.
        with prometheus(own, engines, routers, write_quick_rules(own / "rules")) as url:
            began = time.time()
            time.sleep(5)
            wrong = asyncio.run(play(run_dir, SCRIPT[scene], url))
            answers = asyncio.run(check(url, window_seconds=int(time.time() - began), rate_window="10s"))
    (own / "answers.json").write_text(json.dumps([asdict(answer) for answer in answers]))
    return wrong, answers


def check_all(folder: Path) -> list[Answer]:
    """Return for every query its best answer in any of the scenes that were played in FOLDER."""
    scenes = [
        [Answer(**answer) for answer in json.loads(path.read_text())] for path in sorted(folder.glob("*/answers.json"))
    ]
    return [min(answers, key=lambda answer: answer.state != "data") for answers in zip(*scenes, strict=True)]


def empty(answers: list[Answer]) -> list[str]:
    return sorted({f"{each.source.removeprefix('kvops / ')}: {each.title}" for each in answers if each.state != "data"})


def main(folder: Path, what: str) -> int:
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    wrong, answers = ([], check_all(folder)) if what == "check" else play_scene(folder, what)
    full = sum(each.state == "data" for each in answers)
    print(f"{full} of {len(answers)} queries have data; without: {empty(answers)}", flush=True)
    if what == "check":
        wrong = [f"{name} is empty" for name in empty(answers)]
    for sentence in wrong:
        print(sentence, flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
