"""The alerts: what is measured, when that is too much, and where to look.

``$words`` in expressions are values of ``values.yaml``: first those of the alert itself, then those that all share.
Ratios are guarded by a floor of traffic, so that one failed request of a quiet night pages nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

ENGINE = "{{ $labels.instance }}"
MODEL = "{{ $labels.model_name }}"
VALUE = "{{ $value | humanize }}"
SHARE = "{{ $value | humanizePercentage }}"

# Not the fleet's errors: the engine's own 4xx, and clients that left.
_NOT_OURS = "refused|client_gone"
# Tokens that somebody has to compute, or that are cheaper to compute.
_EXPECTED = "new_tokens|last_token|below_threshold"


@dataclass(frozen=True)
class Alert:
    """One alert.

    Attributes:
        name: also the name of its runbook and of its entry in the values file.
        measure: PromQL of the figure that is judged.
        breach: comparison that makes it an alert.
        condition: the comparison in words, with ``$words`` of the values file.
        summary: one line; may use the labels of ``measure``.
        description: what it means and which value it has.
        dashboard: uid of the dashboard to open.
        guard: further condition, such as a floor of traffic.
    """

    name: str
    measure: str
    breach: str
    condition: str
    summary: str
    description: str
    dashboard: str = "kvops-fleet"
    guard: str = ""


_FAST = (("1h", "5m", "fast"), ("6h", "30m", "medium"))
_SLOW = (("3d", "6h", "slow"),)
HANDOFF = "model_name:kvops_handoff_errors"
ROUTER = "instance:kvops_router_errors"


def either(expression: str) -> str:
    """Return ``expression`` over ``vllm:`` names, or over ``vllm_`` names where the scraper rewrote them.

    Prometheus 2 that negotiates OpenMetrics stores ``vllm_``; Prometheus 3, and text scrapes, store ``vllm:``. ``or``
    takes one of the two per engine, so an upgrade of Prometheus neither doubles a figure nor breaks a rule.
    """
    return f"({expression} or {expression.replace('vllm:', 'vllm_')})"


HANDOFF_ALERTS = (
    Alert(
        "KvopsReadAfterExpiry",
        "sum by (instance, model_name, holder) (increase(kvops_reads_after_expiry_total[10m]))",
        "> $reads",
        "more than $reads completion notices for blocks whose hold had ended, in 10 minutes",
        f"Answers of {MODEL} may be wrong: KV was read after its hold had ended on {ENGINE}",
        f"{VALUE} notices in 10 minutes for blocks held by {{{{ $labels.holder }}}} whose hold had ended. The "
        "blocks may have been in use by another request when they were read; clients got HTTP 200.",
    ),
    Alert(
        "KvopsHandoffErrorBudgetBurn",
        "model_name:kvops_handoff_errors:ratio_rate5m",
        "",
        "hand-offs fail $fast times (1h and 5m) or $medium times (6h and 30m) faster than the budget of $handoff",
        f"Hand-offs of {MODEL} burn their error budget",
        f"{SHARE} of hand-offs did not bring their KV: tokens were computed again or requests failed.",
    ),
    Alert(
        "KvopsHandoffErrorBudgetBurnSlow",
        "model_name:kvops_handoff_errors:ratio_rate6h",
        "",
        "hand-offs fail $slow times faster than the budget of $handoff allows (3d and 6h)",
        f"Hand-offs of {MODEL} use up their error budget slowly",
        f"{SHARE} of hand-offs over three days did not bring their KV.",
    ),
    Alert(
        "KvopsKvNotMoving",
        "sum by (model_name) (rate(kvops_transfer_bytes_total[5m]))",
        "== 0",
        "no byte of KV moved for 5 minutes while the routers answer more than $requests_per_second requests a second",
        f"No KV moves for {MODEL} although requests are answered",
        "Requests succeed, yet no engine moved a byte of KV in 5 minutes: decode computes every prompt itself.",
        guard='and on () sum(rate(kvops_router_requests_total{outcome="ok"}[5m])) > $requests_per_second',
    ),
    Alert(
        "KvopsKvWaitHigh",
        "1 - sum by (model_name, direction) "
        '(rate(kvops_request_kv_wait_seconds_bucket{le="$bucket_seconds"}[10m])) '
        "/ sum by (model_name, direction) (rate(kvops_request_kv_wait_seconds_count[10m]))",
        "> $share",
        "more than $share of requests waited longer than $bucket_seconds s for KV",
        f"Requests of {MODEL} wait long for KV ({{{{ $labels.direction }}}})",
        f"{SHARE} of the loads ({{{{ $labels.direction }}}}) took longer than $bucket_seconds s.",
        guard="and sum by (model_name, direction) (rate(kvops_request_kv_wait_seconds_count[10m])) > $floor_per_second",
    ),
    Alert(
        "KvopsKvWaitStuck",
        "max by (instance, model_name, engine, direction) (kvops_oldest_waiting_kv_age_seconds)",
        "> $seconds",
        "a request has waited longer than $seconds s for KV",
        f"A request on {ENGINE} is stuck waiting for KV",
        f"The oldest wait for KV ({{{{ $labels.direction }}}}) is {VALUE} s old.",
    ),
    Alert(
        "KvopsKvFailedRequests",
        "sum by (instance, model_name, reason) (increase(kvops_kv_failed_requests_total[5m]))",
        "> $requests",
        "more than $requests requests lost their answer because KV could not be loaded, in 5 minutes",
        f"Requests of {MODEL} fail because KV cannot be loaded on {ENGINE}",
        f"{VALUE} requests in 5 minutes ended in an error, reason {{{{ $labels.reason }}}}.",
    ),
    Alert(
        "KvopsRecomputeHigh",
        "model_name:kvops_recompute_tokens:ratio_rate15m",
        "> $share",
        "more than $share of the tokens that could have been loaded were computed again",
        f"{MODEL} computes tokens again that it should have loaded",
        f"{SHARE} of the tokens that a peer held were computed again in 15 minutes.",
        guard='and sum by (model_name) (rate(kvops_requests_total{direction!="none"}[15m])) > $floor_per_second',
    ),
)

TRANSFER_ALERTS = (
    Alert(
        "KvopsTransferStuck",
        "max by (instance, model_name, engine, direction) (kvops_oldest_inflight_transfer_age_seconds)",
        "> on (instance, model_name, engine) group_left () ($share_of_lease * max by (instance, model_name, engine) "
        '(kvops_config_seconds{param="kv_lease_duration"}))',
        "a transfer has been in flight for more than $share_of_lease of kv_lease_duration",
        f"A KV transfer on {ENGINE} does not end",
        f"The oldest transfer ({{{{ $labels.direction }}}}) is {VALUE} s old; NIXL reports no end and no error.",
        "kvops-transfers",
    ),
    Alert(
        "KvopsPeerErrors",
        "peer_direction:kvops_peer_errors:ratio_rate10m",
        "> $share",
        "more than $share of the transfers with one peer failed",
        f"Transfers of {MODEL} with peer {{{{ $labels.peer }}}} fail",
        f"{SHARE} of the transfers ({{{{ $labels.direction }}}}) with this peer failed in 10 minutes.",
        "kvops-transfers",
        guard="and sum by (model_name, peer, direction) (rate(kvops_peer_transfers_total[10m])) > $floor_per_second",
    ),
    Alert(
        "KvopsPeerSlow",
        "peer_direction:kvops_peer_seconds_per_byte:rate10m",
        "> on (model_name, direction) group_left () ($times_median * quantile by (model_name, direction) "
        "(0.5, peer_direction:kvops_peer_seconds_per_byte:rate10m))",
        "one peer needs more than $times_median times the median seconds a byte; at least $peers peers",
        f"Transfers of {MODEL} with peer {{{{ $labels.peer }}}} are slow",
        f"{VALUE} s a byte ({{{{ $labels.direction }}}}): far more than the median peer.",
        "kvops-transfers",
        guard="and on (model_name, direction) count by (model_name, direction) "
        "(peer_direction:kvops_peer_seconds_per_byte:rate10m) >= $peers",
    ),
    Alert(
        "KvopsThroughputCollapse",
        "instance_direction:kvops_wire_bytes_per_second:rate30m",
        "< $share_of_baseline * avg_over_time(instance_direction:kvops_wire_bytes_per_second:rate30m[6h] offset 1h)",
        "bytes per second on the wire below $share_of_baseline of the six hours before",
        f"KV moves far slower than before on {ENGINE}",
        "Transfers ({{ $labels.direction }}) run at {{ $value | humanize }}B/s while on the wire.",
        "kvops-transfers",
        guard="and sum by (instance, model_name, direction) "
        '(rate(kvops_transfers_total{outcome="ok"}[30m])) > $floor_per_second',
    ),
    Alert(
        "KvopsHandshakeFailures",
        'sum by (instance, model_name, outcome) (increase(kvops_handshakes_total{outcome!="ok"}[10m]))',
        "> $handshakes",
        "more than $handshakes failed handshakes in 10 minutes",
        f"NIXL handshakes fail on {ENGINE}",
        f"{VALUE} handshakes in 10 minutes ended with {{{{ $labels.outcome }}}}.",
        "kvops-transfers",
    ),
    Alert(
        "KvopsHeartbeatFailing",
        'sum by (instance, model_name) (rate(kvops_heartbeats_total{outcome="failed"}[10m])) '
        "/ sum by (instance, model_name) (rate(kvops_heartbeats_total[10m]))",
        "> $share",
        "more than $share of the heartbeats could not be sent",
        f"Heartbeats of {ENGINE} do not leave",
        f"{SHARE} of the heartbeats failed in 10 minutes: leases on prefill run out although decode is alive.",
        "kvops-transfers",
    ),
)

HOLD_ALERTS = (
    Alert(
        "KvopsHeldBlocksHigh",
        "instance:kvops_held_blocks:ratio",
        "> $share",
        "more than $share of an engine's KV blocks are held for peers",
        f"Held blocks fill the KV cache of {ENGINE}",
        f"{SHARE} of the KV blocks are held for a peer; new requests queue.",
    ),
    Alert(
        "KvopsLeaseHeadroomLow",
        "histogram_quantile(0.05, sum by (model_name, le) "
        '(rate(kvops_hold_headroom_seconds_bucket{holder="prefill"}[15m])))',
        '< on (model_name) ($share_of_lease * min by (model_name) (kvops_config_seconds{param="kv_lease_duration"}))',
        "one in twenty reads ended with less than $share_of_lease of kv_lease_duration left",
        f"Reads of {MODEL} end shortly before the lease does",
        f"One in twenty reads had less than {VALUE} s of its lease left.",
        guard="and on (model_name) sum by (model_name) "
        '(rate(kvops_hold_headroom_seconds_count{holder="prefill"}[15m])) > $floor_per_second',
    ),
    Alert(
        "KvopsLeaseExpired",
        'sum by (instance, model_name) (rate(kvops_holds_ended_total{holder="prefill",ended_by="expired"}[10m])) '
        '/ sum by (instance, model_name) (rate(kvops_holds_ended_total{holder="prefill"}[10m]))',
        "> $share",
        "more than $share of the leases on prefill ran out unread",
        f"Leases run out unread on {ENGINE}",
        f"{SHARE} of the leases that ended in 10 minutes ran out: nobody read the blocks.",
        guard="and sum by (instance, model_name) "
        '(rate(kvops_holds_ended_total{holder="prefill"}[10m])) > $floor_per_second',
    ),
    Alert(
        "KvopsDecodeTtlWaste",
        "sum by (model_name) "
        '(rate(kvops_held_block_seconds_total{holder="decode",ended_by="expired"}[1h])) '
        '/ sum by (model_name) (rate(kvops_held_block_seconds_total{holder="decode"}[1h]))',
        "> $share",
        "more than $share of the block-seconds that decode held were never read",
        f"Decode of {MODEL} holds blocks that nobody reads back",
        f"{SHARE} of the block-seconds held on decode ended unread.",
        "kvops-bidirectional",
        guard='and sum by (model_name) (rate(kvops_holds_ended_total{holder="decode"}[1h])) > $floor_per_second',
    ),
    Alert(
        "KvopsReadbackDeclined",
        'sum by (model_name) (rate(kvops_readback_requests_total{outcome="expired"}[30m])) '
        "/ sum by (model_name) (rate(kvops_readback_requests_total[30m]))",
        "> $share",
        "more than $share of the handles came after their blocks' TTL",
        f"Readbacks of {MODEL} come too late",
        f"{SHARE} of the turns with a handle came after decoder_kv_blocks_ttl and were computed again.",
        "kvops-bidirectional",
        guard="and sum by (model_name) (rate(kvops_readback_requests_total[30m])) > $floor_per_second",
    ),
    Alert(
        "KvopsStreamedHandlesMissing",
        'sum by (instance, model_name) (rate(kvops_streamed_handles_total{outcome="missing"}[10m])) '
        "/ sum by (instance, model_name) (rate(kvops_streamed_handles_total[10m]))",
        "> $share",
        "more than $share of the streamed answers had no handle to send",
        f"Streamed answers of {ENGINE} carry no handle",
        f"{SHARE} of the streamed answers came without the handle that the router asked for; their next turns are "
        "computed in full.",
        "kvops-bidirectional",
        guard="and sum by (instance, model_name) (rate(kvops_streamed_handles_total[10m])) > $floor_per_second",
    ),
    Alert(
        "KvopsPrefillDecodeImbalance",
        'max(instance:kvops_held_blocks:ratio{holder="prefill"})',
        "> $share",
        "prefill holds more than $share of its blocks while more than $queued requests queue for decode",
        "Decode does not keep up with prefill",
        f"{SHARE} of a prefill engine's blocks wait for decode, and requests queue for decode.",
        guard='and sum(kvops_router_queued{role="decode"}) > $queued',
    ),
)

PUSH_ALERTS = (
    Alert(
        "KvopsPushRegistrationStuck",
        'max by (instance, model_name, engine) (kvops_push_oldest_pending_age_seconds{kind="registrations"})',
        "> $seconds",
        "decode's registration has waited longer than $seconds s for prefill",
        f"Push: a registration on {ENGINE} waits for its prefill",
        f"The oldest registration of decode has waited {VALUE} s for prefill to finish.",
        "kvops-push",
    ),
    Alert(
        "KvopsPushWriterDown",
        "min by (instance, model_name, engine) (kvops_push_oldest_pending_age_seconds)",
        "> $seconds",
        "registrations and finished blocks have both waited longer than $seconds s and no transfer ended",
        f"Push: {ENGINE} writes nothing although both sides are ready",
        f"Registrations and finished blocks have both waited for {VALUE} s, and no transfer ended in 2 minutes.",
        "kvops-push",
        guard="unless on (instance, model_name, engine) sum by (instance, model_name, engine) "
        '(rate(kvops_transfers_total{direction="p_to_d",outcome="ok"}[2m])) > 0',
    ),
    Alert(
        "KvopsPushTimeouts",
        'sum by (instance, model_name) (increase(kvops_push_registrations_total{outcome="timed_out"}[10m]))',
        "> $registrations",
        "more than $registrations registrations given up after push_registration_timeout, in 10 minutes",
        f"Push: {ENGINE} gave up waiting for KV",
        f"{VALUE} registrations timed out in 10 minutes.",
        "kvops-push",
    ),
)

ROUTER_ALERTS = (
    Alert(
        "KvopsRouterErrorBudgetBurn",
        "instance:kvops_router_errors:ratio_rate5m",
        "",
        "requests fail $fast times (1h and 5m) or $medium times (6h and 30m) faster than the budget of $router allows",
        f"Requests through {ENGINE} burn their error budget",
        f"{SHARE} of client requests ended in an error of the fleet.",
        "kvops-router",
    ),
    Alert(
        "KvopsRouterErrorBudgetBurnSlow",
        "instance:kvops_router_errors:ratio_rate6h",
        "",
        "requests fail $slow times faster than the budget of $router allows (3d and 6h)",
        f"Requests through {ENGINE} use up their error budget slowly",
        f"{SHARE} of client requests over three days ended in an error of the fleet.",
        "kvops-router",
    ),
    Alert(
        "KvopsRouterNoEngine",
        "sum by (instance, role) (kvops_router_endpoint_up)",
        "< $engines",
        "fewer than $engines engines of a role take requests",
        f"Router {ENGINE} has no {{{{ $labels.role }}}} engine",
        f"{VALUE} {{{{ $labels.role }}}} engines take requests; every client gets an error.",
        "kvops-router",
    ),
    Alert(
        "KvopsRouterEngineOut",
        "min by (instance, role, engine) (kvops_router_endpoint_up)",
        "< $up",
        "one engine takes no requests",
        "Router leaves {{ $labels.role }} engine {{ $labels.engine }} out",
        f"Router {ENGINE} gives {{{{ $labels.role }}}} engine {{{{ $labels.engine }}}} nothing: it failed, or drains.",
        "kvops-router",
    ),
    Alert(
        "KvopsRouterQueueing",
        "max by (instance, role) (kvops_router_queued)",
        "> $queued",
        "more than $queued requests wait for a place",
        f"Requests queue for {{{{ $labels.role }}}} on router {ENGINE}",
        f"{VALUE} requests wait for a place on a {{{{ $labels.role }}}} engine.",
        "kvops-router",
    ),
    Alert(
        "KvopsRouterHandoverUnread",
        "max by (instance) (kvops_router_handed_over_oldest_seconds)",
        '> on () group_left () ($share_of_lease * min(kvops_config_seconds{param="kv_lease_duration"}))',
        "an answer of prefill has waited for decode for more than $share_of_lease of kv_lease_duration",
        f"KV handed over by router {ENGINE} is not read",
        f"The oldest answer of prefill has waited {VALUE} s for decode to begin.",
        "kvops-router",
    ),
    Alert(
        "KvopsRouterHandleMisses",
        "sum by (instance) "
        '(rate(kvops_router_handles_total{outcome!~"hit|no_conversation|first_turn"}[30m])) '
        '/ sum by (instance) (rate(kvops_router_handles_total{outcome!~"no_conversation|first_turn"}[30m]))',
        "> $share",
        "more than $share of later turns could not use their handle",
        f"Later turns through router {ENGINE} miss their handle",
        f"{SHARE} of the turns that could have read KV back did not.",
        "kvops-bidirectional",
        guard="and sum by (instance) "
        '(rate(kvops_router_handles_total{outcome!~"no_conversation|first_turn"}[30m])) > $floor_per_second',
    ),
    Alert(
        "KvopsRouterTurnsWithoutHandle",
        "sum by (instance, streamed) (rate(kvops_router_turns_without_handle_total[15m])) "
        "/ on (instance) group_left () sum by (instance) "
        '(rate(kvops_router_legs_total{role="decode",outcome="ok"}[15m]))',
        "> $share",
        "more than $share of decode's answers brought no handle",
        f"Decode gives router {ENGINE} no handles",
        f"{SHARE} of decode's answers (streamed: {{{{ $labels.streamed }}}}) brought no handle for the next turn.",
        "kvops-bidirectional",
        guard='and on (instance) sum by (instance) (rate(kvops_router_legs_total{role="decode"}[15m])) > '
        "$floor_per_second",
    ),
    Alert(
        "KvopsRouterRetriesHigh",
        "sum by (instance, role, reason) (rate(kvops_router_retries_total[10m])) "
        "/ on (instance, role) group_left () sum by (instance, role) (rate(kvops_router_legs_total[10m]))",
        "> $share",
        "more than $share of legs were second attempts",
        f"Router {ENGINE} tries {{{{ $labels.role }}}} legs again",
        f"{SHARE} of legs were second attempts, reason {{{{ $labels.reason }}}}: clients do not see it yet.",
        "kvops-router",
        guard="and on (instance, role) "
        "sum by (instance, role) (rate(kvops_router_legs_total[10m])) > $floor_per_second",
    ),
    Alert(
        "KvopsRouterPushSkew",
        '1 - sum by (instance) (rate(kvops_router_leg_skew_seconds_bucket{le="$bucket_seconds"}[10m])) '
        "/ sum by (instance) (rate(kvops_router_leg_skew_seconds_count[10m]))",
        "> $share",
        "more than $share of push requests had legs that started more than $bucket_seconds s apart",
        f"Push: router {ENGINE} does not send the legs together",
        f"{SHARE} of push requests had legs that started more than $bucket_seconds s apart.",
        "kvops-push",
        guard="and sum by (instance) (rate(kvops_router_leg_skew_seconds_count[10m])) > $floor_per_second",
    ),
    Alert(
        "KvopsRouterReleasesFailing",
        'sum by (instance) (rate(kvops_router_releases_total{outcome=~"failed|unexpected"}[10m])) '
        '/ sum by (instance) (rate(kvops_router_releases_total{outcome!="skipped"}[10m]))',
        "> $share",
        "more than $share of the requests to give blocks back did not work",
        f"Router {ENGINE} cannot give blocks back",
        f"{SHARE} of the releases failed: their blocks stay held until lease or TTL ends.",
        "kvops-router",
    ),
)

TRUST_ALERTS = (
    Alert(
        "KvopsTargetDown",
        'up{job=~"$engine_jobs|$router_jobs"}',
        "< $up",
        "Prometheus cannot scrape an engine or a router",
        f"{ENGINE} cannot be scraped",
        f"{ENGINE} ({{{{ $labels.job }}}}) does not answer Prometheus: down, hung or unreachable.",
    ),
    Alert(
        "KvopsMetricsAbsent",
        'up{job=~"$engine_jobs"} unless on (instance) kvops_connector_info',
        "== $up",
        "an engine is scraped but exports no kvops metrics",
        f"{ENGINE} exports no kvops metrics",
        f"{ENGINE} answers Prometheus without kvops_connector_info: other connector, or statistics switched off.",
    ),
    Alert(
        "KvopsConfigMismatch",
        "count by (model_name, param) (count by (model_name, param, value) (count_values by (model_name, param) "
        '("value", kvops_config_seconds)))',
        "> $values",
        "engines of one model have different lifetimes configured",
        f"Engines of {MODEL} disagree on {{{{ $labels.param }}}}",
        f"{VALUE} different values of {{{{ $labels.param }}}} are in use; prefill and decode must agree.",
    ),
    Alert(
        "KvopsMixedVersions",
        "count by (model_name) (count by (model_name, vllm_version, nixl_version) (kvops_connector_info))",
        "> $versions",
        "more than $versions pair of vLLM and NIXL versions serves one model",
        f"Engines of {MODEL} run different versions",
        f"{VALUE} pairs of vLLM and NIXL versions are in use; handshakes between them are refused.",
    ),
    Alert(
        "KvopsInstrumentationErrors",
        "sum by (instance, where) (increase(kvops_instrument_errors_total[15m]))",
        "> $errors",
        "more than $errors errors inside the instruments, in 15 minutes",
        f"The instruments of {ENGINE} have errors",
        f"{VALUE} errors in {{{{ $labels.where }}}}; requests went on, but figures may be missing.",
    ),
    Alert(
        "KvopsJournalDropped",
        "sum by (instance) (increase(kvops_journal_dropped_total[15m])) "
        "or sum by (instance) (increase(kvops_router_journal_dropped_total[15m]))",
        "> $lines",
        "more than $lines journal lines lost in 15 minutes",
        f"{ENGINE} loses journal lines",
        f"{VALUE} journal lines were lost in 15 minutes; kvops trace and kvops report are incomplete.",
    ),
    Alert(
        "KvopsWatchdog",
        "vector(1)",
        "> $floor",
        "always: shows that alerts reach you",
        "Alerts arrive",
        "Always firing. If your dead man's switch stops receiving it, Prometheus or Alertmanager is down.",
    ),
)

STOCK_ALERTS = (
    Alert(
        "KvopsStockReadAfterExpiry",
        "sum by (instance, model_name) " + either("increase(vllm:nixl_num_notifications_after_expiry_total[10m])"),
        "> $reads",
        "more than $reads completion notices after expiry in 10 minutes (stock vLLM)",
        f"Answers of {MODEL} may be wrong: KV was read after its lease on {ENGINE}",
        f"{VALUE} notices in 10 minutes, one per reading rank; the blocks may have been reused before they were read.",
        "kvops-stock-vllm",
    ),
    Alert(
        "KvopsStockTransferFailures",
        "sum by (instance, model_name) "
        + either("rate(vllm:nixl_num_failed_transfers_total[10m])")
        + " / (sum by (instance, model_name) "
        + either("rate(vllm:nixl_num_failed_transfers_total[10m])")
        + " + sum by (instance, model_name) "
        + either("rate(vllm:nixl_xfer_time_seconds_count[10m])")
        + ")",
        "> $share",
        "more than $share of transfers, handshakes and notices failed (stock vLLM)",
        f"NIXL transfers fail on {ENGINE}",
        f"{SHARE} failed in 10 minutes; transfers, handshakes and notices count together, each rank by itself.",
        "kvops-stock-vllm",
    ),
    Alert(
        "KvopsStockLeaseExpired",
        # Decode's TTLs that run out are counted here too; they are users who did not come back, and normal.
        "sum by (instance, model_name) " + either('rate(vllm:nixl_num_kv_expired_reqs_total{role!="decode"}[10m])'),
        "> $per_second",
        "more than $per_second expiries a second on prefill, each rank by itself (stock vLLM)",
        f"KV expires unread on {ENGINE}",
        f"{VALUE} expiries a second. Each rank counts.",
        "kvops-stock-vllm",
    ),
    Alert(
        "KvopsStockKvNotMoving",
        "sum by (model_name) " + either('rate(vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}[10m])'),
        "== 0",
        "more than $tokens_per_second prompt tokens a second are computed and none is loaded (stock vLLM)",
        f"No prompt token of {MODEL} comes from a peer",
        "Prompts are computed, yet no token came over from another engine in 10 minutes.",
        "kvops-stock-vllm",
        guard="and sum by (model_name) "
        + either('rate(vllm:prompt_tokens_by_source_total{source="local_compute"}[10m])')
        + " > $tokens_per_second",
    ),
    Alert(
        "KvopsStockFetchStuck",
        "sum by (instance, model_name) " + either('vllm:num_requests_kv_fetch_by_stage{stage="in_progress"}'),
        "> $requests",
        "more than $requests requests fetch KV and none got its first token for 5 minutes (stock vLLM)",
        f"Requests on {ENGINE} are stuck fetching KV",
        f"{VALUE} requests fetch KV and no request got its first token.",
        "kvops-stock-vllm",
        guard="unless on (instance, model_name) sum by (instance, model_name) "
        # Not the transfers: in push mode only prefill counts them.
        + either("rate(vllm:time_to_first_token_seconds_count[5m])")
        + " > 0",
    ),
)

BURNS = {
    "KvopsHandoffErrorBudgetBurn": (HANDOFF, "handoff", _FAST),
    "KvopsHandoffErrorBudgetBurnSlow": (HANDOFF, "handoff", _SLOW),
    "KvopsRouterErrorBudgetBurn": (ROUTER, "router", _FAST),
    "KvopsRouterErrorBudgetBurnSlow": (ROUTER, "router", _SLOW),
}
GROUPS: dict[str, tuple[Alert, ...]] = {
    "kvops-handoff": HANDOFF_ALERTS,
    "kvops-transfers": TRANSFER_ALERTS,
    "kvops-holds": HOLD_ALERTS,
    "kvops-push": PUSH_ALERTS,
    "kvops-router": ROUTER_ALERTS,
    "kvops-trust": TRUST_ALERTS,
}
STOCK_GROUPS: dict[str, tuple[Alert, ...]] = {"kvops-stock-vllm": STOCK_ALERTS}
ALERTS: dict[str, Alert] = {
    alert.name: alert for groups in (GROUPS, STOCK_GROUPS) for alerts in groups.values() for alert in alerts
}

# Alertmanager: while the first fires, the others with equal labels stay quiet. A cause hides its consequences.
INHIBITIONS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("KvopsTargetDown", ("KvopsMetricsAbsent", "KvopsThroughputCollapse", "KvopsHeartbeatFailing"), ("instance",)),
    ("KvopsRouterNoEngine", ("KvopsRouterEngineOut", "KvopsRouterQueueing"), ("instance", "role")),
    ("KvopsRouterNoEngine", ("KvopsRouterErrorBudgetBurn", "KvopsRouterErrorBudgetBurnSlow"), ("instance",)),
    ("KvopsTransferStuck", ("KvopsKvWaitStuck",), ("instance", "model_name")),
    ("KvopsTransferStuck", ("KvopsPeerSlow", "KvopsKvWaitHigh"), ("model_name", "direction")),
    ("KvopsHandshakeFailures", ("KvopsPeerErrors", "KvopsKvWaitHigh"), ("model_name",)),
    ("KvopsReadAfterExpiry", ("KvopsLeaseExpired", "KvopsLeaseHeadroomLow"), ("model_name",)),
    ("KvopsReadAfterExpiry", ("KvopsStockReadAfterExpiry", "KvopsStockLeaseExpired"), ("model_name",)),
    ("KvopsMixedVersions", ("KvopsHandshakeFailures",), ("model_name",)),
    ("KvopsPushWriterDown", ("KvopsPushRegistrationStuck",), ("instance", "model_name")),
    ("KvopsHandoffErrorBudgetBurn", ("KvopsHandoffErrorBudgetBurnSlow", "KvopsRecomputeHigh"), ("model_name",)),
    ("KvopsRouterErrorBudgetBurn", ("KvopsRouterErrorBudgetBurnSlow",), ("instance",)),
)

_WINDOWS = ("5m", "30m", "1h", "6h", "3d")


def _handoff_errors(window: str) -> str:
    chosen = 'direction!="none",outcome!="aborted"'
    errors = 'sum by (model_name) (rate(kvops_requests_total{direction!="none",outcome=~"recomputed|failed|error"}'
    return f"{errors}[{window}])) / sum by (model_name) (rate(kvops_requests_total{{{chosen}}}[{window}]))"


def _router_errors(window: str) -> str:
    errors = f'sum by (instance) (rate(kvops_router_requests_total{{outcome!~"ok|{_NOT_OURS}"}}[{window}]))'
    return f"({errors} or 0 * sum by (instance) (rate(kvops_router_requests_total[{window}]))) / " + (
        f'sum by (instance) (rate(kvops_router_requests_total{{outcome!~"{_NOT_OURS}"}}[{window}]))'
    )


RECORDINGS: dict[str, str] = {
    **{f"{HANDOFF}:ratio_rate{window}": _handoff_errors(window) for window in _WINDOWS},
    **{f"{ROUTER}:ratio_rate{window}": _router_errors(window) for window in _WINDOWS},
    "model_name:kvops_recompute_tokens:ratio_rate15m": (
        f'sum by (model_name) (rate(kvops_recompute_tokens_total{{reason!~"{_EXPECTED}"}}[15m])) / '
        f'(sum by (model_name) (rate(kvops_recompute_tokens_total{{reason!~"{_EXPECTED}"}}[15m])) '
        "+ sum by (model_name) (rate(kvops_loaded_tokens_total[15m])))"
    ),
    "instance:kvops_held_blocks:ratio": (
        "kvops_held_blocks / on (instance, model_name, engine) group_left () kvops_kv_blocks"
    ),
    "peer_direction:kvops_peer_errors:ratio_rate10m": (
        '(sum by (model_name, peer, direction) (rate(kvops_peer_transfers_total{outcome="failed"}[10m])) '
        # A peer that never failed has no such series.
        "or 0 * sum by (model_name, peer, direction) (rate(kvops_peer_transfers_total[10m]))) "
        "/ sum by (model_name, peer, direction) (rate(kvops_peer_transfers_total[10m]))"
    ),
    "peer_direction:kvops_peer_seconds_per_byte:rate10m": (
        "sum by (model_name, peer, direction) (rate(kvops_peer_transfer_seconds_total[10m])) "
        "/ (sum by (model_name, peer, direction) (rate(kvops_peer_bytes_total[10m])) > 0)"
    ),
    "instance_direction:kvops_wire_bytes_per_second:rate30m": (
        "sum by (instance, model_name, direction) (rate(kvops_transfer_bytes_total[30m])) "
        "/ (sum by (instance, model_name, direction) (rate(kvops_transfer_duration_seconds_sum[30m])) > 0)"
    ),
    "model_name_direction:kvops_kv_wait_seconds:p99_5m": (
        "histogram_quantile(0.99, sum by (model_name, direction, le) (rate(kvops_request_kv_wait_seconds_bucket[5m])))"
    ),
    "model_name:kvops_readback:loaded_ratio1h": (
        'sum by (model_name) (rate(kvops_readback_requests_total{outcome="loaded"}[1h])) '
        "/ sum by (model_name) (rate(kvops_readback_requests_total[1h]))"
    ),
}
