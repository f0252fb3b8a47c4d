"""Listens to the calls that vLLM makes on one rank's NIXL agent.

The tap shadows six methods on the live agent object. Each shadow calls the original exactly once and hands on its
result or its exception; what is noted down around the call is guarded. ``check_xfer_state`` is left alone: vLLM polls
it for every handle in every step, and the telemetry call says the same once.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvops_connectors.bounded import TRACKED_BY_RANK, Bounded
from kvops_connectors.events import Ended, Event, LateNotice, Posted

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvops_connectors.guard import Guard

HEARTBEAT = b"HB:"
REGISTRATION = b"PUSH_REG:"
MICROSECONDS = 1e-6


class Current(threading.local):
    """The request that this thread works on, and its peer."""

    request_id: str | None = None
    peer: str | None = None


@dataclass(slots=True)
class _Transfer:
    key: int
    request_id: str | None
    peer: str | None
    operation: str
    telemetry: Any = None
    posted: bool = False


class AgentTap:
    """The tap on one agent.

    Attributes:
        current: set it around a call into the worker to say which request the agent's calls belong to.
        posted: transfers handed to NIXL so far.
        noticed: request id -> seconds left of its hold when the peer's completion notice came.
        heartbeats_sent, heartbeats_failed, lease_renewals: counts since the reader last set them to 0.
        on_registration: called with the payload of each push registration that arrives.
    """

    def __init__(self, worker: Any, rank: int, guard: Guard, emit: Callable[[Event], None]) -> None:
        self.current = Current()
        self.posted = 0
        self.noticed: Bounded[str, float | None] = Bounded(TRACKED_BY_RANK)
        self.heartbeats_sent = self.heartbeats_failed = self.lease_renewals = 0
        self.on_registration: Callable[[bytes], None] | None = None
        self._worker = worker
        self._rank = rank
        self._guard = guard
        self._emit = emit
        # By id(): a NIXL handle cannot be weakly referenced, and keeping it alive would put off its clean-up.
        self._transfers: dict[int, _Transfer] = {}
        agent = worker.nixl_wrapper
        for name in ("make_prepped_xfer", "transfer", "get_xfer_telemetry", "release_xfer_handle"):
            setattr(agent, name, getattr(self, f"_{name}")(getattr(agent, name)))
        agent.send_notif = self._send_notif(agent.send_notif)
        agent.get_new_notifs = self._get_new_notifs(agent.get_new_notifs)

    def _make_prepped_xfer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make_prepped_xfer(operation: str, *args: Any, **kwargs: Any) -> Any:
            handle = original(operation, *args, **kwargs)
            self._guard(self._note_made, handle, operation)
            return handle

        return make_prepped_xfer

    def _note_made(self, handle: Any, operation: str) -> None:
        self.posted += 1
        self._transfers[_key(handle)] = _Transfer(self.posted, self.current.request_id, self.current.peer, operation)

    def _transfer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def transfer(handle: Any, *args: Any, **kwargs: Any) -> Any:
            # Noted first: a small transfer can end, and its notice arrive, before the call returns.
            self._guard(self._note_posted, handle)
            return original(handle, *args, **kwargs)

        return transfer

    def _note_posted(self, handle: Any) -> None:
        entry = self._transfers.get(_key(handle))
        if entry is not None:
            entry.posted = True
            self._emit(Posted(self._rank, entry.key, entry.request_id, entry.operation))

    def _get_xfer_telemetry(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_xfer_telemetry(handle: Any, *args: Any, **kwargs: Any) -> Any:
            telemetry = original(handle, *args, **kwargs)
            self._guard(self._note_done, handle, telemetry)
            return telemetry

        return get_xfer_telemetry

    def _note_done(self, handle: Any, telemetry: Any) -> None:
        entry = self._transfers.get(_key(handle))
        if entry is not None:
            entry.telemetry = telemetry

    def _release_xfer_handle(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def release_xfer_handle(handle: Any, *args: Any, **kwargs: Any) -> Any:
            key = _key(handle)
            result = original(handle, *args, **kwargs)
            self._guard(self._note_released, key)
            return result

        return release_xfer_handle

    def _note_released(self, key: int) -> None:
        entry = self._transfers.pop(key, None)
        if entry is None or not entry.posted:
            return
        done = entry.telemetry
        figures = (
            (done.postDuration * MICROSECONDS, done.xferDuration * MICROSECONDS, done.totalBytes, done.descCount)
            if done is not None
            else (0.0, 0.0, 0, 0)
        )
        ok = done is not None
        self._emit(
            Ended(self._rank, entry.key, entry.request_id, entry.operation, ok, entry.peer, *figures),
        )
        if ok and entry.operation == "WRITE" and entry.request_id is not None:
            self._note_peer_done(entry.request_id)

    def _send_notif(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def send_notif(agent_name: str, *args: Any, **kwargs: Any) -> Any:
            message = kwargs.get("notif_msg") or (args[0] if args else b"")
            heartbeat = message[:3] == HEARTBEAT
            try:
                result = original(agent_name, *args, **kwargs)
            except Exception:
                self.heartbeats_failed += heartbeat
                raise
            self.heartbeats_sent += heartbeat
            return result

        return send_notif

    def _get_new_notifs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_new_notifs(*args: Any, **kwargs: Any) -> Any:
            notices = original(*args, **kwargs)
            if notices:
                self._guard(self._note_notices, notices)
            return notices

        return get_new_notifs

    def _note_notices(self, notices: dict[str, list[bytes]]) -> None:
        for messages in notices.values():
            for message in messages:
                if message.startswith(HEARTBEAT):
                    held = self._worker._reqs_to_send
                    self.lease_renewals += sum(name in held for name in message[3:].decode().split(","))
                elif message.startswith(REGISTRATION):
                    if self.on_registration is not None:
                        self.on_registration(message[len(REGISTRATION) :])
                else:
                    self._note_completion(message.decode().rsplit(":", 1)[0])

    def _note_completion(self, request_id: str) -> None:
        worker = self._worker
        if request_id in worker._reqs_to_send or request_id in worker._reqs_to_process:
            self._note_peer_done(request_id)
        elif request_id not in worker._recving_metadata:
            self._emit(LateNotice(request_id))

    def _note_peer_done(self, request_id: str) -> None:
        deadline = self._worker._reqs_to_send.get(request_id)
        self.noticed[request_id] = None if deadline is None else deadline - time.perf_counter()


def _key(handle: Any) -> int:
    return handle if isinstance(handle, int) else id(handle)
