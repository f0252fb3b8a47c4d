"""The engines behind the router, their state, and the choice among them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from kvops.router.errors import RouterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvops.router.handles import Identity

Role = Literal["prefill", "decode"]
ProbeOutcome = Literal["alive", "slow", "dead"]

# Failures in a row before an engine gets no more requests: one may be the request's own fault.
_FAILURES_TO_DOWN = 3
# Two probes that find an engine dead, or six that it is too slow to answer: a slow engine may only be a busy one.
_MISSED: dict[ProbeOutcome, int] = {"dead": 3, "slow": 1}
_MISSED_TO_DOWN = 6
_FIRST_BACK_OFF_SECONDS = 1.0
_LONGEST_BACK_OFF_SECONDS = 30.0
# vLLM preempts when the cache is full; an engine this full is chosen only when all are.
_FULL_KV_USAGE = 0.95


class Endpoint:
    """One engine, or one data-parallel rank of it.

    Attributes:
        in_flight: requests that this router has under way there.
        draining: gets no new requests, finishes those it has.
        waiting: requests in the engine's own queue at the last look.
        kv_usage: used part of its KV cache at the last look.
        started_at: when its process started, as it says itself in Unix seconds; None until it has.
        generation: counts the starts seen; what was learned of an earlier one does not hold.
        identity: its NIXL side, once it is known.
        transfer_mode: push or pull, once it is known.
        bidirectional: whether it reads KV back, None where it does not say.
        has_answered: whether it has ever answered a probe or a request.
    """

    def __init__(self, role: Role, url: str, rank: int | None = None) -> None:
        """Remember where it is, such as ``http://127.0.0.1:8100`` and rank 1."""
        self.role = role
        self.url = url.rstrip("/")
        self.rank = rank
        self.host = urlsplit(self.url).hostname or ""
        self.name = self.url if rank is None else f"{self.url}#{rank}"
        self.in_flight = 0
        self.draining = False
        self.waiting = 0
        self.kv_usage = 0.0
        self.started_at: float | None = None
        self.generation = 0
        self.identity: Identity | None = None
        self.transfer_mode: str | None = None
        self.bidirectional: bool | None = None
        self.has_answered = False
        self._failures = 0
        self._missed_probes = 0
        self._down_until: float | None = None
        self._back_off = _FIRST_BACK_OFF_SECONDS
        self._on_trial = False

    @property
    def state(self) -> str:
        """Return up, down, half_open (one request may try whether it is back) or draining."""
        if self.draining:
            return "draining"
        if self._down_until is None:
            return "up"
        return "half_open" if time.monotonic() >= self._down_until else "down"

    def takes_requests(self) -> bool:
        """Return whether a new request may go there."""
        if self._down_until is None:
            return not self.draining
        return self.state == "half_open" and not self._on_trial

    def begin(self) -> None:
        """Note that a request goes there: a half-open engine gets one at a time."""
        self.in_flight += 1
        self._on_trial = self.state == "half_open"

    def end(self) -> None:
        """Note that a request there has ended, whatever became of it: another one may try a half-open engine."""
        self.in_flight -= 1
        self._on_trial = False

    def succeeded(self) -> None:
        """Note an answer: the engine is up, whatever a probe that waited in the same queue says."""
        self.has_answered = True
        self._failures = 0
        self._missed_probes = 0
        self._down_until = None
        self._back_off = _FIRST_BACK_OFF_SECONDS

    def failed(self) -> None:
        """Note that it could not be reached or broke off; after a few in a row it rests for a while."""
        self._failures += 1
        if self._failures >= _FAILURES_TO_DOWN:
            self._rest()

    def probed(self, outcome: ProbeOutcome) -> None:
        """Note a health probe. A good one ends a rest early, so that one request may try; it proves no more."""
        if outcome != "alive":
            self._missed_probes += _MISSED[outcome]
            if self._missed_probes >= _MISSED_TO_DOWN:
                self._rest()
            return
        self.has_answered = True
        if self._missed_probes:
            if self._missed_probes >= _MISSED_TO_DOWN and self._down_until is not None:
                self._down_until = time.monotonic()
            self._missed_probes = 0

    def _rest(self) -> None:
        self._down_until = time.monotonic() + self._back_off
        self._back_off = min(2 * self._back_off, _LONGEST_BACK_OFF_SECONDS)

    def restarted(self) -> None:
        """Forget what was learned of the engine: another process answers at its address now."""
        self.generation += 1
        self.identity = None
        self.transfer_mode = None
        self.bidirectional = None

    @property
    def load(self) -> tuple[bool, int]:
        """Return what is compared in the choice: whether its cache is full, and the requests before a new one."""
        return self.kv_usage >= _FULL_KV_USAGE, self.in_flight + self.waiting


class Pool:
    """All engines of one role."""

    def __init__(
        self, role: Role, endpoints: Sequence[Endpoint] = (), *, in_flight: int = 512, queued: int = 1024
    ) -> None:
        """Start with ``endpoints``.

        Args:
            role: prefill or decode.
            endpoints: the engines; may change later.
            in_flight: requests under way on one engine at a time.
            queued: requests that may wait for a place.
        """
        self.role = role
        self.endpoints = list(endpoints)
        self._in_flight = in_flight
        self._queued = queued
        self._turn = 0
        self._waiters = 0
        self._freed = asyncio.Event()

    @property
    def waiters(self) -> int:
        """Return how many requests wait for a place."""
        return self._waiters

    def choose(self, avoid: Endpoint | None = None, prefer: Endpoint | None = None) -> Endpoint:
        """Return the engine for a new request: the one with the least load; equals take turns.

        Args:
            avoid: not this one where there is another.
            prefer: this one where its load allows: when no other has clearly less to do.

        Raises:
            RouterError: no engine takes requests (503), or none has room (429).
        """
        free = self._free()
        others = [endpoint for endpoint in free if endpoint is not avoid] or free
        least = min(others, key=lambda endpoint: endpoint.load)
        chosen = prefer if prefer in others and _about_as_free(prefer, least) else least
        self._turn = (self.endpoints.index(chosen) + 1) % len(self.endpoints)
        return chosen

    async def take(
        self, avoid: Endpoint | None = None, prefer: Endpoint | None = None, *, wait_seconds: float
    ) -> Endpoint:
        """Return the engine for a new request as ``choose`` does, waiting in a bounded queue while none has room.

        Raises:
            RouterError: no engine takes requests (503), the queue is full or the wait was too long (429).
        """
        await self.room(wait_seconds)
        return self.choose(avoid, prefer)

    async def room(self, wait_seconds: float) -> None:
        """Return once an engine has room for a request.

        Raises:
            RouterError: as in ``take``.
        """
        if any(map(self._has_room, self.endpoints)):
            return
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                self._free()
            except RouterError as error:
                if error.status != 429 or self._waiters >= self._queued or time.monotonic() >= deadline:
                    raise
                await self._wait_for_end(deadline)
            else:
                return

    def _has_room(self, endpoint: Endpoint) -> bool:
        return endpoint.in_flight < self._in_flight and endpoint.takes_requests()

    def _free(self) -> list[Endpoint]:
        """Return the engines that have room, the one whose turn it is first; at least one."""
        in_turn = self.endpoints[self._turn :] + self.endpoints[: self._turn]
        able = [endpoint for endpoint in in_turn if endpoint.takes_requests()]
        if not able:
            raise RouterError(
                503, "no_engine", f"no {self.role} engine takes requests at the moment", retry_after_seconds=2
            )
        free = [endpoint for endpoint in able if endpoint.in_flight < self._in_flight]
        if not free:
            raise RouterError(
                429, "overloaded", f"every {self.role} engine has as many requests as it takes", retry_after_seconds=1
            )
        return free

    def begin(self, endpoint: Endpoint) -> None:
        """Count a request on ``endpoint``."""
        endpoint.begin()

    def end(self, endpoint: Endpoint) -> None:
        """Count its end, whatever became of it, and call the next in the queue."""
        endpoint.end()
        if self._waiters:
            self._freed.set()

    def find(self, name: str) -> Endpoint | None:
        """Return the endpoint of that name."""
        return next((endpoint for endpoint in self.endpoints if endpoint.name == name), None)

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        """Replace the engines and return those that are gone.

        One that stays keeps its state; requests on one that goes run to their end, and its handles are void.
        """
        kept = [self.find(endpoint.name) or endpoint for endpoint in endpoints]
        gone = [endpoint for endpoint in self.endpoints if endpoint not in kept]
        for endpoint in gone:
            endpoint.restarted()
        self.endpoints = kept
        self._turn = 0
        self._freed.set()
        return gone

    async def _wait_for_end(self, deadline: float) -> None:
        self._waiters += 1
        self._freed.clear()
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._freed.wait()
        except TimeoutError:
            pass
        finally:
            self._waiters -= 1


def _about_as_free(endpoint: Endpoint, least: Endpoint) -> bool:
    # Reading a conversation's KV where it lies saves more than one or two places in a queue cost.
    return endpoint.load[0] <= least.load[0] and endpoint.load[1] <= least.load[1] + 2
