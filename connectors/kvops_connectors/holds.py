"""The blocks that an engine holds for its peers after their requests have ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvops_connectors.bounded import Bounded
from kvops_connectors.journal import Engine, Hold, HoldEnd
from kvops_connectors.requests import OpenHold

if TYPE_CHECKING:
    from kvops_connectors.events import LateNotice, PeerDone
    from kvops_connectors.samples import Samples

TRACKED = 50_000
# A hold that ends this close to its deadline has expired: ranks check their deadlines once a step.
DEADLINE_SLACK_SECONDS = 0.05
HOLDERS = ("prefill", "decode")


class Holds(Bounded[str, OpenHold]):
    """The holds that last, by request id."""

    def __init__(self, engine: Engine, mode: str, backend: str, samples: Samples) -> None:
        super().__init__(TRACKED)
        self._engine = engine
        self._mode = mode
        self._backend = backend
        self._samples = samples
        self._requests = dict.fromkeys(HOLDERS, 0)
        self._blocks = dict.fromkeys(HOLDERS, 0)
        self._ended: Bounded[str, tuple[str, str | None]] = Bounded(10_000)

    def grant(self, hold: OpenHold) -> None:
        """Begin a hold."""
        self[hold.ids.id] = hold
        self._requests[hold.holder] += 1
        self._blocks[hold.holder] += hold.blocks
        self._samples.count("kvops_holds_total", 1, hold.holder)

    def peer_done(self, event: PeerDone) -> None:
        """Note that the peer needs the blocks no more."""
        hold = self.get(event.request_id)
        if hold is not None:
            known = [left for left in (hold.ttl_left_seconds, event.ttl_left_seconds) if left is not None]
            hold.peer_done, hold.ttl_left_seconds = True, min(known, default=None)

    def late_notice(self, event: LateNotice) -> None:
        """Count a notice for blocks that are not held any more, unless they had been read in time."""
        holder, ended_by = self._ended.get(event.request_id, ("unknown", None))
        # A router whose client left during a readback cannot know that it was over: it has them given back again.
        if ended_by != "read":
            self._samples.count("kvops_reads_after_expiry_total", 1, holder, request_id=event.request_id)

    def end(self, request_id: str) -> HoldEnd | None:
        """End a hold on all ranks; return its line for the journal, None for a request without one."""
        hold = self.pop(request_id, None)
        if hold is None:
            return None
        self._requests[hold.holder] -= 1
        self._blocks[hold.holder] -= hold.blocks
        entry = _ended_hold(hold)
        self._ended[request_id] = (hold.holder, entry.ended_by)
        labels = (hold.holder, entry.ended_by or "")
        self._samples.count("kvops_holds_ended_total", 1, *labels)
        self._samples.count("kvops_held_block_seconds_total", hold.blocks * (entry.held_seconds or 0), *labels)
        if entry.ended_by == "read":
            left = entry.ttl_left_seconds
            self._samples.observe("kvops_hold_headroom_seconds", left, hold.holder, request_id=request_id)
        moved = hold.moves.struct(self._backend) if hold.moves.transfers else None
        return HoldEnd(time.time(), self._engine, hold.ids, self._mode, entry, moved, hold.push, hold.failed)

    def report(self) -> None:
        """Set the gauges."""
        for holder in HOLDERS:
            self._samples.level("kvops_held_requests", self._requests[holder], holder)
            self._samples.level("kvops_held_blocks", self._blocks[holder], holder)


def _ended_hold(hold: OpenHold) -> Hold:
    held = time.perf_counter() - hold.began
    if hold.peer_done:
        left = hold.ttl_left_seconds if hold.ttl_left_seconds is not None else hold.ttl_seconds - held
        return Hold(hold.holder, hold.blocks, hold.ttl_seconds, left, held, "read")
    if held >= hold.ttl_seconds - DEADLINE_SLACK_SECONDS:
        return Hold(hold.holder, hold.blocks, hold.ttl_seconds, 0.0, held, "expired")
    return Hold(hold.holder, hold.blocks, hold.ttl_seconds, hold.ttl_seconds - held, held, "released")
