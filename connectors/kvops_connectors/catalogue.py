"""Every metric of kvops: the one source for the connectors, the router, the dashboards, the rules and the docs.

Pure Python, no imports from vLLM or Prometheus, so that a dashboard can be generated where neither is installed.
Names start with ``kvops_`` and hold no colon: OpenMetrics scrapers rewrite colons. Every label has a bound, and a
request id is never a label; it travels as an exemplar and in the journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Source = Literal["engine", "api_server", "router"]

# Labels that vLLM puts on every metric of an engine.
BASE_LABELS = ("model_name", "engine")
# A longer exemplar makes prometheus_client raise; OpenMetrics allows 128 characters for all names and values.
EXEMPLAR_CHARACTERS = 128
PEER_LIMIT = 32

DURATIONS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
WAITS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
LIFETIMES = (0, 1, 2, 5, 10, 20, 30, 60, 120, 240, 480, 960)

RECOMPUTE_REASONS = {
    "new_tokens": "nobody had computed them yet: what prefill is for",
    "last_token": "the one token that must always be computed to get a first output",
    "no_handle": "the request came without a usable handle although the engine could have loaded KV",
    "below_threshold": "fewer tokens on offer than kv_recompute_threshold",
    "ttl_expired": "the blocks on the peer had outlived their TTL",
    "prefix_mismatch": "the peer's tokens differ from the prompt from there on",
    "handshake_failed": "the peer refused the handshake or it broke",
    "transfer_failed": "NIXL reported an error for the read or write",
    "preempted": "computed once, evicted by the scheduler, computed again (on top of the prompt's tokens)",
    "remote_gone": "the peer did not answer, or another engine answers at its address",
    "unknown": "the load failed and nothing said why",
}
FAILURE_REASONS = ("ttl_expired", "handshake_failed", "transfer_failed", "remote_gone", "push_timeout", "unknown")
MENDS = ("token_truth", "expired_readback", "single_load", "valid_handle", "push_timeout", "push_retry")
LEG_FAILURES = (
    "connect",
    "broken",
    "timeout",
    "http_error",
    "overloaded",
    "no_handle",
    "stream_error",
    "restarted",
    "kv_wait",
)
HANDLE_MISSES = {
    "no_conversation": "the request names no conversation",
    "first_turn": "nothing is known of the conversation",
    "no_handle": "decode's answer to the turn before carried no handle, or a broken one",
    "no_digests": "the handle does not say which tokens it stands for, so nothing shows that they are the prompt's",
    "used": "the handle was taken by another request of the conversation, or the turn before did not end well",
    "late": "the blocks' time on decode is over, or nearly",
    "restarted": "the decode engine that held the blocks has restarted or is gone",
    "declined": "prefill failed with the handle; the turn was served again without it",
}
RELEASE_REASONS = (
    "client_gone",
    "not_sent",
    "not_read",
    "no_conversation",
    "no_digests",
    "replaced",
    "evicted",
    "warm_up",
)
# Engines (data-parallel ranks count) in front of which one router is meant to stand.
ROUTED_ENGINES = 256


@dataclass(frozen=True)
class Label:
    """A label and the values it may take.

    Attributes:
        name: the label's name.
        values: every value, or the empty tuple if they are not known beforehand.
        bound: the most values it can have.
    """

    name: str
    values: tuple[str, ...] = ()
    bound: int = 0

    @property
    def limit(self) -> int:
        """Return the most values that the label can have."""
        return len(self.values) or self.bound


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: full name as Prometheus shows it; a counter ends in ``_total``.
        kind: counter, gauge or histogram.
        unit: unit of the value, spelled out; empty for plain counts.
        help: what is counted or measured, and where.
        question: what the engineer on call asks when looking at it.
        labels: labels on top of ``BASE_LABELS``.
        buckets: upper bounds of a histogram, in ``unit``.
        source: the process that exports it.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    question: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    source: Source = "engine"

    @property
    def series_limit(self) -> int:
        """Return the most time series that one engine can export for it."""
        samples = len(self.buckets) + 3 if self.kind == "histogram" else 1
        return samples * prod(label.limit for label in self.labels)


DIRECTION = Label("direction", ("p_to_d", "d_to_p"))
REQUEST_DIRECTION = Label("direction", ("p_to_d", "d_to_p", "none"))
HOLDER = Label("holder", ("prefill", "decode"))
ENDED = Label("ended_by", ("read", "expired", "released"))
REASON = Label("reason", tuple(RECOMPUTE_REASONS))
FAILED = Label("reason", FAILURE_REASONS)
PEER = Label("peer", bound=PEER_LIMIT + 1)
PENDING = Label("kind", ("registrations", "finished_blocks"))

REQUESTS = (
    Metric(
        "kvops_requests_total",
        "counter",
        "",
        "Requests that ended on this engine, by the direction in which they loaded KV and by outcome. 'recomputed': a "
        "load failed or came too late, and the tokens were computed here. 'failed': that cost the request its answer.",
        "What share of hand-offs worked?",
        (REQUEST_DIRECTION, Label("outcome", ("ok", "recomputed", "failed", "aborted", "error"))),
    ),
    Metric(
        "kvops_request_kv_wait_seconds",
        "histogram",
        "seconds",
        "Time from the allocation of a request's blocks to the arrival of its KV on all ranks.",
        "How much of the time to first token was waiting for KV?",
        (DIRECTION,),
        WAITS,
    ),
    Metric(
        "kvops_request_phase_seconds",
        "histogram",
        "seconds",
        "Parts of a KV load, slowest rank. queue: arrival to block allocation. handshake: wait for the handshake with "
        "the peer. registration (push, on prefill): time that the side which came first waited for the other. post: "
        "handing the descriptors to NIXL. wire: the transfer as NIXL timed it.",
        "In which phase is the delay?",
        (DIRECTION, Label("phase", ("queue", "handshake", "registration", "post", "wire"))),
        WAITS,
    ),
    Metric(
        "kvops_requests_waiting_kv",
        "gauge",
        "",
        "Requests that have blocks and wait for remote KV.",
        "Is anything waiting for KV right now?",
        (DIRECTION,),
    ),
    Metric(
        "kvops_oldest_waiting_kv_age_seconds",
        "gauge",
        "seconds",
        "Age of the oldest wait for remote KV; 0 when nobody waits.",
        "Is a request stuck waiting for KV?",
        (DIRECTION,),
    ),
    Metric(
        "kvops_kv_failed_requests_total",
        "counter",
        "",
        "Requests that ended in an error because their KV could not be loaded.",
        "Did a KV failure cost a user an answer, and why?",
        (FAILED,),
    ),
)

TOKENS = (
    Metric(
        "kvops_prompt_tokens_total",
        "counter",
        "tokens",
        "Prompt tokens of ended requests by where their KV came from, counted when the prefill was over and not at "
        "admission: local_hit + remote + computed = prompt.",
        "What share of the prompt was really reused?",
        (Label("source", ("local_hit", "remote", "computed")),),
    ),
    Metric(
        "kvops_loaded_tokens_total",
        "counter",
        "tokens",
        "Tokens whose KV was loaded from a peer and used.",
        "How many tokens did each direction save?",
        (DIRECTION,),
    ),
    Metric(
        "kvops_recompute_tokens_total",
        "counter",
        "tokens",
        "Tokens computed on this engine, by the reason why they were not loaded. Without 'preempted', which comes on "
        "top, the sum equals kvops_prompt_tokens_total{source='computed'}.",
        "How many tokens were computed, and why?",
        (REASON,),
    ),
    Metric(
        "kvops_recompute_requests_total",
        "counter",
        "",
        "Requests with at least one token computed for the reason.",
        "How many requests are hit by each reason?",
        (REASON,),
    ),
)

TRANSFERS = (
    Metric(
        "kvops_transfers_total",
        "counter",
        "",
        "NIXL transfers that this engine started and that ended, one per rank and remote rank.",
        "Do transfers fail?",
        (DIRECTION, Label("outcome", ("ok", "failed"))),
    ),
    Metric(
        "kvops_transfer_duration_seconds",
        "histogram",
        "seconds",
        "Time of one NIXL transfer from post to completion, as NIXL reports it.",
        "How long is KV on the wire?",
        (DIRECTION,),
        DURATIONS,
    ),
    Metric(
        "kvops_transfer_post_seconds",
        "histogram",
        "seconds",
        "Time that NIXL took to post one transfer.",
        "Is posting descriptors the bottleneck?",
        (DIRECTION,),
        DURATIONS,
    ),
    Metric(
        "kvops_transfer_bytes_total",
        "counter",
        "bytes",
        "Bytes of transfers that ended well.",
        "What is the wall-clock throughput?",
        (DIRECTION,),
    ),
    Metric(
        "kvops_transfer_descriptors_total",
        "counter",
        "",
        "Descriptors of transfers that ended well, after NIXL merged neighbours.",
        "How fragmented are the transfers?",
        (DIRECTION,),
    ),
    Metric(
        "kvops_transfers_inflight",
        "gauge",
        "",
        "Transfers posted and not ended, over all ranks.",
        "Is there a backlog on the wire?",
        (DIRECTION,),
    ),
    Metric(
        "kvops_oldest_inflight_transfer_age_seconds",
        "gauge",
        "seconds",
        "Age of the oldest transfer that has not ended; 0 when none is in flight.",
        "Is a transfer stuck?",
        (DIRECTION,),
    ),
    Metric(
        "kvops_peer_transfers_total",
        "counter",
        "",
        f"Transfers by peer (host:port of its side channel); after {PEER_LIMIT} peers the rest count as 'other'.",
        "Which peer is bad?",
        (PEER, DIRECTION, Label("outcome", ("ok", "failed"))),
    ),
    Metric(
        "kvops_peer_transfer_seconds_total",
        "counter",
        "seconds",
        "Wire time of transfers that ended well, by peer.",
        "Which peer is slow?",
        (PEER, DIRECTION),
    ),
    Metric(
        "kvops_peer_bytes_total",
        "counter",
        "bytes",
        "Bytes of transfers that ended well, by peer.",
        "How is the traffic spread over peers?",
        (PEER, DIRECTION),
    ),
    Metric(
        "kvops_handshakes_total",
        "counter",
        "",
        "NIXL handshakes that rank 0 started, by outcome. incompatible: other vLLM version, model, dtype or mode. "
        "engine_mismatch: another engine answers at that address.",
        "Do handshakes fail, and how?",
        (Label("outcome", ("ok", "timeout", "incompatible", "engine_mismatch", "error")),),
    ),
    Metric(
        "kvops_handshake_duration_seconds",
        "histogram",
        "seconds",
        "Time of a handshake on rank 0, good or bad.",
        "What does the first request to a new peer pay?",
        (),
        DURATIONS,
    ),
    Metric(
        "kvops_remote_engines",
        "gauge",
        "",
        "Remote engines that rank 0 is connected to.",
        "Does the engine know its peers?",
    ),
    Metric(
        "kvops_heartbeats_total",
        "counter",
        "",
        "Heartbeats that rank 0 sent to keep leases on prefill alive.",
        "Do heartbeats leave?",
        (Label("outcome", ("sent", "failed")),),
    ),
)

HOLDS = (
    Metric(
        "kvops_held_requests",
        "gauge",
        "",
        "Ended requests whose blocks are still held for a peer: prefill under its lease, decode under its TTL.",
        "Who keeps KV blocks from being used?",
        (HOLDER,),
    ),
    Metric(
        "kvops_held_blocks",
        "gauge",
        "blocks",
        "Blocks held for a peer now.",
        "How much of the cache do leases and TTLs take?",
        (HOLDER,),
    ),
    Metric("kvops_kv_blocks", "gauge", "blocks", "KV blocks of the engine.", "What share of the cache is held?"),
    Metric(
        "kvops_holds_total",
        "counter",
        "",
        "Holds granted; equals the ended ones plus kvops_held_requests.",
        "How often are blocks held?",
        (HOLDER,),
    ),
    Metric(
        "kvops_holds_ended_total",
        "counter",
        "",
        "Holds that ended, once per request. read: the peer said that it has what it needs. expired: TTL or lease ran "
        "out. released: given up earlier for another reason.",
        "How do holds end?",
        (HOLDER, ENDED),
    ),
    Metric(
        "kvops_held_block_seconds_total",
        "counter",
        "block seconds",
        "Blocks times seconds of ended holds; those ended by 'expired' were wasted.",
        "What do leases and TTLs cost?",
        (HOLDER, ENDED),
    ),
    Metric(
        "kvops_hold_headroom_seconds",
        "histogram",
        "seconds",
        "Time that was left of a lease or TTL when the peer had read the blocks.",
        "How close to expiry are the successes?",
        (HOLDER,),
        LIFETIMES,
    ),
    Metric(
        "kvops_reads_after_expiry_total",
        "counter",
        "",
        "Completion notices for blocks whose hold had ended: the peer may have read reused blocks. One per notice.",
        "Can an answer be wrong?",
        (Label("holder", ("prefill", "decode", "unknown")),),
    ),
    Metric(
        "kvops_lease_renewals_total",
        "counter",
        "",
        "Leases extended by heartbeats that rank 0 received.",
        "Do leases live by heartbeats or by speed?",
    ),
)

PUSH = (
    Metric(
        "kvops_push_wait_seconds",
        "histogram",
        "seconds",
        "Push, on rank 0 of prefill: how long the side that came first waited. registration: decode had registered its "
        "blocks. prefill_blocks: prefill was done.",
        "Does push wait for decode or for prefill?",
        (Label("waiter", ("registration", "prefill_blocks")),),
        WAITS,
    ),
    Metric(
        "kvops_push_pending",
        "gauge",
        "",
        "Push, on rank 0 of prefill: registrations without finished blocks, and finished blocks without one.",
        "Is push piling up?",
        (PENDING,),
    ),
    Metric(
        "kvops_push_oldest_pending_age_seconds",
        "gauge",
        "seconds",
        "Push: age of the oldest unmatched registration or finished blocks; 0 when there is none.",
        "Is a registration stuck?",
        (PENDING,),
    ),
    Metric(
        "kvops_push_registrations_total",
        "counter",
        "",
        "Push, on decode: registrations sent, fulfilled by a write, and given up after push_registration_timeout.",
        "Do registrations get their KV?",
        (Label("outcome", ("sent", "fulfilled", "timed_out")),),
    ),
)

READBACK = (
    Metric(
        "kvops_readback_requests_total",
        "counter",
        "",
        "Bidirectional, on prefill: requests that came with a handle of decode, by what became of it. ignored: "
        "this engine has bidirectional_kv_xfer off.",
        "Is bidirectional worth its blocks?",
        (
            Label(
                "outcome",
                ("loaded", "local_hit", "below_threshold", "expired", "prefix_mismatch", "failed", "ignored"),
            ),
        ),
    ),
    Metric(
        "kvops_readback_age_seconds",
        "histogram",
        "seconds",
        "Age of decode's hold when the next turn came to prefill (needs instrumented connectors on decode).",
        "How long must decoder_kv_blocks_ttl be?",
        (),
        LIFETIMES,
    ),
)

INSTRUMENT = (
    Metric(
        "kvops_config_seconds",
        "gauge",
        "seconds",
        "Configured lifetimes.",
        "Against which limit do alerts compare?",
        (
            Label(
                "param",
                ("kv_lease_duration", "decoder_kv_blocks_ttl", "push_registration_timeout", "engine_ttl"),
            ),
        ),
    ),
    Metric(
        "kvops_connector_info",
        "gauge",
        "",
        "Always 1; the labels say what runs here. mends lists the mends that are switched on.",
        "What runs here?",
        tuple(
            Label(name, bound=1)
            for name in (
                "connector",
                "mode",
                "role",
                "bidirectional",
                "failure_policy",
                "mends",
                "version",
                "vllm_version",
                "nixl_version",
            )
        ),
    ),
    Metric(
        "kvops_mends_total",
        "counter",
        "",
        "Times that a mend did something else than the stock connector. token_truth: cut a handle. expired_readback: "
        "turned a readback that cannot work into a recompute. single_load: kept a request from waiting for a second "
        "load that never comes. valid_handle: dropped a malformed handle. push_timeout: gave up a registration. "
        "push_retry: began a write again whose handshake had failed.",
        "How often do the mends step in?",
        (Label("mend", MENDS),),
    ),
    Metric(
        "kvops_streamed_handles_total",
        "counter",
        "",
        "Streamed answers for which the router asked for the handle, by whether there was one to send.",
        "Do streaming clients get readback?",
        (Label("outcome", ("sent", "missing")),),
        source="api_server",
    ),
    Metric(
        "kvops_journal_records_total",
        "counter",
        "",
        "Journal lines handed to the writer.",
        "Is the journal written?",
    ),
    Metric(
        "kvops_journal_dropped_total",
        "counter",
        "",
        "Journal lines lost: queue full, disk error, or too many requests open at once.",
        "Can the journal be trusted?",
        (Label("cause", ("queue_full", "write_error", "too_many_open")),),
    ),
    Metric(
        "kvops_instrument_errors_total",
        "counter",
        "",
        "Errors inside the instruments; the requests went on.",
        "Can the instruments be trusted?",
        (Label("where", ("scheduler", "worker", "metrics")),),
    ),
)

ROUTER_MODE = Label("mode", ("pull", "push", "bidirectional", "auto"))
ENGINE_ROLE = Label("role", ("prefill", "decode"))
ROUTED_ENGINE = Label("engine", bound=ROUTED_ENGINES)
ROUTER = (
    Metric(
        "kvops_router_requests_total",
        "counter",
        "",
        "Client requests that ended, by mode and outcome: ok, refused (the engine's own 4xx), client_gone, "
        "broken_off and stream_error (after the first byte), or the type of the error that the client got.",
        "Do requests succeed?",
        (ROUTER_MODE, Label("outcome", bound=20)),
        source="router",
    ),
    Metric(
        "kvops_router_request_seconds",
        "histogram",
        "seconds",
        "Time from the arrival of a client's request to the end of its answer.",
        "How long do clients wait?",
        (ROUTER_MODE,),
        WAITS,
        source="router",
    ),
    Metric(
        "kvops_router_first_byte_seconds",
        "histogram",
        "seconds",
        "Time from the arrival of a client's request to the first byte of its answer.",
        "How long is the time to first token, seen from outside?",
        (ROUTER_MODE,),
        WAITS,
        source="router",
    ),
    Metric(
        "kvops_router_legs_total",
        "counter",
        "",
        "Requests of the router to engines that ended, by role, engine and outcome: ok, refused, cancelled, "
        "connect, broken, timeout, http_error, overloaded, no_handle, stream_error, restarted, kv_wait.",
        "Which engine fails, and how?",
        (ENGINE_ROLE, ROUTED_ENGINE, Label("outcome", ("ok", "refused", "cancelled", *LEG_FAILURES))),
        source="router",
    ),
    Metric(
        "kvops_router_leg_seconds",
        "histogram",
        "seconds",
        "Time from sending a leg to the end of its answer.",
        "Which engine is slow?",
        (ENGINE_ROLE, ROUTED_ENGINE),
        WAITS,
        source="router",
    ),
    Metric(
        "kvops_router_leg_skew_seconds",
        "histogram",
        "seconds",
        "Push: time between the starts of the two legs.",
        "Are push's legs really sent together?",
        (),
        WAITS,
        source="router",
    ),
    Metric(
        "kvops_router_handover_seconds",
        "histogram",
        "seconds",
        "Pull and bidirectional: time from P's answer to the sending of D's leg; P's lease runs meanwhile.",
        "Does the router hold KV back?",
        (),
        WAITS,
        source="router",
    ),
    Metric(
        "kvops_router_retries_total",
        "counter",
        "",
        "Second attempts, by the reason of the first one's failure.",
        "What do retries hide?",
        (ENGINE_ROLE, Label("reason", LEG_FAILURES)),
        source="router",
    ),
    Metric(
        "kvops_router_handles_total",
        "counter",
        "",
        "Bidirectional: turns by whether decode's handle of the turn before could be used (hit) or why not.",
        "Why is KV not read back?",
        (Label("outcome", ("hit", *HANDLE_MISSES)),),
        source="router",
    ),
    Metric(
        "kvops_router_turns_without_handle_total",
        "counter",
        "",
        "Bidirectional: answers of decode that ended well and brought no handle, by whether they streamed.",
        "Does decode return its handles?",
        (Label("streamed", ("true", "false")),),
        source="router",
    ),
    Metric(
        "kvops_router_releases_total",
        "counter",
        "",
        "Blocks that the router had an engine give back unread, by why and whether the request for it was sent.",
        "Is KV stranded?",
        (Label("reason", RELEASE_REASONS), Label("outcome", ("sent", "failed", "unexpected", "skipped"))),
        source="router",
    ),
    Metric(
        "kvops_router_in_flight",
        "gauge",
        "",
        "Legs under way.",
        "How busy is each engine?",
        (ENGINE_ROLE, ROUTED_ENGINE),
        source="router",
    ),
    Metric(
        "kvops_router_queued",
        "gauge",
        "",
        "Requests that wait for a place.",
        "Is the fleet full?",
        (ENGINE_ROLE,),
        source="router",
    ),
    Metric(
        "kvops_router_endpoint_up",
        "gauge",
        "",
        "1 for an engine that takes requests.",
        "Which engine is out?",
        (ENGINE_ROLE, ROUTED_ENGINE),
        source="router",
    ),
    Metric(
        "kvops_router_conversations", "gauge", "", "Handles kept.", "How many conversations are warm?", source="router"
    ),
    Metric(
        "kvops_router_conversation_bytes",
        "gauge",
        "bytes",
        "Memory of the kept handles.",
        "What do they cost?",
        source="router",
    ),
    Metric(
        "kvops_router_handed_over_oldest_seconds",
        "gauge",
        "seconds",
        "Age of the oldest answer of P whose blocks D has not begun to answer for; 0 without one.",
        "Is KV waiting unread?",
        source="router",
    ),
    Metric(
        "kvops_router_journal_dropped_total",
        "counter",
        "",
        "Journal lines lost.",
        "Can the journal be trusted?",
        source="router",
    ),
)

CATALOGUE: dict[str, Metric] = {
    metric.name: metric
    for section in (REQUESTS, TOKENS, TRANSFERS, HOLDS, PUSH, READBACK, ROUTER, INSTRUMENT)
    for metric in section
}
SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Requests": REQUESTS,
    "Tokens": TOKENS,
    "Transfers and peers": TRANSFERS,
    "Holds": HOLDS,
    "Push": PUSH,
    "Readback": READBACK,
    "Router": ROUTER,
    "Configuration and instruments": INSTRUMENT,
}


def markdown() -> str:
    """Return the metric reference as Markdown, the text of ``docs/metrics.md``."""
    lines = [
        "# Metrics",
        "",
        "Generated from `kvops_connectors/catalogue.py` by `python -m kvops_connectors.catalogue`; do not edit.",
        "",
        f"Metrics of an engine carry the labels `{'`, `'.join(BASE_LABELS)}` as well. Scrape `/metrics/` with the "
        "trailing slash to get exemplars (the request id) on histograms and counters.",
    ]
    for title, metrics in SECTIONS.items():
        lines += ["", f"## {title}"]
        for metric in metrics:
            lines += ["", *_entry(metric)]
    lines += ["", "## Reasons of recompute", ""]
    lines += [f"- `{reason}`: {meaning}" for reason, meaning in RECOMPUTE_REASONS.items()]
    return "\n".join(lines) + "\n"


def _entry(metric: Metric) -> list[str]:
    kind = f"{metric.kind}, {metric.unit}" if metric.unit else metric.kind
    lines = [f"### {metric.name}", "", f"*{metric.question}* ({kind}; exported by: {metric.source})", "", metric.help]
    for label in metric.labels:
        values = ", ".join(f"`{value}`" for value in label.values) or f"at most {label.bound}"
        lines += ["", f"- `{label.name}`: {values}"]
    if metric.buckets:
        lines += ["", f"Buckets: {', '.join(str(bound) for bound in metric.buckets)}"]
    return lines


if __name__ == "__main__":
    print(markdown(), end="")  # noqa: T201
