"""The worker's side: what one rank sees of loads, pushes, holds and handshakes.

Private methods of vLLM's worker are wrapped on the instance, only those whose signature has not changed from vLLM 0.24
to 0.33; one that is missing costs its fields in the record and nothing else. Hooks run on the worker's main thread, on
the handshake thread and, for push, on the writer thread: they share nothing but appends to a deque and single dict
operations.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from kvops_connectors.bounded import TRACKED_BY_RANK, Bounded
from kvops_connectors.events import (
    Errors,
    Event,
    Handshake,
    Levels,
    LoadFailed,
    PeerDone,
    PushMet,
    ReadbackLost,
    ReadBegan,
    RegistrationSent,
)
from kvops_connectors.guard import Guard
from kvops_connectors.handle import EXPIRY_MARGIN_SECONDS
from kvops_connectors.push import CANCELLED, Pushes, Registrations
from kvops_connectors.reconnect import PullReconnect, PushReconnect
from kvops_connectors.tap import AgentTap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvops_connectors.settings import Settings

LEVELS_INTERVAL_SECONDS = 1.0


class WorkerInstrument:
    """Listens on one rank.

    Attributes:
        guard: counts the errors of this instrument.
        forgiven_blocks: local blocks of lost readbacks, to be left out of the load errors of this step.
    """

    def __init__(self, worker: Any, rank: int, settings: Settings, push_timeout_seconds: float) -> None:
        self.guard = Guard("worker")
        self.forgiven_blocks: set[int] = set()
        self._worker = worker
        self._rank = rank
        self._events: deque[Event] = deque(maxlen=100_000)
        self._tap = AgentTap(worker, rank, self.guard, self._events.append)
        self._asked_at: Bounded[str, float] = Bounded(TRACKED_BY_RANK)
        self._readbacks: Bounded[str, frozenset[int]] = Bounded(TRACKED_BY_RANK)
        self._handshake_outcomes: Bounded[str, str] = Bounded(1000)
        self._registered_at: Bounded[str, float] = Bounded(TRACKED_BY_RANK)
        self._prefill_done_at: Bounded[str, float] = Bounded(TRACKED_BY_RANK)
        self._levels: tuple[int, int, int] = (0, 0, 0)
        self._levels_due = 0.0
        self._push = hasattr(worker, "_push_finished_blocks")
        self._registrations = Registrations(worker, settings, push_timeout_seconds, self._events.append)
        self._pushes = Pushes(worker, settings, self._events.append)
        self._tap.on_registration = self._registration_arrived
        self._reconnect = PushReconnect(worker, settings, self._pushes.decode_of, self._registrations.is_awaited)
        if settings.reconnect and not self._push:
            PullReconnect(worker)
        self._wrap("_read_blocks_for_req", self._around_read)
        self._wrap("_xfer_blocks_for_req", self._around_write)
        self._wrap("_do_start_push_kv", self._around_push)
        self._wrap("_do_send_reg_notif", self._around_registration)
        self._wrap("_nixl_handshake", self._around_handshake)
        self._wrap("_log_failure", self._around_failure)

    def loads_asked(self, metadata: Any) -> None:
        """Note what the scheduler asks of this step; called before vLLM's start_load_kv."""
        if metadata.reqs_to_recv:
            now = time.perf_counter()
            readbacks = getattr(metadata, "kvops_readbacks", ())
            for request_id, meta in metadata.reqs_to_recv.items():
                self._asked_at[request_id] = now
                if request_id in readbacks:
                    self._readbacks[request_id] = (
                        frozenset(meta.local_block_ids[0]) if meta.local_block_ids else frozenset()
                    )
        if self._push:
            for request_id in metadata.push_finished_blocks:
                self._prefill_done_at[request_id] = time.time()
            self._registrations.add(metadata.push_registrations)

    def results(self, sent: Iterable[str] | None, received: Iterable[str] | None) -> None:
        """Note which requests vLLM reports as sent and received in this step."""
        for request_id in sent or ():
            if request_id in self._tap.noticed:
                self._events.append(PeerDone(request_id, self._tap.noticed.pop(request_id)))
            self._prefill_done_at.pop(request_id, None)
            self._pushes.over(request_id)
        # Notices of a pull that are left now come from some of several readers: expiry may still win.
        if not self._push and self._tap.noticed:
            self._tap.noticed.clear()
        for request_id in received or ():
            self._asked_at.pop(request_id, None)
            self._readbacks.pop(request_id, None)
            self._registrations.pop(request_id)
        now = time.perf_counter()
        self._registrations.expire(now)
        self._pushes.retry(now)
        self._pushes.forget(now)
        self._reconnect.let_go()

    def forgive(self, failed: Iterable[str]) -> set[str]:
        """Return the readbacks among the failed loads; each is told to the scheduler's side as lost."""
        lost = {request_id for request_id in failed if request_id in self._readbacks}
        for request_id in lost:
            self.forgiven_blocks |= self._readbacks.pop(request_id)
            self._events.append(ReadbackLost(request_id))
        return lost

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        if self._rank == 0:
            self.guard(self._report_levels)
        if self.guard.errors:
            self._events.append(Errors(self.guard.take_errors()))
        events = self._events
        return [events.popleft() for _ in range(len(events))]

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        original = getattr(self._worker, name, None)
        if original is None:
            return

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(self._worker, name, wrapped)

    def _around_read(self, original: Callable[..., Any], req_id: str, meta: Any) -> Any:
        current, posted = self._tap.current, self._tap.posted
        began = self.guard(self._read_began, req_id, meta)
        current.request_id = req_id
        try:
            return original(req_id, meta)
        finally:
            current.request_id = current.peer = None
            if began is not None and self._tap.posted == posted:
                self.guard(self._read_not_posted, meta, began)

    def _read_began(self, req_id: str, meta: Any) -> ReadBegan | None:
        remote = meta.remote
        self._tap.current.peer = peer = f"{remote.host}:{remote.port}"
        if remote.engine_id in getattr(self._worker, "_invalid_remote_engines", ()):
            self._events.append(LoadFailed(req_id, "remote_gone"))
            return None
        if remote.engine_id not in self._worker._remote_agents:
            return None
        now = time.perf_counter()
        waited = now - self._asked_at.pop(req_id, now)
        began = ReadBegan(req_id, peer, remote.engine_id, waited, self._ttl_left(remote, now))
        self._events.append(began)
        return began

    def _ttl_left(self, remote: Any, now: float) -> float | None:
        expiry = getattr(remote, "blocks_expiry_time", None)
        offset = getattr(self._worker, "_engine_clock_offset", {}).get(remote.engine_id)
        return None if expiry is None or offset is None else expiry - offset - now

    def _read_not_posted(self, meta: Any, began: ReadBegan) -> None:
        left = began.ttl_left_seconds
        if left is not None and left <= EXPIRY_MARGIN_SECONDS and any(meta.local_block_ids):
            self._events.append(LoadFailed(began.request_id, "ttl_expired"))

    def _around_write(self, original: Callable[..., Any], req_id: str, meta: Any) -> Any:
        self._tap.current.request_id = req_id
        try:
            return original(req_id=req_id, meta=meta)
        finally:
            self._tap.current.request_id = self._tap.current.peer = None

    def _around_push(self, original: Callable[..., Any], request_id: str, blocks: Any, registration: Any) -> Any:
        if registration.get(CANCELLED) or self.guard(self._pushes.is_stale, request_id, registration):
            return None
        self.guard(self._pushes.began, request_id, blocks, registration)
        self.guard(self._push_met, request_id, registration)
        # Nobody may let go of the peer meanwhile.
        with self._reconnect.lock:
            return original(request_id, blocks, registration)

    def _push_met(self, request_id: str, registration: dict[str, Any]) -> None:
        peer = f"{registration['decode_host']}:{registration['decode_port']}"
        self._tap.current.peer = peer
        done_at = self._prefill_done_at.pop(request_id, None)
        # The second call for a request, after the handshake, finds nothing here.
        if done_at is not None:
            registered_at = self._registered_at.pop(registration["request_id"], done_at)
            engine = registration["decode_engine_id"]
            self._events.append(PushMet(self._rank, request_id, peer, engine, registered_at, done_at))

    def _registration_arrived(self, payload: bytes) -> None:
        registration = self._pushes.registered(payload)
        self._registered_at[registration.request_id] = time.time()

    def _around_registration(self, original: Callable[..., Any], req_id: str, registration: Any) -> Any:
        if not registration.get(CANCELLED):
            self._events.append(RegistrationSent(req_id, time.time()))
        return self._reconnect.register(original, req_id, registration)

    def _around_handshake(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        outcome = "ok"
        try:
            return original(*args, **kwargs)
        except Exception as error:
            outcome = _handshake_outcome(error)
            raise
        finally:
            seconds = time.perf_counter() - start
            self.guard(self._handshake_ended, args, kwargs, seconds, outcome)

    def _handshake_ended(self, args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float, outcome: str) -> None:
        engine = args[3] if len(args) > 3 else kwargs.get("expected_engine_id", "")
        self._handshake_outcomes[engine] = outcome
        self._events.append(Handshake(self._rank, seconds, outcome))

    def _around_failure(
        self, original: Callable[..., Any], failure_type: str, req_id: str | None, *args: Any, **kwargs: Any
    ) -> Any:
        self.guard(self._failure_logged, failure_type, req_id, kwargs.get("meta"))
        if req_id is not None:
            self.guard(self._reconnect.failed, req_id, kwargs.get("error"), kwargs.get("dst_engine_id"))
        return original(failure_type, req_id, *args, **kwargs)

    def _failure_logged(self, failure_type: str, req_id: str | None, meta: Any) -> None:
        if req_id is None or "notif" in failure_type or "release" in failure_type:
            return
        if failure_type == "push_handshake_failed":
            self._pushes.parted(req_id)
        reason = "handshake_failed" if "handshake" in failure_type else "transfer_failed"
        meta = meta or self._worker._recving_metadata.get(req_id)
        if reason == "handshake_failed" and meta is not None and meta.remote is not None:
            outcome = self._handshake_outcomes.get(meta.remote.engine_id)
            reason = "remote_gone" if outcome in ("timeout", "engine_mismatch") else reason
        self._events.append(LoadFailed(req_id, reason))

    def _report_levels(self) -> None:
        worker, tap, now = self._worker, self._tap, time.perf_counter()
        waiting = (len(worker._pending_d_registrations), len(self._unmatched())) if self._push else (0, 0)
        levels = (len(worker._remote_agents), *waiting)
        counted = tap.heartbeats_sent or tap.heartbeats_failed or tap.lease_renewals
        if levels == self._levels and not counted and not (any(waiting) and now >= self._levels_due):
            return
        self._levels, self._levels_due = levels, now + LEVELS_INTERVAL_SECONDS
        ages = (
            (
                _oldest(self._registered_at, worker._pending_d_registrations),
                _oldest(self._prefill_done_at, self._unmatched()),
            )
            if any(waiting)
            else (0.0, 0.0)
        )
        counts = (tap.heartbeats_sent, tap.heartbeats_failed, tap.lease_renewals)
        tap.heartbeats_sent = tap.heartbeats_failed = tap.lease_renewals = 0
        self._events.append(Levels(*levels, *ages, *counts))

    def _unmatched(self) -> list[str]:
        # The writer thread drops blocks that have expired only after this step, which may be the last one for long.
        return [
            request_id for request_id in list(self._worker._push_finished_blocks) if request_id in self._prefill_done_at
        ]


def _handshake_outcome(error: Exception) -> str:
    message = str(error).lower()
    if type(error).__name__ in ("Again", "TimeoutError"):
        return "timeout"
    if "engine id mismatch" in message:
        return "engine_mismatch"
    return "incompatible" if "compatib" in message else "error"


def _oldest(times: dict[str, float], waiting: Iterable[str]) -> float:
    now = time.time()
    return max((now - times[request_id] for request_id in list(waiting) if request_id in times), default=0.0)
