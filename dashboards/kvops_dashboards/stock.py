"""Stock vLLM: what can be seen of KV transfer without the instrumented connectors."""

from __future__ import annotations

from kvops_dashboards.panels import Board, Panel, Query, Row, number, series, stacked
from kvops_dashboards.promql import increase, mean, quantile, rate, total

_LIMITS = """\
vLLM's own metrics cannot tell P to D from D to P, name a peer or a request, or say why tokens were recomputed.
`vllm:nixl_*` count per worker rank: with tensor parallelism 8 one request counts eight times. A transfer that never
ends is never observed. The external-hit counters count at admission, so a load that failed still looks like a hit.

For those questions start the engines with kvops' connectors (`kvops up`, or
`kv_connector_module_path: kvops_connectors`).
"""

DANGER = Row(
    "Danger",
    (
        number(
            "Suspect answers",
            "Completion notices after the lease had ended: the reader may have used reused blocks although the client "
            "got HTTP 200. Counted per rank.",
            ("KvopsStockReadAfterExpiry",),
            increase("vllm:nixl_num_notifications_after_expiry_total"),
            "short",
            steps=(1, 1),
            width=6,
        ),
        number(
            "Failed transfers",
            "Transfers, handshakes and notifications that failed, lumped, per rank.",
            ("KvopsStockTransferFailures",),
            increase("vllm:nixl_num_failed_transfers_total"),
            "short",
            steps=(1, 1),
            width=6,
        ),
        number(
            "Expired holds",
            "Leases that ran out on prefill, TTLs that ran out on decode and declined readbacks, lumped, per rank. In "
            "bidirectional mode some are normal.",
            ("KvopsStockLeaseExpired",),
            increase("vllm:nixl_num_kv_expired_reqs_total"),
            "short",
            width=6,
        ),
        number(
            "Requests that ended in an error",
            "By any cause; kv_load_failure_policy=fail makes a failed load one of them.",
            ("KvopsStockTransferFailures",),
            increase("vllm:request_success_total", finished_reason="error"),
            "short",
            steps=(1, 1),
            width=6,
        ),
    ),
)
TRANSFERS = Row(
    "Transfers",
    (
        series(
            "Transfer time",
            "Per rank, successful ones only. Buckets begin at 5 ms, so shorter transfers all look like 5 ms.",
            ("KvopsStockTransferFailures",),
            "s",
            Query(quantile(0.5, "vllm:nixl_xfer_time_seconds"), "p50"),
            Query(quantile(0.99, "vllm:nixl_xfer_time_seconds"), "p99"),
        ),
        series(
            "Post time",
            "Time to hand the descriptors to NIXL, mean and p99.",
            ("reading-the-phase-split",),
            "s",
            Query(mean("vllm:nixl_post_time_seconds"), "mean"),
            Query(quantile(0.99, "vllm:nixl_post_time_seconds"), "p99"),
        ),
        series(
            "Throughput by engine",
            "Bytes a second, wall clock.",
            ("KvopsStockKvNotMoving",),
            "Bps",
            Query(rate("vllm:nixl_bytes_transferred", "role", "instance", suffix="_sum"), "{{role}} {{instance}}"),
        ),
        series(
            "Descriptors a transfer",
            "Mean; growth means fragmented blocks.",
            ("reading-the-phase-split",),
            "short",
            Query(mean("vllm:nixl_num_descriptors"), "mean"),
        ),
        series(
            "Failures and expiries",
            "A second, per rank. Any failure costs a recompute, or the answer.",
            ("KvopsStockTransferFailures", "KvopsStockLeaseExpired"),
            "ops",
            Query(rate("vllm:nixl_num_failed_transfers_total"), "failed"),
            Query(rate("vllm:nixl_num_failed_notifications_total"), "failed notifications"),
            Query(rate("vllm:nixl_num_kv_expired_reqs_total"), "expired"),
            Query(rate("vllm:nixl_num_notifications_after_expiry_total"), "read after expiry"),
        ),
        series(
            "Requests that fetch KV",
            "On decode, by stage. in_progress that does not fall: a transfer is stuck.",
            ("KvopsStockFetchStuck",),
            "short",
            Query(total("vllm:num_requests_kv_fetch_by_stage", "stage"), "{{stage}}"),
        ),
    ),
)
ENGINES = Row(
    "Engines",
    (
        series(
            "Time to first token on the engine",
            "p50 and p99 by role; on decode it includes the wait for KV.",
            ("KvopsStockFetchStuck",),
            "s",
            Query(quantile(0.5, "vllm:time_to_first_token_seconds", "role"), "p50 {{role}}"),
            Query(quantile(0.99, "vllm:time_to_first_token_seconds", "role"), "p99 {{role}}"),
        ),
        series(
            "Time between tokens",
            "Mean and p99. It grows when decode computes prompts itself or is overloaded.",
            ("KvopsRecomputeHigh",),
            "s",
            Query(mean("vllm:inter_token_latency_seconds", "role"), "mean {{role}}"),
            Query(quantile(0.99, "vllm:inter_token_latency_seconds", "role"), "p99 {{role}}"),
        ),
        stacked(
            "Prompt tokens by source",
            "A second, as counted at admission: a load that failed later still counts as external.",
            ("KvopsRecomputeHigh",),
            "short",
            Query(rate("vllm:prompt_tokens_by_source_total", "role", "source"), "{{role}} {{source}}"),
        ),
        series(
            "KV cache in use",
            "By engine. High with few running requests: blocks are held for peers.",
            ("KvopsStockLeaseExpired",),
            "percentunit",
            Query(total("vllm:kv_cache_usage_perc", "role", "instance"), "{{role}} {{instance}}"),
            largest=1.0,
        ),
        series(
            "Running and waiting",
            "Requests by role. Waiting above 0 for long: the role is too small.",
            ("KvopsPrefillDecodeImbalance",),
            "short",
            Query(total("vllm:num_requests_running", "role"), "running {{role}}"),
            Query(total("vllm:num_requests_waiting", "role"), "waiting {{role}}"),
        ),
        series(
            "Preemptions",
            "A second; each throws computed KV away.",
            ("KvopsRecomputeHigh",),
            "ops",
            Query(rate("vllm:num_preemptions_total", "role"), "{{role}}"),
        ),
        Panel(
            "What this cannot show",
            "The limits of vLLM's own metrics.",
            ("KvopsMetricsAbsent",),
            shape="text",
            width=24,
            height=5,
            markdown=_LIMITS,
        ),
    ),
)
BOARD = Board(
    "kvops-stock-vllm",
    "Stock vLLM",
    "What can be seen of KV transfer without the instrumented connectors?",
    (DANGER, TRANSFERS, ENGINES),
    anchor="vllm:kv_cache_usage_perc",
)
