"""Push: who waits for whom?"""

from __future__ import annotations

from kvops_dashboards.panels import Board, Query, Row, number, series, stacked
from kvops_dashboards.promql import highest, increase, mean, quantile, rate, ratio, select, total

_STUCK = ("KvopsPushRegistrationStuck",)
_CHOOSING = "choosing-pull-bidirectional-push"

NOW = Row(
    "Do registrations get their KV?",
    (
        number(
            "Fulfilled",
            "Share of decode's registrations that got their write. Below 1 requests wait until they are given up.",
            ("KvopsPushTimeouts",),
            ratio(
                increase("kvops_push_registrations_total", outcome="fulfilled"),
                increase("kvops_push_registrations_total", outcome="fulfilled|timed_out"),
            ),
            "percentunit",
            steps=(0.999, 0.995),
            width=6,
        ),
        number(
            "Given up",
            "Registrations given up after push_registration_timeout. Each was a user who waited that long.",
            ("KvopsPushTimeouts",),
            increase("kvops_push_registrations_total", outcome="timed_out"),
            "short",
            steps=(1, 1),
            width=6,
        ),
        number(
            "Oldest registration",
            "Age of the oldest registration without finished blocks. Beyond a long prefill: P lost the request, or "
            "the router sent it only to D.",
            _STUCK,
            highest("kvops_push_oldest_pending_age_seconds", kind="registrations"),
            "s",
            steps=(15, 30),
            width=6,
        ),
        number(
            "Oldest unclaimed blocks",
            "Age of the oldest finished blocks that no decode engine has registered for.",
            _STUCK,
            highest("kvops_push_oldest_pending_age_seconds", kind="finished_blocks"),
            "s",
            steps=(15, 30),
            width=6,
        ),
    ),
)
WAITS = Row(
    "Who waits",
    (
        series(
            "Wait by waiter, p50 and p95",
            "registration: D was first and waits for prefill, as meant. prefill_blocks: prefill was first and waits "
            "for D, so D's queue is the limit.",
            ("KvopsKvWaitHigh", _CHOOSING),
            "s",
            Query(quantile(0.5, "kvops_push_wait_seconds", "waiter"), "p50 {{waiter}}"),
            Query(quantile(0.95, "kvops_push_wait_seconds", "waiter"), "p95 {{waiter}}", exemplars=True),
        ),
        stacked(
            "Which side came first",
            "Matches a second by the side that waited.",
            (_CHOOSING,),
            "ops",
            Query(rate("kvops_push_wait_seconds", "waiter", suffix="_count"), "{{waiter}} waited"),
        ),
        series(
            "Skew of the router's legs",
            "Time between sending the two legs. More than a few milliseconds: the router is busy or a pool is full.",
            ("KvopsRouterPushSkew",),
            "s",
            Query(quantile(0.5, "kvops_router_leg_skew_seconds"), "p50"),
            Query(quantile(0.99, "kvops_router_leg_skew_seconds"), "p99"),
        ),
        series(
            "Pending on prefill",
            "Registrations without blocks and blocks without registration. A staircase is a leak.",
            _STUCK,
            "short",
            Query(total("kvops_push_pending", "kind"), "{{kind}}"),
        ),
        series(
            "Oldest pending",
            "Seconds; compare with push_registration_timeout.",
            _STUCK,
            "s",
            Query(highest("kvops_push_oldest_pending_age_seconds", "kind"), "{{kind}}"),
            Query(f"max({select('kvops_config_seconds', param='push_registration_timeout')})", "timeout"),
        ),
        series(
            "Registrations on decode",
            "Sent, fulfilled and given up, a second. sent above fulfilled for long: writes do not come.",
            ("KvopsPushTimeouts",),
            "ops",
            Query(rate("kvops_push_registrations_total", "outcome"), "{{outcome}}"),
        ),
    ),
)
WRITER = Row(
    "The writer on prefill",
    (
        series(
            "Writes: post and wire, mean",
            "The writer thread posts and waits; both together are what a registration waits for after prefill.",
            ("reading-the-phase-split",),
            "s",
            Query(mean("kvops_transfer_post_seconds", role="prefill"), "post"),
            Query(mean("kvops_transfer_duration_seconds", role="prefill"), "wire", exemplars=True),
            width=6,
        ),
        series(
            "Written",
            "Bytes a second, by engine. 0 with pending registrations and finished blocks: the writer is dead.",
            ("KvopsPushWriterDown",),
            "Bps",
            Query(rate("kvops_transfer_bytes_total", "instance", role="prefill"), "{{instance}}"),
            width=6,
        ),
        stacked(
            "Writes by outcome",
            "Any failed: see the peers table on Transfers.",
            ("KvopsPushWriterDown", "KvopsPeerErrors"),
            "ops",
            Query(rate("kvops_transfers_total", "outcome", role="prefill"), "{{outcome}}"),
            width=6,
        ),
        series(
            "Mended timeouts",
            "Registrations that the stock connector would have given up in silence, a second.",
            ("KvopsPushTimeouts",),
            "ops",
            Query(rate("kvops_mends_total", mend="push_timeout"), "push_timeout"),
            width=6,
        ),
    ),
)
BOARD = Board("kvops-push", "Push", "Who waits for whom, and do registrations get their KV?", (NOW, WAITS, WRITER))
