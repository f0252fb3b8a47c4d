"""Bidirectional: is reading back worth the blocks that decode keeps?"""

from __future__ import annotations

from kvops_dashboards.panels import Board, Query, Row, number, series, stacked
from kvops_dashboards.promql import highest, increase, quantile, rate, ratio, select, total

_SIZING = "sizing-lease-and-ttl"
_OFFERED = "loaded|expired|prefix_mismatch|failed"

WORTH = Row(
    "Is it worth it?",
    (
        number(
            "Readbacks that worked",
            "Share of the handles that had something to offer and were loaded. Low: see the outcomes below.",
            ("KvopsReadbackDeclined",),
            ratio(
                increase("kvops_readback_requests_total", outcome="loaded"),
                increase("kvops_readback_requests_total", outcome=_OFFERED),
            ),
            "percentunit",
            steps=(0.9, 0.5),
        ),
        number(
            "Prefill saved",
            "Share of the prompt tokens on prefill that came from decode instead of being computed.",
            ("KvopsReadbackDeclined",),
            ratio(
                increase("kvops_loaded_tokens_total", direction="d_to_p"),
                increase("kvops_prompt_tokens_total", role="prefill"),
            ),
            "percentunit",
        ),
        number(
            "Tokens saved",
            "Prompt tokens read back in the time range.",
            ("KvopsReadbackDeclined",),
            increase("kvops_loaded_tokens_total", direction="d_to_p"),
            "short",
        ),
        number(
            "Hold wasted",
            "Share of decode's block-seconds that ended by expiry. Near 100 %: users do not come back in time; a "
            "lower TTL frees cache.",
            ("KvopsDecodeTtlWaste",),
            ratio(
                increase("kvops_held_block_seconds_total", holder="decode", ended_by="expired"),
                increase("kvops_held_block_seconds_total", holder="decode"),
            ),
            "percentunit",
            steps=(0.8, 0.95),
        ),
        number(
            "Decode's cache held",
            "Share of decode's KV blocks kept for next turns now.",
            ("KvopsHeldBlocksHigh",),
            f"{total('kvops_held_blocks', holder='decode')} / {total('kvops_kv_blocks', role='decode')}",
            "percentunit",
            steps=(0.5, 0.8),
        ),
        number(
            "Router's handle hits",
            "Share of later turns for which the router had a usable handle.",
            ("KvopsRouterHandleMisses",),
            ratio(
                increase("kvops_router_handles_total", outcome="hit"),
                increase(
                    "kvops_router_handles_total",
                    outcome="hit|no_handle|no_digests|used|late|restarted|declined",
                ),
            ),
            "percentunit",
            steps=(0.9, 0.5),
        ),
    ),
)
REUSE = Row(
    "Reuse",
    (
        stacked(
            "Handles on prefill by outcome",
            "What became of the handles. local_hit and below_threshold are harmless; expired asks for a longer TTL; "
            "prefix_mismatch for a client that edits its history.",
            ("KvopsReadbackDeclined",),
            "reqps",
            Query(rate("kvops_readback_requests_total", "outcome"), "{{outcome}}", exemplars=True),
        ),
        stacked(
            "Turns at the router",
            "hit, or why there was no handle to send.",
            ("KvopsRouterHandleMisses",),
            "reqps",
            Query(rate("kvops_router_handles_total", "outcome"), "{{outcome}}"),
        ),
        stacked(
            "Prompt tokens on prefill",
            "local_hit, remote (read back) and computed.",
            ("KvopsRecomputeHigh",),
            "short",
            Query(rate("kvops_prompt_tokens_total", "source", role="prefill"), "{{source}}"),
        ),
        series(
            "Wait for a readback",
            "p50 and p99 of the wait for the history. Compare with the prefill time that it saves.",
            ("recompute-threshold",),
            "s",
            Query(quantile(0.5, "kvops_request_kv_wait_seconds", direction="d_to_p"), "p50"),
            Query(quantile(0.99, "kvops_request_kv_wait_seconds", direction="d_to_p"), "p99", exemplars=True),
        ),
        series(
            "Computed although on offer",
            "Offered tokens that prefill computed, a second: too few for kv_recompute_threshold, or past their TTL.",
            ("recompute-threshold",),
            "short",
            Query(rate("kvops_recompute_tokens_total", reason="below_threshold"), "below threshold"),
            Query(rate("kvops_recompute_tokens_total", reason="ttl_expired"), "TTL expired"),
        ),
        series(
            "Streamed answers without a handle",
            "Answers of decode that brought the router no handle, a second. Above 0: the next turn is recomputed.",
            ("KvopsRouterTurnsWithoutHandle", "KvopsStreamedHandlesMissing"),
            "reqps",
            Query(rate("kvops_router_turns_without_handle_total", "streamed"), "streamed {{streamed}}"),
            Query(rate("kvops_streamed_handles_total", "outcome"), "engine: {{outcome}}"),
        ),
    ),
)
LIFETIME = Row(
    "How long blocks are kept",
    (
        series(
            "Age of the hold at readback",
            "How old decode's blocks were when the next turn came. p95 near the TTL: raise decoder_kv_blocks_ttl; far "
            "below: lower it.",
            (_SIZING, "KvopsReadbackDeclined"),
            "s",
            Query(quantile(0.5, "kvops_readback_age_seconds"), "p50"),
            Query(quantile(0.95, "kvops_readback_age_seconds"), "p95", exemplars=True),
            Query(f"max({select('kvops_config_seconds', param='decoder_kv_blocks_ttl')})", "TTL"),
        ),
        series(
            "TTL left when read",
            "Headroom on decode, p05 and p50. Near 0 some readbacks already come too late.",
            ("KvopsLeaseHeadroomLow", _SIZING),
            "s",
            Query(quantile(0.05, "kvops_hold_headroom_seconds", holder="decode"), "p05"),
            Query(quantile(0.5, "kvops_hold_headroom_seconds", holder="decode"), "p50"),
        ),
        stacked(
            "Block-seconds of decode by end",
            "What the holds cost. 'expired' bought nothing.",
            ("KvopsDecodeTtlWaste",),
            "short",
            Query(rate("kvops_held_block_seconds_total", "ended_by", holder="decode"), "{{ended_by}}"),
        ),
        series(
            "Held blocks and requests on decode",
            "Kept for next turns now, by engine.",
            ("KvopsHeldBlocksHigh",),
            "short",
            Query(highest("kvops_held_blocks", "instance", holder="decode"), "blocks {{instance}}"),
            Query(highest("kvops_held_requests", "instance", holder="decode"), "requests {{instance}}"),
        ),
        stacked(
            "Holds of decode that ended",
            "read: the next turn came. expired: nobody came. released: given up early, by the router or an abort.",
            ("KvopsDecodeTtlWaste",),
            "ops",
            Query(rate("kvops_holds_ended_total", "ended_by", holder="decode"), "{{ended_by}}"),
        ),
        series(
            "Mends",
            "Times a mend stepped in, a second: each is a request that the stock connector would have hung, failed "
            "or answered wrong.",
            ("KvopsReadAfterExpiry",),
            "ops",
            Query(rate("kvops_mends_total", "mend"), "{{mend}}"),
        ),
    ),
)
BOARD = Board(
    "kvops-bidirectional",
    "Bidirectional",
    "Is reading back worth the blocks that decode keeps?",
    (WORTH, REUSE, LIFETIME),
)
