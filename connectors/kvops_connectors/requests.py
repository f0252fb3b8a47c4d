"""One request on one engine while it is open, and the sums that are drawn from it when it ends."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvops_connectors.handle import Context, Handle
from kvops_connectors.journal import Direction, Outcome, Push, RequestIds, Tokens, Transfer

if TYPE_CHECKING:
    from kvops_connectors.events import Ended, PushMet, ReadBegan

# vLLM appends eight random hex digits to every request id (input_processor.assign_request_id).
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$", re.IGNORECASE)


def base_id(request_id: str) -> str:
    """Return a request id without vLLM's random suffix."""
    return _RANDOM_SUFFIX.sub("", request_id)


@dataclass(slots=True)
class Moves:
    """What the ranks moved for one request."""

    peer: str | None = None
    peer_engine: str | None = None
    bytes: int = 0
    descriptors: int = 0
    transfers: int = 0
    handshake_seconds: float | None = None
    ttl_left_seconds: float | None = None
    # By rank: posts and wire times of one rank follow each other or overlap; the slowest rank is what the request
    # waited for.
    post_by_rank: dict[int, float] = field(default_factory=dict)
    wire_by_rank: dict[int, float] = field(default_factory=dict)

    def add(self, ended: Ended) -> None:
        """Add a transfer that ended well."""
        self.peer = ended.peer or self.peer
        self.bytes += ended.bytes
        self.descriptors += ended.descriptors
        self.transfers += 1
        self.post_by_rank[ended.rank] = self.post_by_rank.get(ended.rank, 0.0) + ended.post_seconds
        self.wire_by_rank[ended.rank] = max(self.wire_by_rank.get(ended.rank, 0.0), ended.wire_seconds)

    def began(self, event: ReadBegan) -> None:
        """Note the start of a rank's read."""
        self.peer, self.peer_engine = event.peer, event.peer_engine
        self.handshake_seconds = max(self.handshake_seconds or 0.0, event.handshake_seconds)
        self.ttl_left_seconds = event.ttl_left_seconds

    def struct(self, backend: str, queue_seconds: float | None = None, wait_seconds: float | None = None) -> Transfer:
        """Return the journal's form."""
        return Transfer(
            self.peer,
            self.peer_engine,
            self.bytes,
            self.descriptors,
            self.transfers,
            len(self.wire_by_rank),
            queue_seconds,
            self.handshake_seconds,
            max(self.post_by_rank.values(), default=None),
            max(self.wire_by_rank.values(), default=None),
            wait_seconds,
            self.ttl_left_seconds,
            backend,
        )


@dataclass(slots=True)
class OpenRequest:
    """A request between its arrival and the writing of its record.

    Attributes:
        id: vLLM's request id.
        acts_as: prefill, decode, or plain for a request without ``kv_transfer_params``.
        direction: the way in which it loads KV, if it does.
        context: what the router said.
        handle: the peer's offer, if it came with a usable one.
        offered: tokens on offer before any cut.
        usable: tokens on offer after cuts.
        declined: why the offer was not taken at all, as a reason of recompute.
        expects_handle: a handle was to be expected, so that its absence is worth a reason.
        prompt, local, remote: tokens, as in ``journal.Tokens``.
        preempted: tokens computed a second time.
        loading: tokens of the load that was started; 0 if none was.
        failed: why the load failed, as a reason of recompute.
        scheduled: its prefill was scheduled, so the token sums are final.
        readback: vLLM's request object while a readback is under way.
    """

    id: str
    acts_as: str
    arrived_at: float
    arrived: float
    direction: Direction | None = None
    context: Context = field(default_factory=Context)
    handle: Handle | None = None
    offered: int = 0
    usable: int = 0
    matched: int | None = None
    declined: str | None = None
    expects_handle: bool = False
    prompt: int = 0
    local: int = 0
    remote: int = 0
    preempted: int = 0
    preemptions: int = 0
    generated: int = 0
    loading: int = 0
    last_local: int = 0
    failed: str | None = None
    scheduled: bool = False
    allocated: float | None = None
    loaded: float | None = None
    finished_at: float | None = None
    status: str = ""
    readback: Any = None
    moves: Moves = field(default_factory=Moves)
    push: Push | None = None
    mended: list[str] = field(default_factory=list)

    @property
    def waiting(self) -> bool:
        """Return whether it has blocks and waits for remote KV."""
        return self.loading > 0 and self.loaded is None

    @property
    def ids(self) -> RequestIds:
        """Return its ids for the journal."""
        said = self.context
        remote = self.handle.remote_id if self.handle else None
        ours = (said.router_id, said.conversation, said.turn, said.attempt)
        return RequestIds(self.id, base_id(self.id), remote, *ours)

    @property
    def queue_seconds(self) -> float | None:
        """Return the time from arrival to the allocation of blocks."""
        return None if self.allocated is None else self.allocated - self.arrived

    @property
    def wait_seconds(self) -> float | None:
        """Return the time from the allocation of blocks to the arrival of KV on all ranks."""
        return None if self.loaded is None or self.allocated is None else self.loaded - self.allocated

    def recomputed(self) -> dict[str, int]:
        """Return the tokens computed here by reason; nothing if the prefill was never scheduled.

        From the end of the prompt: what lies beyond the offer is new, what lies beyond the matching part differs, and
        what is left was on offer and not loaded, for one reason.
        """
        if not self.scheduled:
            return {}
        have = self.local + self.remote
        offered = min(self.offered, self.prompt)
        usable = min(self.usable, offered)
        beyond = self.prompt - max(have, offered)
        differing = max(0, offered - max(have, usable))
        counts = {
            "no_handle" if self.expects_handle and not self.offered else "new_tokens": beyond,
            "prefix_mismatch": differing,
            self._reason_not_loaded(): self.prompt - have - beyond - differing,
            "preempted": self.preempted,
        }
        return {reason: count for reason, count in counts.items() if count > 0}

    def _reason_not_loaded(self) -> str:
        if self.failed or self.declined:
            return self.failed or self.declined or "unknown"
        # Decode leaves more than one token to itself with some models (vLLM's _prefill_backoff).
        loaded = self.loading > 0 and self.acts_as == "decode"
        return "last_token" if loaded or self.local + self.remote >= self.prompt - 1 else "unknown"

    def outcome(self) -> Outcome:
        """Return how it ended."""
        if self.status == "FINISHED_ABORTED":
            return "aborted"
        if self.status not in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"):
            return "failed" if self.failed else "error"
        return "recomputed" if self.failed or self.declined == "ttl_expired" else "ok"

    def readback_outcome(self) -> str | None:
        """Return what became of a readback, as kvops_readback_requests_total counts it; None if there was none."""
        if self.acts_as != "prefill" or not self.offered:
            return None
        if self.failed or self.declined:
            return {"ttl_expired": "expired", "no_handle": "ignored", "below_threshold": "below_threshold"}.get(
                self.failed or self.declined or "", "failed"
            )
        if not self.scheduled:
            return None
        if self.remote:
            return "loaded"
        return "prefix_mismatch" if self.usable < self.offered and self.usable <= self.local else "local_hit"

    def tokens(self) -> Tokens:
        """Return the token sums for the journal."""
        recomputed = self.recomputed()
        return Tokens(self.prompt, self.local, self.remote, recomputed, self.offered, self.matched, self.generated)

    def transfer(self, backend: str) -> Transfer | None:
        """Return what was moved for it, for the journal; None if it never had a load."""
        if not self.loading and not self.moves.transfers:
            return None
        if self.handle is not None:
            self.moves.peer = self.moves.peer or self.handle.peer
            self.moves.peer_engine = self.moves.peer_engine or self.handle.engine_id
        return self.moves.struct(backend, self.queue_seconds, self.wait_seconds)


@dataclass(slots=True)
class OpenHold:
    """Blocks held for the peer after a request has ended."""

    ids: RequestIds
    holder: str
    blocks: int
    began: float
    ttl_seconds: float
    moves: Moves = field(default_factory=Moves)
    push: Push | None = None
    failed: str | None = None
    # Seconds left when the slowest rank's peer was done; None as long as no rank has said so.
    peer_done: bool = False
    ttl_left_seconds: float | None = None

    def met(self, event: PushMet) -> None:
        """Note that a registration and the finished blocks have met."""
        self.moves.peer, self.moves.peer_engine = event.peer, event.peer_engine
        last = "registration" if event.registered_at > event.prefill_done_at else "prefill_blocks"
        waited = abs(event.registered_at - event.prefill_done_at)
        self.push = Push(event.registered_at, event.prefill_done_at, last, waited)
