"""The journal: one JSON line per request and engine, one more when a hold on its blocks ends.

Records are encoded and written by a daemon thread from a bounded queue. The engine's loop pays for building the record
and for one queue insert; when the queue is full the record is dropped and counted, never waited for.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger("vllm.kvops")

VERSION = 1
# A line is never longer than this: every text in it is cut to TEXT_CHARACTERS and every list is bounded.
TEXT_CHARACTERS = 256

Direction = Literal["p_to_d", "d_to_p"]
Outcome = Literal["ok", "recomputed", "failed", "aborted", "error"]


class Engine(msgspec.Struct, frozen=True):
    """The engine that wrote the line.

    Attributes:
        name: configured name, or host:port of the side channel.
        role: prefill, decode or both.
        dp_rank: data-parallel rank.
        engine_id: vLLM's id, new with every start.
    """

    name: str
    role: str
    dp_rank: int
    engine_id: str


class RequestIds(msgspec.Struct):
    """Which request it was.

    Attributes:
        id: vLLM's id on this engine.
        base_id: the id without vLLM's random suffix: the same on prefill and decode when the router sends one
            X-Request-Id.
        remote_id: the id on the other engine, if this engine loaded from it.
        router_id: what the router calls the attempt; from ``kv_transfer_params["kvops"]``.
        conversation: hash of the conversation, from the router.
        turn: number of the turn in its conversation, from the router.
        attempt: number of the attempt, from the router.
    """

    id: str
    base_id: str
    remote_id: str | None = None
    router_id: str | None = None
    conversation: str | None = None
    turn: int | None = None
    attempt: int | None = None


class Tokens(msgspec.Struct):
    """Where the tokens came from: prompt = local_hit + remote + all of recomputed but ``preempted``.

    The sum holds for every request whose prefill was scheduled; one that failed or was aborted before has no
    ``recomputed``.

    Attributes:
        prompt: tokens of the prompt.
        local_hit: tokens found in this engine's prefix cache, or by another connector of a MultiConnector.
        remote: tokens loaded from the peer and used.
        recomputed: tokens computed here, by reason (see ``catalogue.RECOMPUTE_REASONS``).
        offered: tokens that the peer's handle offered, before any cut.
        matched: tokens of the offer that equal the prompt; None if the handle had no digests to compare.
        generated: output tokens.
    """

    prompt: int
    local_hit: int = 0
    remote: int = 0
    recomputed: dict[str, int] = {}
    offered: int = 0
    matched: int | None = None
    generated: int = 0


class Transfer(msgspec.Struct):
    """The movement of KV as the engine that started it saw it.

    Attributes:
        peer: host:port of the other side's side channel.
        peer_engine: vLLM's id of the other engine.
        bytes: bytes moved, over all ranks.
        descriptors: descriptors after NIXL merged neighbours, over all ranks.
        transfers: NIXL transfers, over all ranks.
        ranks: ranks that moved something.
        queue_seconds: arrival to allocation of blocks.
        handshake_seconds: wait for the handshake, slowest rank.
        post_seconds: posting, slowest rank.
        wire_seconds: the transfer itself, slowest rank.
        wait_seconds: allocation to arrival on all ranks.
        ttl_left_seconds: what was left of the peer's TTL when the read began, if the handle told.
        backend: NIXL backends in use.
    """

    peer: str | None = None
    peer_engine: str | None = None
    bytes: int = 0
    descriptors: int = 0
    transfers: int = 0
    ranks: int = 0
    queue_seconds: float | None = None
    handshake_seconds: float | None = None
    post_seconds: float | None = None
    wire_seconds: float | None = None
    wait_seconds: float | None = None
    ttl_left_seconds: float | None = None
    backend: str | None = None


class Hold(msgspec.Struct):
    """Blocks kept for the peer after the request ended.

    Attributes:
        holder: prefill (lease) or decode (TTL).
        blocks: blocks held.
        ttl_granted_seconds: lease or TTL at the start.
        ttl_left_seconds: what was left at the end; None while it lasts.
        held_seconds: how long it lasted; None while it lasts.
        ended_by: read, expired or released; None while it lasts.
    """

    holder: str
    blocks: int
    ttl_granted_seconds: float
    ttl_left_seconds: float | None = None
    held_seconds: float | None = None
    ended_by: str | None = None


class Push(msgspec.Struct):
    """Push mode: how the two sides met.

    Attributes:
        registered_at: unix time at which decode's registration was sent (on decode) or arrived (on prefill).
        prefill_done_at: unix time at which prefill's blocks were ready (on prefill).
        waited_for: registration or prefill_blocks: what came last (on prefill).
        waited_seconds: how long the other one had waited (on prefill).
    """

    registered_at: float | None = None
    prefill_done_at: float | None = None
    waited_for: str | None = None
    waited_seconds: float | None = None


class Times(msgspec.Struct):
    """Unix times of what happened to the request on this engine; None for what did not happen.

    Attributes:
        arrived: reached the scheduler.
        allocated: got blocks.
        loaded: remote KV arrived on all ranks.
        finished: ended.
    """

    arrived: float
    allocated: float | None = None
    loaded: float | None = None
    finished: float | None = None


class Record(msgspec.Struct, tag="request", tag_field="kind"):
    """One request on one engine."""

    ts: float
    engine: Engine
    request: RequestIds
    mode: str
    tokens: Tokens
    times: Times
    outcome: Outcome
    direction: Direction | None = None
    transfer: Transfer | None = None
    hold: Hold | None = None
    push: Push | None = None
    status: str = ""
    error: str | None = None
    mended: list[str] = []
    v: int = VERSION


class HoldEnd(msgspec.Struct, tag="hold", tag_field="kind"):
    """The end of a hold; in push mode also the write, which prefill makes after its request has ended."""

    ts: float
    engine: Engine
    request: RequestIds
    mode: str
    hold: Hold
    transfer: Transfer | None = None
    push: Push | None = None
    error: str | None = None
    v: int = VERSION


Line = Record | HoldEnd
_DECODER = msgspec.json.Decoder(Line)


def decode(line: bytes | str) -> Line:
    """Return one line of a journal as a struct.

    Raises:
        msgspec.DecodeError: the line is not JSON, or not a line of this version's schema.
    """
    return _DECODER.decode(line)


def text(value: Any) -> str | None:
    """Return a client's text cut to ``TEXT_CHARACTERS``, or None if it is no text."""
    return value[:TEXT_CHARACTERS] if isinstance(value, str) and value else None


class Writer:
    """Appends lines to a file that is rotated by size.

    The current file is ``path``; ``path.1`` is the youngest of the rotated ones.

    Attributes:
        path: the current file.
        written: records taken by ``write``.
        dropped: records lost by cause, ``queue_full`` or ``write_error``; counted by the reader of this dict.
    """

    def __init__(self, path: Path, max_bytes: int, files: int, depth: int) -> None:
        self.path = path
        self.written = 0
        self.dropped = {"queue_full": 0, "write_error": 0}
        self._max_bytes = max_bytes
        self._files = files
        self._queue: queue.Queue[msgspec.Struct | None] = queue.Queue(depth)
        self._encoder = msgspec.json.Encoder()
        self._thread = threading.Thread(target=self._run, name="kvops-journal", daemon=True)
        self._thread.start()

    def write(self, record: msgspec.Struct) -> None:
        """Hand over a record, or count it as dropped when the queue is full."""
        try:
            self._queue.put_nowait(record)
            self.written += 1
        except queue.Full:
            self.dropped["queue_full"] += 1

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Write what is queued and stop; gives up after the timeout."""
        try:
            self._queue.put(None, timeout=timeout_seconds)
        except queue.Full:
            return
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        going = True
        while going:
            batch: list[msgspec.Struct | None] = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            going = None not in batch
            records = [record for record in batch if record is not None]
            try:
                self._append(records)
            except Exception as error:
                self.dropped["write_error"] += len(records)
                logger.warning("kvops: %d journal records not written to %s: %s", len(records), self.path, error)

    def _append(self, records: list[msgspec.Struct]) -> None:
        if not records:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size >= self._max_bytes:
            self._rotate()
        # One write of whole lines: a reader that follows the file never sees half a line.
        with self.path.open("ab", buffering=0) as file:
            file.write(b"".join(self._encoder.encode(record) + b"\n" for record in records))

    def _rotate(self) -> None:
        if not self._files:
            self.path.unlink()
            return
        for number in range(self._files - 1, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            if older.exists():
                older.replace(self.path.with_name(f"{self.path.name}.{number + 1}"))
        self.path.replace(self.path.with_name(f"{self.path.name}.1"))
