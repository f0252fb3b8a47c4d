"""Request: which requests were slow or lost, and what does the journal say about one of them?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvops_connectors import journal
from kvops_dashboards.panels import Board, Panel, Query, Row, series, stacked
from kvops_dashboards.promql import increase, quantile, rate

if TYPE_CHECKING:
    import msgspec

_GUIDE = """\
Points on the graphs below are **exemplars**: single requests. Hover one to read its `request_id`, put it into
*Request id* above, and ask the journal, on any machine that has the fleet's journal folder:

    kvops trace $request

It joins the lines of the router, prefill and decode by the base id into one timeline, with the cause of every
recomputed token.
"""


def _fields() -> str:
    """Return the journal's fields as a Markdown table, from the structs that write them."""
    parts: dict[str, type[msgspec.Struct]] = {
        "engine": journal.Engine,
        "request": journal.RequestIds,
        "tokens": journal.Tokens,
        "transfer": journal.Transfer,
        "hold": journal.Hold,
        "push": journal.Push,
    }
    lines = ["| Part of a journal line | Fields |", "|---|---|"]
    for name, struct in parts.items():
        lines.append(f"| `{name}` | {', '.join(f'`{field}`' for field in struct.__struct_fields__)} |")
    return "\n".join(lines)


HOW = Row(
    "From a graph to a request",
    (
        Panel(
            "How to follow one request",
            "Request ids are never labels; they travel as exemplars and in the journal.",
            ("following-one-request",),
            shape="text",
            width=10,
            height=6,
            markdown=_GUIDE,
        ),
        Panel(
            "What the journal says",
            "The fields of a journal line; kvops trace shows them with their units.",
            ("following-one-request",),
            shape="text",
            width=14,
            height=6,
            markdown=_fields(),
        ),
    ),
)
SLOW = Row(
    "Slow requests",
    (
        series(
            "KV wait",
            "p99 and single requests. A point far above the line is worth a trace.",
            ("KvopsKvWaitHigh",),
            "s",
            Query(quantile(0.99, "kvops_request_kv_wait_seconds", "direction"), "p99 {{direction}}", exemplars=True),
            width=12,
        ),
        series(
            "Phases, p95",
            "p95 of each phase and single requests.",
            ("KvopsKvWaitHigh", "reading-the-phase-split"),
            "s",
            Query(quantile(0.95, "kvops_request_phase_seconds", "phase"), "{{phase}}", exemplars=True),
            width=12,
        ),
        series(
            "Readback age",
            "How old decode's blocks were when the next turn came, with single requests.",
            ("KvopsReadbackDeclined",),
            "s",
            Query(quantile(0.95, "kvops_readback_age_seconds"), "p95", exemplars=True),
        ),
        series(
            "Push wait",
            "How long the first side waited for the other, with single requests.",
            ("KvopsPushRegistrationStuck",),
            "s",
            Query(quantile(0.95, "kvops_push_wait_seconds", "waiter"), "{{waiter}}", exemplars=True),
        ),
        series(
            "Headroom at read, p05",
            "Time left when the blocks were read, with single requests: the lowest came closest to expiry.",
            ("KvopsLeaseHeadroomLow",),
            "s",
            Query(quantile(0.05, "kvops_hold_headroom_seconds", "holder"), "{{holder}}", exemplars=True),
        ),
    ),
)
LOST = Row(
    "Lost, suspect and recomputed requests",
    (
        stacked(
            "Lost to KV, in five minutes",
            "By reason, with the ids of the requests.",
            ("KvopsKvFailedRequests",),
            "short",
            Query(increase("kvops_kv_failed_requests_total", "reason", window="5m"), "{{reason}}", exemplars=True),
        ),
        stacked(
            "Possibly wrong, in five minutes",
            "Reads after expiry, with the ids of the requests whose answers are suspect.",
            ("KvopsReadAfterExpiry",),
            "short",
            Query(increase("kvops_reads_after_expiry_total", "holder", window="5m"), "{{holder}}", exemplars=True),
        ),
        stacked(
            "Recomputed, requests a second",
            "Requests with tokens computed for the reason. new_tokens and last_token are what prefill is for.",
            ("KvopsRecomputeHigh",),
            "reqps",
            Query(rate("kvops_recompute_requests_total", "reason"), "{{reason}}", exemplars=True),
        ),
        stacked(
            "Journal lines written",
            "A second, by engine. 0 with traffic: kvops trace has nothing to show.",
            ("KvopsJournalDropped",),
            "ops",
            Query(rate("kvops_journal_records_total", "role", "instance"), "{{role}} {{instance}}"),
            width=12,
        ),
        stacked(
            "Journal lines lost",
            "A second, by cause. Above 0 some requests cannot be traced.",
            ("KvopsJournalDropped",),
            "ops",
            Query(rate("kvops_journal_dropped_total", "cause"), "{{cause}}"),
            width=12,
        ),
    ),
)
BOARD = Board(
    "kvops-request",
    "Request",
    "Which requests were slow or lost, and what does the journal say about one of them?",
    (HOW, SLOW, LOST),
    text_variable="request",
)
