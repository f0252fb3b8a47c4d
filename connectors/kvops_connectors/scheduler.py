"""The scheduler's side: follows each request through the engine, joins what the ranks saw, writes records and metrics.

Everything here runs on the engine's main thread.
"""

from __future__ import annotations

import time
from itertools import product
from typing import TYPE_CHECKING, Any

from kvops_connectors import events, handle, prefix
from kvops_connectors.arrivals import Arrivals, conditions
from kvops_connectors.bounded import Bounded
from kvops_connectors.guard import Guard
from kvops_connectors.holds import Holds
from kvops_connectors.journal import Engine, Hold, Line, Push, Record, Times, Writer
from kvops_connectors.requests import OpenHold, OpenRequest
from kvops_connectors.samples import Samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvops_connectors.settings import Settings

# Requests that are followed at once; the oldest give way, counted in kvops_journal_dropped_total.
TRACKED = 50_000
AGES_INTERVAL_SECONDS = 1.0
DIRECTIONS = ("p_to_d", "d_to_p")


class SchedulerInstrument:
    """Follows the requests of one engine.

    Attributes:
        guard: counts the errors of this instrument.
        samples: metric samples since the last step.
        lost: readbacks that failed on a rank and are to be computed instead, once all ranks have reported.
    """

    def __init__(
        self,
        scheduler: Any,
        *,
        engine: Engine,
        mode: str,
        settings: Settings,
        block_tokens: int,
        total_blocks: int,
        backend: str,
        writer: Writer | None,
    ) -> None:
        self.guard = Guard("scheduler")
        self.samples = Samples()
        self.lost: set[str] = set()
        self._scheduler = scheduler
        self._engine = engine
        self._mode = mode
        self._settings = settings
        self._block_tokens = block_tokens
        self._backend = backend
        self._writer = writer
        self._open: Bounded[str, OpenRequest] = Bounded(TRACKED)
        self._waiting: dict[str, OpenRequest] = {}
        self._closing: list[OpenRequest] = []
        self._holds = Holds(engine, mode, backend, self.samples)
        self._inflight: dict[tuple[int, int], tuple[str, float]] = {}
        self._peers: set[str] = set()
        self._levels = (0, 0, 0)
        self._ages_due = 0.0
        self._reported = dict.fromkeys(("written", "queue_full", "write_error", "too_many_open"), 0)
        self._arrivals = Arrivals(scheduler, mode, engine.role, settings, self.samples)
        self.samples.level("kvops_kv_blocks", total_blocks)
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.Posted: self._posted,
            events.Ended: self._ended,
            events.ReadBegan: self._read_began,
            events.Handshake: self._handshake,
            events.LoadFailed: self._load_failed,
            events.ReadbackLost: self._readback_lost,
            events.PeerDone: self._holds.peer_done,
            events.LateNotice: self._holds.late_notice,
            events.PushMet: self._push_met,
            events.PushRetried: self._push_retried,
            events.RegistrationSent: self._registration_sent,
            events.RegistrationLost: self._registration_lost,
            events.Levels: self._rank_levels,
            events.Errors: self._rank_errors,
        }

    def arrived(self, request: Any) -> None:
        """Begin to follow a request; called before vLLM's on_new_request."""
        followed = OpenRequest(request.request_id, "plain", time.time(), time.perf_counter())
        self._open[request.request_id] = followed
        followed.prompt = request.num_prompt_tokens
        self._arrivals.read(followed, request)

    # Scheduling: how many tokens come from where.

    def spent(self, request: Any) -> bool:
        """Return whether the request has had its one load, so that vLLM must not be asked for another.

        vLLM 0.32 offers the remote tokens again after a failed load, and then waits for ever for a read that nobody
        starts.
        """
        params = request.kv_transfer_params
        if not self._settings.single_load or not params or not params.get("_remote_blocks_processed"):
            return False
        return not params.get("do_remote_prefill")

    def matched(self, request: Any, local_tokens: int, remote_tokens: int | None) -> None:
        """Note what was found locally and what is going to be loaded; may be called many times for a request."""
        followed = self._open.get(request.request_id)
        if followed is None:
            return
        followed.last_local = local_tokens
        if request.num_preemptions == 0 and not followed.scheduled and not followed.loading:
            followed.prompt = request.num_prompt_tokens
            on_offer = min(followed.usable, followed.prompt) - local_tokens
            if not remote_tokens and on_offer > 0 and followed.acts_as == "prefill" and not followed.declined:
                followed.declined = "below_threshold"
            elif remote_tokens and followed.declined == "below_threshold":
                followed.declined = None

    def allocated(self, request: Any, remote_tokens: int) -> None:
        """Note that the request has blocks; called again when a load is over, and after a preemption."""
        followed = self._open.get(request.request_id)
        if followed is None:
            return
        now = time.perf_counter()
        if followed.scheduled:
            if request.num_preemptions > followed.preemptions:
                followed.preemptions = request.num_preemptions
                followed.preempted += max(0, request.num_tokens - followed.last_local)
        elif remote_tokens > 0:
            followed.allocated, followed.loading, followed.local = now, remote_tokens, followed.last_local
            self._waiting[followed.id] = followed
            followed.readback = request if followed.acts_as == "prefill" else None
        else:
            followed.allocated = followed.allocated or now
            self._prefill_scheduled(followed, request)

    def _prefill_scheduled(self, followed: OpenRequest, request: Any) -> None:
        followed.scheduled, followed.readback = True, None
        followed.prompt = request.num_prompt_tokens
        computed = request.num_computed_tokens
        if not followed.loading:
            found = getattr(request.prefill_stats, "num_local_cached_tokens", followed.last_local)
            # What this connector does not load comes from another one in a MultiConnector.
            followed.local = found + getattr(request.prefill_stats, "num_external_cached_tokens", 0)
        elif followed.failed:
            # 0 computed tokens mean that vLLM has looked into the prefix cache again.
            followed.local = computed or followed.last_local
        else:
            followed.remote = max(0, computed - followed.local)

    def metadata(self, metadata: Any, can_recompute: bool) -> None:
        """Tell the ranks which of the loads in this step are readbacks that may fail without failing the request."""
        if can_recompute and self._settings.expired_readback and metadata.reqs_to_recv:
            followed = (self._open.get(request_id) for request_id in metadata.reqs_to_recv)
            readbacks = {one.id for one in followed if one is not None and one.acts_as == "prefill" and one.loading}
            if readbacks:
                metadata.kvops_readbacks = readbacks

    def readback(self, request_id: str) -> Any:
        """Return vLLM's request object of a readback that is under way, or None."""
        followed = self._open.get(request_id)
        return followed.readback if followed is not None else None

    # What the ranks saw.

    def output(self, rank_events: Iterable[Any], output: Any) -> None:
        """Take in the ranks' events and the ends of loads and holds; called before vLLM's update_connector_output."""
        for event in rank_events:
            self._handlers[type(event)](event)
        for request_id in getattr(output, "failed_recving", ()):
            self._load_failed(events.LoadFailed(request_id, "unknown"))
        for request_id in output.finished_recving or ():
            self._load_over(request_id)
        for request_id in output.finished_sending or ():
            if (line := self._holds.end(request_id)) is not None:
                self._write(line)

    def _load_over(self, request_id: str) -> None:
        followed = self._open.get(request_id)
        if followed is None or not followed.loading:
            return
        followed.loaded = time.perf_counter()
        self._waiting.pop(request_id, None)
        if not followed.failed and self._mode == "push":
            self.samples.count("kvops_push_registrations_total", 1, "fulfilled")
        if followed.finished_at is not None:
            self._close(followed)

    def _posted(self, event: events.Posted) -> None:
        direction = self._direction(event.request_id, event.operation)
        self._inflight[event.rank, event.key] = (direction, time.perf_counter())

    def _direction(self, request_id: str | None, operation: str) -> str:
        followed = self._open.get(request_id or "")
        if operation == "WRITE" or followed is None or followed.direction is None:
            return "p_to_d"
        return followed.direction

    def _ended(self, event: events.Ended) -> None:
        direction, _ = self._inflight.pop(
            (event.rank, event.key), (self._direction(event.request_id, event.operation), 0)
        )
        outcome = "ok" if event.ok else "failed"
        peer = self._peer(event.peer)
        self.samples.count("kvops_transfers_total", 1, direction, outcome)
        self.samples.count("kvops_peer_transfers_total", 1, peer, direction, outcome)
        if not event.ok:
            return
        request_id = event.request_id
        self.samples.observe("kvops_transfer_duration_seconds", event.wire_seconds, direction, request_id=request_id)
        self.samples.observe("kvops_transfer_post_seconds", event.post_seconds, direction, request_id=request_id)
        self.samples.count("kvops_transfer_bytes_total", event.bytes, direction)
        self.samples.count("kvops_transfer_descriptors_total", event.descriptors, direction)
        self.samples.count("kvops_peer_transfer_seconds_total", event.wire_seconds, peer, direction)
        self.samples.count("kvops_peer_bytes_total", event.bytes, peer, direction)
        target = self._holds.get(request_id or "") if event.operation == "WRITE" else self._open.get(request_id or "")
        if target is not None:
            target.moves.add(event)

    def _peer(self, peer: str | None) -> str:
        """Return the label of a peer, whose series are made at once: rate() misses the first count of a new one."""
        if peer is None:
            return "other"
        if peer not in self._peers:
            if len(self._peers) >= self._settings.peer_limit:
                return "other"
            self._peers.add(peer)
            directions = DIRECTIONS if self._mode == "bidirectional" else ("p_to_d",)
            for direction, outcome in product(directions, ("ok", "failed")):
                self.samples.known("kvops_peer_transfers_total", peer, direction, outcome)
        return peer

    def _read_began(self, event: events.ReadBegan) -> None:
        followed = self._open.get(event.request_id)
        self._peer(event.peer)
        if followed is not None and followed.loading:
            followed.moves.began(event)

    def _handshake(self, event: events.Handshake) -> None:
        if event.rank == 0:
            self.samples.count("kvops_handshakes_total", 1, event.outcome)
            self.samples.observe("kvops_handshake_duration_seconds", event.seconds)

    def _load_failed(self, event: events.LoadFailed) -> None:
        followed, hold = self._open.get(event.request_id), self._holds.get(event.request_id)
        if hold is not None:
            hold.failed = hold.failed or event.reason
        elif followed is not None:
            followed.failed = followed.failed or event.reason

    def _readback_lost(self, event: events.ReadbackLost) -> None:
        followed = self._open.get(event.request_id)
        if followed is not None and event.request_id not in self.lost:
            followed.failed = followed.failed or "unknown"
            self._arrivals.mended(followed, "expired_readback")
        self.lost.add(event.request_id)

    def _push_met(self, event: events.PushMet) -> None:
        hold = self._holds.get(event.request_id)
        if event.rank or hold is None:
            return
        hold.met(event)
        self._peer(event.peer)
        assert hold.push is not None  # noqa: S101
        waiter = "prefill_blocks" if hold.push.waited_for == "registration" else "registration"
        waited = hold.push.waited_seconds
        self.samples.observe("kvops_push_wait_seconds", waited, waiter, request_id=event.request_id)
        self.samples.observe(
            "kvops_request_phase_seconds", waited, "p_to_d", "registration", request_id=event.request_id
        )

    def _push_retried(self, event: events.PushRetried) -> None:
        hold = self._holds.get(event.request_id)
        # Once for all ranks.
        if hold is not None and hold.failed:
            hold.failed = None
            self.samples.count("kvops_mends_total", 1, "push_retry")

    def _registration_sent(self, event: events.RegistrationSent) -> None:
        followed = self._open.get(event.request_id)
        if followed is not None and followed.push is None:
            followed.push = Push(registered_at=event.at)
            self.samples.count("kvops_push_registrations_total", 1, "sent")

    def _registration_lost(self, event: events.RegistrationLost) -> None:
        followed = self._open.get(event.request_id)
        if followed is not None and followed.failed is None:
            followed.failed = "push_timeout"
            self.samples.count("kvops_push_registrations_total", 1, "timed_out")
            self._arrivals.mended(followed, "push_timeout")

    def _rank_levels(self, event: events.Levels) -> None:
        self.samples.level("kvops_remote_engines", event.remote_engines)
        self.samples.count("kvops_heartbeats_total", event.heartbeats_sent, "sent")
        self.samples.count("kvops_heartbeats_total", event.heartbeats_failed, "failed")
        self.samples.count("kvops_lease_renewals_total", event.lease_renewals)
        if self._mode == "push":
            self.samples.level("kvops_push_pending", event.registrations, "registrations")
            self.samples.level("kvops_push_pending", event.finished_blocks, "finished_blocks")
            self.samples.level(
                "kvops_push_oldest_pending_age_seconds", event.oldest_registration_seconds, "registrations"
            )
            self.samples.level(
                "kvops_push_oldest_pending_age_seconds", event.oldest_finished_seconds, "finished_blocks"
            )

    def _rank_errors(self, event: events.Errors) -> None:
        self.samples.count("kvops_instrument_errors_total", event.errors, "worker")

    # The end: hand back a handle, hold the blocks, write the record.

    def finished(self, request: Any, block_ids: Any, held: bool, params: dict[str, Any] | None) -> None:
        """Note the end of a request, and add kvops's part to the handle that vLLM is about to return."""
        request_id = request.request_id
        followed = self._open.get(request_id)
        if followed is None:
            return
        followed.finished_at = time.time()
        followed.status = request.status.name
        followed.generated = request.num_output_tokens
        if held and params:
            self._hold(followed, block_ids)
            self._complete_handle(request, params)
        # A load that is under way goes on after an abort, and its figures belong to this record.
        if not followed.waiting or followed.failed:
            self._close(followed)

    def _hold(self, followed: OpenRequest, block_ids: Any) -> None:
        now = time.perf_counter()
        deadline = self._scheduler._reqs_need_send.get(followed.id, now)
        holder = "decode" if followed.acts_as == "decode" else "prefill"
        blocks = sum(len(group) for group in block_ids)
        hold = OpenHold(followed.ids, holder, blocks, now, deadline - now)
        if self._mode == "push":
            hold.push = Push(prefill_done_at=time.time())
        self._holds.grant(hold)

    def _complete_handle(self, request: Any, params: dict[str, Any]) -> None:
        hold = self._holds[request.request_id]
        ours: dict[str, Any] = {"ttl_seconds": hold.ttl_seconds, "expires_at": time.time() + hold.ttl_seconds}
        tokens = params.get("remote_num_tokens")
        if params.get("do_remote_decode") and self._settings.token_truth and tokens and request.prompt_token_ids:
            known = request.all_token_ids[:tokens]
            ours["prefix"] = prefix.of_tokens(known, self._block_tokens, *conditions(request)).wire()
        params[handle.KEY] = ours

    def _close(self, followed: OpenRequest) -> None:
        self._waiting.pop(followed.id, None)
        if self._open.pop(followed.id, None) is not None:
            # The ranks' events of this very step come after vLLM has ended the request.
            self._closing.append(followed)

    def _write(self, line: Line) -> None:
        if self._writer is not None:
            self._writer.write(line)
            self._report_journal()

    # Once a step: records of ended requests, gauges, the payload.

    def step_over(self) -> None:
        """Write the records of requests that have ended and set the gauges; called once a step."""
        if self._closing:
            closing, self._closing = self._closing, []
            for followed in closing:
                if followed.is_clean_up:
                    continue
                self._count_request(followed)
                self._write(self._record(followed))
        self._set_levels()
        if self.guard.errors:
            self.samples.count("kvops_instrument_errors_total", self.guard.take_errors(), self.guard.where)

    def _record(self, followed: OpenRequest) -> Record:
        hold = self._holds.get(followed.id)
        times = Times(
            followed.arrived_at,
            _unix(followed, followed.allocated),
            _unix(followed, followed.loaded) if not followed.failed else None,
            followed.finished_at,
        )
        return Record(
            time.time(),
            self._engine,
            followed.ids,
            self._mode,
            followed.tokens(),
            times,
            followed.outcome(),
            followed.direction if followed.loading else None,
            followed.transfer(self._backend),
            Hold(hold.holder, hold.blocks, hold.ttl_seconds) if hold else None,
            followed.push or (hold.push if hold else None),
            followed.status,
            followed.failed or (followed.declined if followed.declined == "ttl_expired" else None),
            followed.mended,
        )

    def _count_request(self, followed: OpenRequest) -> None:
        samples, outcome = self.samples, followed.outcome()
        direction = followed.direction if followed.loading and followed.direction else "none"
        samples.count("kvops_requests_total", 1, direction, outcome, request_id=followed.id)
        if outcome == "failed":
            samples.count("kvops_kv_failed_requests_total", 1, followed.failed or "unknown", request_id=followed.id)
        if (readback := followed.readback_outcome()) is not None:
            samples.count("kvops_readback_requests_total", 1, readback, request_id=followed.id)
        if followed.loading and followed.direction:
            self._count_phases(followed, followed.direction)
        if followed.scheduled:
            self._count_tokens(followed)

    def _count_phases(self, followed: OpenRequest, direction: str) -> None:
        moves, request_id = followed.moves, followed.id
        phases = {
            "queue": followed.queue_seconds,
            "handshake": moves.handshake_seconds,
            "post": max(moves.post_by_rank.values(), default=None),
            "wire": max(moves.wire_by_rank.values(), default=None),
        }
        for phase, seconds in phases.items():
            self.samples.observe("kvops_request_phase_seconds", seconds, direction, phase, request_id=request_id)
        if not followed.failed:
            wait = followed.wait_seconds
            self.samples.observe("kvops_request_kv_wait_seconds", wait, direction, request_id=request_id)

    def _count_tokens(self, followed: OpenRequest) -> None:
        samples = self.samples
        recomputed = followed.recomputed()
        computed = sum(recomputed.values()) - recomputed.get("preempted", 0)
        samples.count("kvops_prompt_tokens_total", followed.local, "local_hit")
        samples.count("kvops_prompt_tokens_total", followed.remote, "remote")
        samples.count("kvops_prompt_tokens_total", computed, "computed")
        if followed.direction:
            samples.count("kvops_loaded_tokens_total", followed.remote, followed.direction)
        for reason, tokens in recomputed.items():
            samples.count("kvops_recompute_tokens_total", tokens, reason)
            samples.count("kvops_recompute_requests_total", 1, reason, request_id=followed.id)

    def _set_levels(self) -> None:
        levels = (len(self._holds), len(self._inflight), len(self._waiting))
        now = time.perf_counter()
        if levels != self._levels:
            self._levels = levels
            self._report_levels()
        elif not any(levels) or now < self._ages_due:
            return
        self._ages_due = now + AGES_INTERVAL_SECONDS
        self._report_ages(now)

    def _report_levels(self) -> None:
        self._holds.report()
        for direction in DIRECTIONS:
            waiting = sum(1 for one in self._waiting.values() if one.direction == direction)
            self.samples.level("kvops_requests_waiting_kv", waiting, direction)
            inflight = sum(1 for way, _ in self._inflight.values() if way == direction)
            self.samples.level("kvops_transfers_inflight", inflight, direction)

    def _report_ages(self, now: float) -> None:
        for direction in DIRECTIONS:
            waits = (one.allocated for one in self._waiting.values() if one.direction == direction)
            oldest = min((began for began in waits if began is not None), default=now)
            self.samples.level("kvops_oldest_waiting_kv_age_seconds", now - oldest, direction)
            posted = min((began for way, began in self._inflight.values() if way == direction), default=now)
            self.samples.level("kvops_oldest_inflight_transfer_age_seconds", now - posted, direction)

    def _report_journal(self) -> None:
        counts = {"too_many_open": self._open.forgotten + self._holds.forgotten}
        if self._writer is not None:
            counts |= {"written": self._writer.written, **self._writer.dropped}
        for cause, total in counts.items():
            new, self._reported[cause] = total - self._reported[cause], total
            if cause == "written":
                self.samples.count("kvops_journal_records_total", new)
            else:
                self.samples.count("kvops_journal_dropped_total", new, cause)

    def close(self) -> None:
        """Write what is left."""
        self.step_over()
        if self._writer is not None:
            self._writer.close()


def _unix(followed: OpenRequest, moment: float | None) -> float | None:
    return None if moment is None else followed.arrived_at + (moment - followed.arrived)
