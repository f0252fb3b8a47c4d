"""Fleet: is KV moving, how well, and what does it cost?"""

from __future__ import annotations

from kvops_dashboards.panels import Board, Panel, Query, Row, number, series, stacked
from kvops_dashboards.promql import increase, mean, quantile, rate, ratio, select, total

_ENDED = "ok|recomputed|failed|error"
_LOST = "recomputed|failed"
_BURN = ("KvopsHandoffErrorBudgetBurn",)
_WASTED = "no_handle|ttl_expired|prefix_mismatch|handshake_failed|transfer_failed|preempted|remote_gone|unknown"

HEALTH = Row(
    "Is KV moving?",
    (
        number(
            "Hand-offs that worked",
            "Share of requests with remote KV that got it and used it. Below the objective of 99.5 % the rest was "
            "recomputed (slow) or failed (no answer).",
            _BURN,
            ratio(
                rate("kvops_requests_total", direction="p_to_d|d_to_p", outcome="ok"),
                rate("kvops_requests_total", direction="p_to_d|d_to_p", outcome=_ENDED),
            ),
            "percentunit",
            steps=(0.999, 0.995),
            largest=1.0,
        ),
        number(
            "Suspect answers",
            "Reads that ended after the blocks' hold had: the peer may have used reused blocks and the client still "
            "got HTTP 200. Any value above 0 is an incident.",
            ("KvopsReadAfterExpiry",),
            increase("kvops_reads_after_expiry_total"),
            "short",
            steps=(1, 1),
        ),
        number(
            "Requests lost to KV",
            "Requests that ended in an error because their KV could not be loaded. Above 0, users see errors.",
            ("KvopsKvFailedRequests",),
            increase("kvops_kv_failed_requests_total"),
            "short",
            steps=(1, 1),
        ),
        number(
            "KV moved",
            "Bytes per second over all engines, wall clock. 0 while requests come in: nothing is handed over.",
            ("KvopsKvNotMoving", "KvopsThroughputCollapse"),
            rate("kvops_transfer_bytes_total"),
            "Bps",
        ),
        number(
            "KV wait, p99",
            "99 of 100 requests waited less for their KV. It is part of the time to first token; the phases on "
            "Transfers say where it goes.",
            ("KvopsKvWaitHigh",),
            quantile(0.99, "kvops_request_kv_wait_seconds"),
            "s",
            steps=(1, 5),
        ),
        number(
            "Cache held for peers",
            "Share of the engines' KV blocks that leases and TTLs keep from being used. Above a half, new requests "
            "soon wait for blocks.",
            ("KvopsHeldBlocksHigh",),
            f"{total('kvops_held_blocks')} / {total('kvops_kv_blocks')}",
            "percentunit",
            steps=(0.5, 0.8),
        ),
    ),
)
LOSSES = Row(
    "Hand-offs",
    (
        stacked(
            "Requests by outcome",
            "Requests that ended, a second. 'recomputed': a load failed or came too late. 'failed': that cost the "
            "answer.",
            _BURN,
            "reqps",
            Query(rate("kvops_requests_total", "outcome"), "{{outcome}}", exemplars=True),
        ),
        series(
            "Errors by direction",
            "Share of hand-offs that ended recomputed or failed, by the direction of the load.",
            _BURN,
            "percentunit",
            Query(
                ratio(
                    rate("kvops_requests_total", "direction", direction="p_to_d|d_to_p", outcome=_LOST),
                    rate("kvops_requests_total", "direction", direction="p_to_d|d_to_p", outcome=_ENDED),
                ),
                "{{direction}}",
            ),
            largest=1.0,
        ),
        stacked(
            "Lost requests by reason",
            "Requests that failed for want of KV in five minutes, by reason. The reason names the runbook's branch.",
            ("KvopsKvFailedRequests",),
            "short",
            Query(increase("kvops_kv_failed_requests_total", "reason", window="5m"), "{{reason}}", exemplars=True),
        ),
    ),
)
FIRST_TOKEN = Row(
    "Where the time to first token goes",
    (
        stacked(
            "Mean parts of TTFT",
            "Queue and prefill on P, the wait for KV on D. In pull mode they follow each other; in push mode the KV "
            "wait runs beside prefill and includes it. What grew is where to look.",
            ("KvopsKvWaitHigh",),
            "s",
            Query(mean("vllm:request_queue_time_seconds", role="prefill"), "queue on prefill"),
            Query(mean("vllm:request_prefill_time_seconds", role="prefill"), "prefill"),
            Query(mean("kvops_request_kv_wait_seconds", direction="p_to_d"), "KV wait on decode"),
        ),
        series(
            "TTFT as clients see it",
            "From the arrival at the router to the first byte. Far above the parts beside it: the router queues "
            "or retries.",
            ("KvopsKvWaitHigh",),
            "s",
            Query(quantile(0.5, "kvops_router_first_byte_seconds"), "p50"),
            Query(quantile(0.99, "kvops_router_first_byte_seconds"), "p99"),
        ),
        series(
            "Time between tokens",
            "Mean and p99 on decode. It grows when decode computes prompts itself (recompute) or is overloaded.",
            ("KvopsRecomputeHigh",),
            "s",
            Query(mean("vllm:inter_token_latency_seconds", role="decode"), "mean"),
            Query(quantile(0.99, "vllm:inter_token_latency_seconds", role="decode"), "p99"),
        ),
    ),
)
COST = Row(
    "What it moves and what it costs",
    (
        series(
            "KV throughput by direction",
            "Bytes a second, wall clock. d_to_p is readback of bidirectional mode. A fall at steady load: see "
            "post and wire on Transfers.",
            ("KvopsThroughputCollapse",),
            "Bps",
            Query(rate("kvops_transfer_bytes_total", "direction"), "{{direction}}"),
        ),
        stacked(
            "Prompt tokens by source",
            "Where the KV of prompts came from, counted when the prefill was over. On decode nearly all should be "
            "remote.",
            ("KvopsRecomputeHigh",),
            "short",
            Query(rate("kvops_prompt_tokens_total", "role", "source"), "{{role}} {{source}}"),
        ),
        series(
            "Wasted recompute by reason",
            "Share of prompt tokens computed although a peer had or should have had them. Above 5 % prefill does work "
            "twice.",
            ("KvopsRecomputeHigh",),
            "percentunit",
            Query(
                f"{rate('kvops_recompute_tokens_total', 'reason', reason=_WASTED)} / on() group_left() "
                f"({rate('kvops_prompt_tokens_total')} > 0)",
                "{{reason}}",
            ),
        ),
        series(
            "Held share of the cache",
            "Blocks held for a peer over all blocks, by engine. A plateau near 100 % is a deadlock in the making.",
            ("KvopsHeldBlocksHigh",),
            "percentunit",
            Query(
                f"{total('kvops_held_blocks', 'role', 'instance')} / {total('kvops_kv_blocks', 'role', 'instance')}",
                "{{role}} {{instance}}",
            ),
        ),
        series(
            "Headroom when read, p05",
            "Time left of lease or TTL in the tightest twentieth of reads. Near 0 the next slow read comes too late.",
            ("KvopsLeaseHeadroomLow",),
            "s",
            Query(quantile(0.05, "kvops_hold_headroom_seconds", "holder"), "{{holder}}"),
        ),
        stacked(
            "How holds end",
            "Holds that ended, a second. 'expired' on prefill: decode never came. On decode it is a user who did not "
            "come back.",
            ("KvopsLeaseExpired", "KvopsDecodeTtlWaste"),
            "ops",
            Query(rate("kvops_holds_ended_total", "holder", "ended_by"), "{{holder}} {{ended_by}}"),
        ),
    ),
)
RUNNING = Row(
    "What runs",
    (
        Panel(
            "Engines",
            "What each engine runs. Different versions, modes or policies side by side explain most handshake "
            "failures; a missing engine is down or not scraped.",
            ("KvopsConfigMismatch", "KvopsMixedVersions", "KvopsMetricsAbsent"),
            (
                Query(
                    "max by (instance, role, connector, mode, bidirectional, failure_policy, vllm_version, "
                    f"nixl_version) ({select('kvops_connector_info')})"
                ),
            ),
            shape="table",
            width=16,
            columns={
                "role": "Role",
                "instance": "Engine",
                "connector": "Connector",
                "mode": "Mode",
                "bidirectional": "Bidirectional",
                "failure_policy": "On failure",
                "vllm_version": "vLLM",
                "nixl_version": "NIXL",
            },
        ),
        series(
            "Trust in the instruments",
            "Errors inside the instruments and journal lines lost, a second. Above 0 the numbers here are incomplete; "
            "requests are not affected.",
            ("KvopsInstrumentationErrors", "KvopsJournalDropped"),
            "ops",
            Query(rate("kvops_instrument_errors_total", "where"), "error in {{where}}"),
            Query(rate("kvops_journal_dropped_total", "cause"), "journal {{cause}}"),
        ),
    ),
)
BOARD = Board(
    "kvops-fleet",
    "Fleet",
    "Is KV moving, how well, and what does it cost?",
    (HEALTH, LOSSES, FIRST_TOKEN, COST, RUNNING),
)
