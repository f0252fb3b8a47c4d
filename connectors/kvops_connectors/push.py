"""Push: the mends of how registrations and finished blocks find each other."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import msgspec

from kvops_connectors.bounded import TRACKED_BY_RANK, Bounded
from kvops_connectors.events import Event, PushRetried, RegistrationLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvops_connectors.settings import Settings

RETRY_SECONDS = 1.0

# Keys in a registration: it takes an earlier one of the same request back; how long decode waits for its fulfilment.
CANCELLED = "kvops_cancelled"
TIMEOUT = "kvops_timeout_seconds"


class Registrations:
    """Push, on decode: gives up registrations that nobody fulfils.

    A registration that is given up goes through two steps. First prefill is told to forget it, by a second registration
    under the same request id, which replaces the first: it names an engine that does not exist, so that a stock prefill
    fails the handshake and never writes. After a grace time, in which a write that had already begun ends, the load is
    reported as failed and vLLM frees the blocks.
    """

    def __init__(self, worker: Any, settings: Settings, timeout_seconds: float, emit: Callable[[Event], None]) -> None:
        self._worker = worker
        self._on = settings.push_timeout and hasattr(worker, "_reg_send_inbox") and hasattr(worker, "_failed_recv_reqs")
        self._timeout = timeout_seconds
        self._grace = settings.push_cancel_grace_seconds
        self._emit = emit
        self._waiting: Bounded[str, tuple[float, dict[str, Any]]] = Bounded(TRACKED_BY_RANK)
        self._cancelled: Bounded[str, float] = Bounded(TRACKED_BY_RANK)

    def add(self, registrations: dict[str, dict[str, Any]]) -> None:
        """Start the clock of new registrations, and tell prefill how long it runs."""
        if self._on and registrations:
            deadline = time.perf_counter() + self._timeout
            for request_id, registration in registrations.items():
                registration[TIMEOUT] = self._timeout
                self._waiting[request_id] = (deadline, registration)

    def is_awaited(self, request_id: str) -> bool:
        """Return whether a registration may still be fulfilled."""
        return request_id in self._waiting

    def pop(self, request_id: str) -> None:
        """Forget a registration that was fulfilled or has failed."""
        self._waiting.pop(request_id, None)
        self._cancelled.pop(request_id, None)

    def expire(self, now: float) -> None:
        """Take the next step for every registration whose time has come; both maps are in order of time."""
        while self._waiting:
            request_id, (deadline, registration) = next(iter(self._waiting.items()))
            if deadline > now:
                break
            del self._waiting[request_id]
            self._cancel(request_id, registration)
            self._cancelled[request_id] = now + self._grace
        while self._cancelled:
            request_id, deadline = next(iter(self._cancelled.items()))
            if deadline > now:
                break
            del self._cancelled[request_id]
            self._emit(RegistrationLost(request_id))
            if request_id in self._worker._recving_metadata:
                self._worker._failed_recv_reqs.put(request_id)

    def _cancel(self, request_id: str, registration: dict[str, Any]) -> None:
        cancelled = {**registration, "decode_engine_id": f"cancelled-{request_id}", CANCELLED: True}
        self._worker._reg_send_inbox.put((request_id, cancelled))
        self._worker._push_writer_wake.set()


class Registration(msgspec.Struct):
    """What prefill needs of a registration; the long lists of block ids stay undecoded."""

    request_id: str
    kvops_cancelled: bool = False
    kvops_timeout_seconds: float = math.inf


class Pushes:
    """Push, on prefill: writes whose handshake with decode has failed are tried again, stale registrations dropped.

    vLLM takes the registration and the blocks out of its lists before it shakes hands with decode, and drops both when
    that fails, as it does when decode's answer takes longer than 5 seconds: decode then waits for its whole timeout for
    a write that nobody starts. Here they are kept and handed in again for as long as the blocks are held. And a
    registration that meets no request stays in vLLM's lists for ever, here only as long as decode waits for it.
    """

    def __init__(self, worker: Any, settings: Settings, emit: Callable[[Event], None]) -> None:
        self._worker = worker
        self._on = settings.push_retry and hasattr(worker, "_deferred_push_inbox")
        self._forgets = settings.push_timeout and hasattr(worker, "_evict_finished_inbox")
        self._forget_at = 0.0
        self._emit = emit
        self._decoder = msgspec.msgpack.Decoder(Registration)
        self._begun: Bounded[str, tuple[Any, dict[str, Any]]] = Bounded(TRACKED_BY_RANK)
        self._due: Bounded[str, float] = Bounded(TRACKED_BY_RANK)
        self._deadlines: Bounded[str, float] = Bounded(TRACKED_BY_RANK)
        self._over: Bounded[str, bool] = Bounded(TRACKED_BY_RANK)

    def registered(self, payload: bytes) -> Registration:
        """Take note of a registration that has arrived, and return what it says.

        Raises:
            msgspec.DecodeError: it is no registration.
        """
        registration = self._decoder.decode(payload)
        seconds = 0.0 if registration.kvops_cancelled else registration.kvops_timeout_seconds
        self._deadlines[registration.request_id] = time.perf_counter() + seconds
        return registration

    def is_stale(self, request_id: str, registration: dict[str, Any]) -> bool:
        """Return whether the blocks of a write are free by now, on either side.

        Decode's word that it waits no longer is lost where the link is; that is why it also says for how long it waits.
        """
        return request_id in self._over or time.perf_counter() >= self._deadlines.get(
            registration["request_id"], math.inf
        )

    def began(self, request_id: str, blocks: Any, registration: dict[str, Any]) -> None:
        """Keep what a write needs until the hold on the blocks ends."""
        self._begun[request_id] = blocks, registration

    def decode_of(self, request_id: str) -> str | None:
        """Return the engine that a held request is being written to, None once its hold has ended."""
        begun = self._begun.get(request_id)
        return None if begun is None else str(begun[1]["decode_engine_id"])

    def over(self, request_id: str) -> None:
        """Forget a write whose hold has ended."""
        self._over[request_id] = True
        self._begun.pop(request_id, None)
        self._due.pop(request_id, None)

    def parted(self, request_id: str) -> None:
        """Take up a write whose handshake has failed; called on the handshake thread."""
        if self._on and request_id in self._begun:
            self._due[request_id] = time.perf_counter() + RETRY_SECONDS

    def retry(self, now: float) -> None:
        """Hand in again every write whose time has come; the map is in order of time."""
        # A copy: the handshake thread adds to it.
        for request_id, due in list(self._due.items()):
            if due > now:
                break
            self._due.pop(request_id, None)
            if (begun := self._begun.get(request_id)) is not None:
                self._emit(PushRetried(request_id))
                self._worker._deferred_push_inbox.put((request_id, *begun))
                self._worker._push_writer_wake.set()

    def forget(self, now: float) -> None:
        """Have the writer thread drop, once a second, every registration that decode no longer waits for."""
        if not self._forgets or now < self._forget_at:
            return
        self._forget_at = now + RETRY_SECONDS
        # A copy: the writer thread adds to it.
        for request_id in list(self._worker._pending_d_registrations):
            if now >= self._deadlines.get(request_id, math.inf):
                self._worker._evict_finished_inbox.put(request_id)
                self._worker._push_writer_wake.set()
