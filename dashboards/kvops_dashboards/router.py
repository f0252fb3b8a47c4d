"""Router: do clients get answers, and which engine is to blame if not?"""

from __future__ import annotations

from kvops_dashboards.panels import Board, Query, Row, number, series, stacked
from kvops_dashboards.promql import highest, increase, lowest, or_zero, quantile, rate, ratio, select, total

_BURN = ("KvopsHandoffErrorBudgetBurn",)
_FAILED_LEGS = "connect|broken|timeout|http_error|overloaded|no_handle|stream_error|restarted|kv_wait"

# An exclusion, for the outcomes of a request are an open list: every kind of error is one.
_ANSWERABLE = 'sum(increase(kvops_router_requests_total{instance=~"$router",outcome!~"refused|client_gone"}[$__range]))'

CLIENTS = Row(
    "Clients",
    (
        number(
            "Answered",
            "Share of requests that ended ok, without those that clients broke off or the engine refused as wrong.",
            ("KvopsRouterErrorBudgetBurn",),
            ratio(
                increase("kvops_router_requests_total", outcome="ok"),
                _ANSWERABLE,
            ),
            "percentunit",
            steps=(0.999, 0.995),
            width=6,
        ),
        number(
            "Requests",
            "Requests that ended, a second.",
            ("KvopsRouterErrorBudgetBurn",),
            rate("kvops_router_requests_total"),
            "reqps",
            width=6,
        ),
        number(
            "Engines out",
            "Engines that take no requests now. Each is lost capacity.",
            ("KvopsRouterEngineOut", "KvopsRouterNoEngine"),
            f"sum(1 - {total('kvops_router_endpoint_up', 'role', 'engine')})",
            "short",
            steps=(1, 1),
            width=6,
        ),
        number(
            "Oldest unread answer of prefill",
            "Blocks that wait on prefill for decode to begin. Near the lease: they will be lost.",
            ("KvopsRouterHandoverUnread",),
            highest("kvops_router_handed_over_oldest_seconds"),
            "s",
            steps=(10, 20),
            width=6,
        ),
        stacked(
            "Requests by outcome",
            "ok, refused (the engine's own 4xx), client_gone, broken off, or the error that the client got.",
            ("KvopsRouterErrorBudgetBurn",),
            "reqps",
            Query(rate("kvops_router_requests_total", "outcome"), "{{outcome}}"),
        ),
        series(
            "First byte",
            "Time to the first byte of the answer, by mode.",
            ("KvopsKvWaitHigh",),
            "s",
            Query(quantile(0.5, "kvops_router_first_byte_seconds", "mode"), "p50 {{mode}}"),
            Query(quantile(0.99, "kvops_router_first_byte_seconds", "mode"), "p99 {{mode}}"),
        ),
        series(
            "Whole answer",
            "Time to the end of the answer, by mode.",
            ("KvopsKvWaitHigh",),
            "s",
            Query(quantile(0.5, "kvops_router_request_seconds", "mode"), "p50 {{mode}}"),
            Query(quantile(0.99, "kvops_router_request_seconds", "mode"), "p99 {{mode}}"),
        ),
    ),
)
LEGS = Row(
    "Legs",
    (
        stacked(
            "Legs by outcome",
            "Requests to engines. connect: it is down. timeout: it hangs. overloaded: it is full. kv_wait: decode "
            "waited too long for KV.",
            ("KvopsRouterErrorBudgetBurn",),
            "reqps",
            Query(rate("kvops_router_legs_total", "role", "outcome"), "{{role}} {{outcome}}"),
        ),
        series(
            "Failed legs by engine",
            "Share of an engine's legs that failed. One engine alone: take it out. All: look at the network.",
            ("KvopsRouterEngineOut",),
            "percentunit",
            Query(
                or_zero(
                    ratio(
                        rate("kvops_router_legs_total", "role", "engine", outcome=_FAILED_LEGS),
                        rate("kvops_router_legs_total", "role", "engine"),
                    ),
                    rate("kvops_router_legs_total", "role", "engine"),
                ),
                "{{role}} {{engine}}",
            ),
            largest=1.0,
        ),
        series(
            "Leg time by engine, p95",
            "A single engine above the others is slow.",
            ("KvopsPeerSlow",),
            "s",
            Query(quantile(0.95, "kvops_router_leg_seconds", "role", "engine"), "{{role}} {{engine}}"),
        ),
        stacked(
            "Retries by reason",
            "Second attempts, a second: errors that clients did not see.",
            ("KvopsRouterRetriesHigh",),
            "ops",
            Query(rate("kvops_router_retries_total", "reason"), "{{reason}}"),
        ),
        series(
            "Hand-over",
            "Time from P's answer to the sending of D's leg. P's lease runs meanwhile.",
            ("KvopsRouterHandoverUnread",),
            "s",
            Query(quantile(0.5, "kvops_router_handover_seconds"), "p50"),
            Query(quantile(0.99, "kvops_router_handover_seconds"), "p99"),
        ),
        stacked(
            "Blocks given back unread",
            "Why the router had an engine free blocks that nobody read. 'not freed' ones stay held until they expire.",
            ("KvopsRouterReleasesFailing",),
            "ops",
            Query(rate("kvops_router_releases_total", "reason", outcome="sent"), "{{reason}}"),
            Query(rate("kvops_router_releases_total", outcome="failed|unexpected|skipped"), "not freed"),
        ),
    ),
)
POOL = Row(
    "Pool and conversations",
    (
        series(
            "Legs under way",
            "By engine. Uneven for long: one engine is slow or its neighbours are out.",
            ("KvopsPrefillDecodeImbalance",),
            "short",
            Query(total("kvops_router_in_flight", "role", "engine"), "{{role}} {{engine}}"),
            width=6,
        ),
        series(
            "Waiting for a place",
            "Requests queued in the router. Above 0 for long: the role is too small.",
            ("KvopsRouterQueueing",),
            "short",
            Query(total("kvops_router_queued", "role"), "{{role}}"),
            width=6,
        ),
        series(
            "Engines that take requests",
            "1 is in, 0 is out: its role has that much less room.",
            ("KvopsRouterEngineOut",),
            "short",
            Query(lowest("kvops_router_endpoint_up", "role", "engine"), "{{role}} {{engine}}"),
            width=6,
        ),
        series(
            "Handles kept",
            "Conversations whose KV decode still holds. Each is evicted at its TTL.",
            ("KvopsRouterHandleMisses",),
            "short",
            Query(total("kvops_router_conversations"), "conversations"),
            width=6,
        ),
        series(
            "Memory of handles",
            "Bytes; bounded by the router's own limit.",
            ("KvopsRouterHandleMisses",),
            "bytes",
            Query(total("kvops_router_conversation_bytes"), "bytes"),
            width=12,
        ),
        series(
            "Journal lines lost",
            "A second. Above 0 kvops trace is incomplete.",
            ("KvopsJournalDropped",),
            "ops",
            Query(f"sum(clamp_min(deriv({select('kvops_router_journal_dropped_total')}[5m]), 0))", "lost"),
            width=12,
        ),
    ),
)
BOARD = Board(
    "kvops-router", "Router", "Do clients get answers, and which engine is to blame if not?", (CLIENTS, LEGS, POOL)
)
