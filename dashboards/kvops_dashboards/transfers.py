"""Transfers: where is the delay, and which peer is it?"""

from __future__ import annotations

from kvops_dashboards.panels import Board, Panel, Query, Row, series, stacked
from kvops_dashboards.promql import highest, increase, lowest, mean, or_zero, quantile, rate, ratio, total

NOW = Row(
    "Right now",
    (
        series(
            "Requests waiting for KV",
            "Requests that have blocks and wait for KV. A line that only rises: loads do not end.",
            ("KvopsKvWaitStuck",),
            "short",
            Query(total("kvops_requests_waiting_kv", "role", "direction"), "{{role}} {{direction}}"),
        ),
        series(
            "Transfers in flight",
            "Posted and not ended, over all ranks. High with low throughput: the wire is the limit.",
            ("KvopsTransferStuck",),
            "short",
            Query(total("kvops_transfers_inflight", "direction"), "{{direction}}"),
        ),
        series(
            "Oldest wait and oldest transfer",
            "Age in seconds; a saw-tooth near 0 is healthy, a ramp is a stuck transfer.",
            ("KvopsTransferStuck", "KvopsKvWaitStuck"),
            "s",
            Query(highest("kvops_oldest_waiting_kv_age_seconds", "direction"), "wait {{direction}}"),
            Query(highest("kvops_oldest_inflight_transfer_age_seconds", "direction"), "transfer {{direction}}"),
        ),
    ),
)
PHASES = Row(
    "Phases of a load",
    (
        series(
            "KV wait",
            "From the allocation of blocks to the arrival of KV on all ranks. Points are single requests.",
            ("KvopsKvWaitHigh",),
            "s",
            Query(quantile(0.5, "kvops_request_kv_wait_seconds", "direction"), "p50 {{direction}}"),
            Query(quantile(0.99, "kvops_request_kv_wait_seconds", "direction"), "p99 {{direction}}", exemplars=True),
            width=12,
        ),
        stacked(
            "Mean time by phase",
            "queue, handshake, registration (push), post, wire. The tallest band is where to look.",
            ("KvopsKvWaitHigh", "reading-the-phase-split"),
            "s",
            Query(mean("kvops_request_phase_seconds", "phase"), "{{phase}}"),
            width=12,
        ),
        series(
            "Post against wire, p95",
            "Posting near the wire's time: too many descriptors, or a backend that copies while posting.",
            ("reading-the-phase-split",),
            "s",
            Query(quantile(0.95, "kvops_transfer_post_seconds", "direction"), "post {{direction}}"),
            Query(quantile(0.95, "kvops_transfer_duration_seconds", "direction"), "wire {{direction}}", exemplars=True),
        ),
        series(
            "Descriptors a transfer",
            "After NIXL merged neighbours. Growth means fragmented blocks, and posting grows with it.",
            ("reading-the-phase-split",),
            "short",
            Query(
                ratio(
                    rate("kvops_transfer_descriptors_total", "direction"),
                    rate("kvops_transfers_total", "direction", outcome="ok"),
                ),
                "{{direction}}",
            ),
        ),
        series(
            "Bytes a transfer",
            "Mean size. Small transfers pay the fixed cost of a post each.",
            ("reading-the-phase-split",),
            "bytes",
            Query(
                ratio(
                    rate("kvops_transfer_bytes_total", "direction"),
                    rate("kvops_transfers_total", "direction", outcome="ok"),
                ),
                "{{direction}}",
            ),
        ),
        stacked(
            "Transfers by outcome",
            "NIXL transfers that ended, per rank. Any failed: look at the peer below.",
            ("KvopsPeerErrors",),
            "ops",
            Query(rate("kvops_transfers_total", "direction", "outcome"), "{{direction}} {{outcome}}"),
        ),
        series(
            "Rate while on the wire",
            "Bytes over the summed wire time: what one transfer gets. Far below the link's rate: TCP instead of RDMA, "
            "or a congested rail.",
            ("KvopsPeerSlow", "efa-and-neuron-checklist"),
            "Bps",
            Query(
                ratio(
                    rate("kvops_transfer_bytes_total", "direction"),
                    rate("kvops_transfer_duration_seconds", "direction", suffix="_sum"),
                ),
                "{{direction}}",
            ),
        ),
        series(
            "Throughput by engine",
            "Bytes a second that each engine moved as the initiator.",
            ("KvopsThroughputCollapse",),
            "Bps",
            Query(rate("kvops_transfer_bytes_total", "role", "instance"), "{{role}} {{instance}}"),
        ),
    ),
)
PEERS = Row(
    "Peers",
    (
        Panel(
            "Peers",
            "Totals of the time range by peer. One peer with a rate far below the others has a bad rail or fell back "
            "to TCP; one with failures is gone or restarted.",
            ("KvopsPeerErrors", "KvopsPeerSlow"),
            (
                Query(increase("kvops_peer_transfers_total", "peer", "direction", outcome="ok")),
                Query(
                    or_zero(
                        increase("kvops_peer_transfers_total", "peer", "direction", outcome="failed"),
                        increase("kvops_peer_transfers_total", "peer", "direction"),
                    )
                ),
                Query(increase("kvops_peer_bytes_total", "peer", "direction")),
                Query(
                    f"{increase('kvops_peer_transfer_seconds_total', 'peer', 'direction')} / "
                    f"({increase('kvops_peer_transfers_total', 'peer', 'direction', outcome='ok')} > 0)"
                ),
                Query(
                    f"{increase('kvops_peer_bytes_total', 'peer', 'direction')} / "
                    f"({increase('kvops_peer_transfer_seconds_total', 'peer', 'direction')} > 0)"
                ),
            ),
            shape="table",
            width=16,
            columns={
                "peer": "Peer",
                "direction": "Direction",
                "Value #A": "Transfers",
                "Value #B": "Failed",
                "Value #C": "Moved",
                "Value #D": "Mean time",
                "Value #E": "Rate on the wire",
            },
            units={
                "Transfers": "short",
                "Failed": "short",
                "Moved": "bytes",
                "Mean time": "s",
                "Rate on the wire": "Bps",
            },
        ),
        series(
            "Mean transfer time by peer",
            "A peer that leaves the bundle is the slow one.",
            ("KvopsPeerSlow",),
            "s",
            Query(
                ratio(
                    rate("kvops_peer_transfer_seconds_total", "peer"),
                    rate("kvops_peer_transfers_total", "peer", outcome="ok"),
                ),
                "{{peer}}",
            ),
        ),
    ),
)
HANDSHAKES = Row(
    "Handshakes and heartbeats",
    (
        stacked(
            "Handshakes in five minutes",
            "By outcome. incompatible: version, model, dtype or mode differ. engine_mismatch: another engine answers "
            "at that address. timeout: the side channel is not reachable.",
            ("KvopsHandshakeFailures",),
            "short",
            Query(increase("kvops_handshakes_total", "outcome", window="5m"), "{{outcome}}"),
            width=6,
        ),
        series(
            "Handshake time since start",
            "Mean by engine since it started, for handshakes are rare; the first request to a new peer pays it.",
            ("KvopsHandshakeFailures",),
            "s",
            Query(
                ratio(
                    total("kvops_handshake_duration_seconds", "role", "instance", suffix="_sum"),
                    total("kvops_handshake_duration_seconds", "role", "instance", suffix="_count"),
                ),
                "{{role}} {{instance}}",
            ),
            width=6,
        ),
        series(
            "Connected peers",
            "Remote engines that an engine is connected to. 0 with traffic: no hand-off can work.",
            ("KvopsHandshakeFailures",),
            "short",
            Query(lowest("kvops_remote_engines", "role", "instance"), "{{role}} {{instance}}"),
            width=6,
        ),
        series(
            "Heartbeats and renewals",
            "Heartbeats sent by decode and leases that they renewed on prefill. Failed ones let leases run out under "
            "load.",
            ("KvopsHeartbeatFailing",),
            "ops",
            Query(rate("kvops_heartbeats_total", "outcome"), "{{outcome}}"),
            Query(rate("kvops_lease_renewals_total"), "leases renewed"),
            width=6,
        ),
    ),
)
BOARD = Board(
    "kvops-transfers", "Transfers", "Where is the delay, and which peer is it?", (NOW, PHASES, PEERS, HANDSHAKES)
)
