"""Running a workload: legs take turns round by round, requests leave when they are due and not when there is room."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from kvops.bench import counters
from kvops.bench.client import Ask, Client
from kvops.bench.results import Cell, CellCounters, Leg, RequestResult
from kvops.bench.workload import Sweep, Turns, arrival_times, gap_seconds, happens, prompt
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from typing import Any

    import aiohttp

# More requests than this under way means a server that stands still; memory must not follow.
_MAX_UNDER_WAY = 20_000


class Sink(Protocol):
    """What a workload tells while it runs."""

    def request(self, result: RequestResult) -> None:
        """Take a request that was measured."""

    def cell(self, counted: CellCounters) -> None:
        """Take what the engines counted during a cell."""


class Server(NamedTuple):
    """A leg and how to reach it."""

    leg: Leg
    client: Client


class Runner:
    """Runs workloads against some legs."""

    def __init__(self, session: aiohttp.ClientSession, servers: Sequence[Server], sink: Sink) -> None:
        """Prepare.

        Args:
            session: for the engines' metrics.
            servers: the legs.
            sink: gets every result.
        """
        self._session = session
        self._servers = servers
        self._sink = sink

    async def sweep(self, workload: Sweep) -> None:
        """Run every cell on every leg, round by round."""
        for number in range(workload.rounds):
            for cell in workload.cells:
                for server in _in_turn(self._servers, number):
                    await self._sweep_cell(server, workload, number, cell)

    async def turns(self, workload: Turns) -> None:
        """Hold every conversation on every leg, round by round."""
        for number in range(workload.rounds):
            for server in _in_turn(self._servers, number):
                await self._conversations(server, workload, number)

    async def _sweep_cell(self, server: Server, workload: Sweep, number: int, cell: Cell) -> None:
        asks = _sweep_asks(server.leg, workload, number, cell)
        await _one_by_one(server.client, _warm_up_asks(server.leg, workload, number, cell))
        if workload.prefill_cache == "warm":
            # The same prompts with the shortest answer: P keeps them in its prefix cache.
            await _one_by_one(server.client, (msgspec.structs.replace(ask, output_tokens=1) for ask in asks))
        if cell.rate_per_second:
            work = _open_loop(self._measured, server.client, zip(_due(workload, number, cell), asks, strict=True))
        else:
            work = self._closed_loop(server.client, asks, workload.seconds)
        await self._counted(server, number, cell, work)

    async def _conversations(self, server: Server, workload: Turns, number: int) -> None:
        rehearsal = msgspec.structs.replace(
            workload, conversations=1, turns=3, think_seconds=0.0, abort_rate=0.0, end_tokens=_rehearsal_end(workload)
        )
        await _Conversation(server, rehearsal, -1 - number, 0, _ignore).hold(time.monotonic())
        talks = [
            _Conversation(server, workload, number, index, self._sink.request)
            for index in range(workload.conversations)
        ]
        cell = Cell(input_tokens=workload.prompt_tokens(workload.turns), rate_per_second=workload.rate_per_second)
        await self._counted(server, number, cell, _all_talks(talks, workload, number))

    async def _measured(self, client: Client, ask: Ask, body: bytes, due: float) -> int:
        result, _ = await client.send(ask, body, due)
        self._sink.request(result)
        return result.prompt_tokens if result.outcome == "ok" else 0

    async def _closed_loop(self, client: Client, asks: Iterable[Ask], seconds: float) -> int:
        end, tokens = time.monotonic() + seconds, 0
        for ask in asks:
            if time.monotonic() > end:
                break
            tokens += await self._measured(client, ask, client.body(ask), time.monotonic())
        return tokens

    async def _counted(self, server: Server, number: int, cell: Cell, work: Coroutine[Any, Any, int]) -> None:
        try:
            before = await counters.read(self._session, server.leg)
        except BaseException:
            work.close()
            raise
        began, started, cpu = time.time(), time.monotonic(), time.process_time()
        prompt_tokens = await work
        seconds, cpu = time.monotonic() - started, time.process_time() - cpu
        added = await counters.settled(self._session, server.leg, before, prompt_tokens)
        self._sink.cell(
            CellCounters(
                leg=server.leg.name,
                round=number,
                cell=cell,
                started=began,
                seconds=seconds,
                prefill=added["prefill"],
                decode=added["decode"],
                client_cpu_share=cpu / seconds,
            )
        )


class _Conversation:
    """One conversation: each turn waits for the answer before it and a think time."""

    def __init__(
        self, server: Server, workload: Turns, number: int, index: int, tell: Callable[[RequestResult], None]
    ) -> None:
        self._server, self._workload, self._tell = server, workload, tell
        self._names = (workload.seed, server.leg.name, number, index)
        self._round, self._index = number, index
        self._id = f"{server.leg.name}-{uuid.uuid4().hex}"

    async def hold(self, due: float) -> int:
        """Run all turns from ``due`` on and return the prompt tokens of those that went well."""
        history: list[int] = []
        tokens = 0
        for turn in range(1, self._workload.turns + 1):
            ask = self._ask(turn, history)
            body = self._server.client.body(ask)
            await asyncio.sleep(due - time.monotonic())
            result, answer = await self._server.client.send(ask, body, due)
            self._tell(result)
            if result.outcome == "failed":
                break
            tokens += result.prompt_tokens if result.outcome == "ok" else 0
            history = [*ask.prompt, *answer]
            # Alike on every leg, so that the legs differ in nothing else.
            due = time.monotonic() + gap_seconds(
                self._workload.think_seconds, self._workload.seed, self._round, self._index, turn
            )
        return tokens

    def _ask(self, turn: int, history: list[int]) -> Ask:
        work = self._workload
        wanted = work.prompt_tokens(turn)
        new = prompt(max(1, wanted - len(history)), *self._names, turn)
        return Ask(
            leg=self._server.leg.name,
            round=self._round,
            cell=Cell(input_tokens=wanted, rate_per_second=work.rate_per_second),
            request_id=uuid.uuid4().hex,
            prompt=[*history, *new],
            new_tokens=len(new),
            output_tokens=work.output_tokens,
            conversation=self._id,
            send_conversation=self._server.leg.conversation_ids,
            turn=turn,
            abort=happens(work.abort_rate, work.seed, self._round, self._index, turn, "abort"),
        )


async def _all_talks(talks: Sequence[_Conversation], workload: Turns, number: int) -> int:
    if not workload.rate_per_second:
        return sum([await talk.hold(time.monotonic()) for talk in talks])
    start = time.monotonic()
    due = arrival_times(workload.rate_per_second, workload.arrivals, workload.seed, number)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(talk.hold(start + after)) for talk, after in zip(talks, due, strict=False)]
    return sum(task.result() for task in tasks)


async def _open_loop(
    measured: Callable[[Client, Ask, bytes, float], Coroutine[Any, Any, int]],
    client: Client,
    due_asks: Iterable[tuple[float, Ask]],
) -> int:
    """Send every request when it is due, whatever became of those before, and return the tokens that went well."""
    start = time.monotonic()
    tasks: list[asyncio.Task[int]] = []
    under_way: set[asyncio.Task[int]] = set()
    async with asyncio.TaskGroup() as group:
        for after, ask in due_asks:
            # Before the wait, so that encoding a long prompt delays nothing.
            body = client.body(ask)
            await asyncio.sleep(start + after - time.monotonic())
            if len(under_way) >= _MAX_UNDER_WAY:
                raise KvopsError(f"{_MAX_UNDER_WAY} requests are under way at once", "lower --rates or --seconds")
            task = group.create_task(measured(client, ask, body, start + after))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            tasks.append(task)
    return sum(task.result() for task in tasks)


async def _one_by_one(client: Client, asks: Iterable[Ask]) -> None:
    """Send requests that are in no figure; the first failure says what is wrong before anything is measured.

    Raises:
        KvopsError: one failed.
    """
    for ask in asks:
        result, _ = await client.send(ask, client.body(ask), time.monotonic())
        if result.outcome == "failed":
            raise KvopsError(f"the warm-up of {ask.leg} failed: {result.error}", "look at the engines' logs")


def _sweep_asks(leg: Leg, workload: Sweep, number: int, cell: Cell) -> Iterable[Ask]:
    """Return the requests of a cell: as many as are due within its seconds, or without end for rate 0."""
    if not cell.rate_per_second:
        return (_sweep_ask(leg, workload, number, cell, index) for index in itertools.count())
    return [_sweep_ask(leg, workload, number, cell, index) for index in range(len(_due(workload, number, cell)))]


def _warm_up_asks(leg: Leg, workload: Sweep, number: int, cell: Cell) -> Iterable[Ask]:
    return (_sweep_ask(leg, workload, -1 - number, cell, index) for index in range(workload.warm_up))


def _sweep_ask(leg: Leg, workload: Sweep, number: int, cell: Cell, index: int) -> Ask:
    # The leg is one of the names: where two legs share engines, neither must find the other's prompts cached.
    which = index if workload.unique_prompts or number < 0 else 0
    return Ask(
        leg=leg.name,
        round=number,
        cell=cell,
        request_id=uuid.uuid4().hex,
        prompt=prompt(cell.input_tokens, workload.seed, leg.name, number, cell, which),
        new_tokens=cell.input_tokens,
        output_tokens=workload.output_tokens,
    )


def expected_requests(workload: Sweep | Turns, legs: int) -> int:
    """Return how many requests a workload measures; 0 if that depends on how fast they are answered."""
    if isinstance(workload, Turns):
        return workload.rounds * workload.conversations * workload.turns * legs
    if any(not cell.rate_per_second for cell in workload.cells):
        return 0
    return legs * sum(len(_due(workload, number, cell)) for number in range(workload.rounds) for cell in workload.cells)


def _due(workload: Sweep, number: int, cell: Cell) -> list[float]:
    """Return when the requests of a cell are due, in seconds after its start; alike for every leg."""
    due = arrival_times(cell.rate_per_second, workload.arrivals, workload.seed, number, cell)
    return list(itertools.takewhile(lambda after: after < workload.seconds, due))


def _in_turn(servers: Sequence[Server], number: int) -> list[Server]:
    """Return the legs in this round's order: each is first as often as the others."""
    first = number % len(servers)
    return [*servers[first:], *servers[:first]]


def _rehearsal_end(workload: Turns) -> int:
    return workload.start_tokens + 2 * (workload.output_tokens + 64)


def _ignore(_: RequestResult) -> None:
    return None
