"""What a worker rank saw, as it travels to the scheduler.

The rank attaches these to the step's output (``KVConnectorOutput.kv_connector_worker_meta``), vLLM joins the ranks, and
the scheduler's side of the connector takes them in ``update_connector_output``. They are pickled by reference, so every
class here is a plain module-level one.
"""

from __future__ import annotations

from typing import NamedTuple


class Posted(NamedTuple):
    """A transfer was handed to NIXL; ``key`` is unique within the rank."""

    rank: int
    key: int
    request_id: str | None
    operation: str


class Ended(NamedTuple):
    """A posted transfer ended; the figures are NIXL's own and 0 when it failed."""

    rank: int
    key: int
    request_id: str | None
    operation: str
    ok: bool
    peer: str | None
    post_seconds: float
    wire_seconds: float
    bytes: int
    descriptors: int


class ReadBegan(NamedTuple):
    """Pull: the rank had its handshake and turned to the request's blocks."""

    request_id: str
    peer: str
    peer_engine: str
    handshake_seconds: float
    ttl_left_seconds: float | None


class Handshake(NamedTuple):
    """A handshake ended; outcome as in the label of kvops_handshakes_total."""

    rank: int
    seconds: float
    outcome: str


class LoadFailed(NamedTuple):
    """A request's load will not succeed on this rank; reason as in ``catalogue.FAILURE_REASONS``."""

    request_id: str
    reason: str


class ReadbackLost(NamedTuple):
    """A failed readback was reported as finished, so that the scheduler's side turns it into a recompute."""

    request_id: str


class PeerDone(NamedTuple):
    """The peer is done with held blocks (its notice came, or the write to it ended)."""

    request_id: str
    ttl_left_seconds: float | None


class LateNotice(NamedTuple):
    """A completion notice came for blocks that are no longer held."""

    request_id: str


class PushMet(NamedTuple):
    """Push, on prefill: registration and finished blocks have met; times are unix seconds."""

    rank: int
    request_id: str
    peer: str
    peer_engine: str
    registered_at: float
    prefill_done_at: float


class PushRetried(NamedTuple):
    """Push, on prefill: a write whose handshake had failed was handed in again."""

    request_id: str


class RegistrationSent(NamedTuple):
    """Push, on decode: a registration left at this unix time."""

    request_id: str
    at: float


class RegistrationLost(NamedTuple):
    """Push, on decode: the registration was given up."""

    request_id: str


class Levels(NamedTuple):
    """Rank 0's gauges and counts since its last report."""

    remote_engines: int
    registrations: int
    finished_blocks: int
    oldest_registration_seconds: float
    oldest_finished_seconds: float
    heartbeats_sent: int
    heartbeats_failed: int
    lease_renewals: int


class Errors(NamedTuple):
    """Errors inside the rank's instruments."""

    errors: int


Event = (
    Posted
    | Ended
    | ReadBegan
    | Handshake
    | LoadFailed
    | ReadbackLost
    | PeerDone
    | LateNotice
    | PushMet
    | PushRetried
    | RegistrationSent
    | RegistrationLost
    | Levels
    | Errors
)
