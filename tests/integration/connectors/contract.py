"""Checks of the connectors against the vLLM on the path; prints one JSON object, check -> "ok" or what went wrong.

Run by ``test_contract.py`` in a process of its own, because only one vLLM fits into one.
"""

from __future__ import annotations

import inspect
import json
import os
import queue
import sys
import time
import traceback
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import vllm
import vllm.distributed.kv_transfer.kv_connector.v1.nixl as stock
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from stand_ins import bare, blocks, kv_cache_config, request, transfer_config, vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import kvops_connectors
from kvops_connectors import events, journal, streaming
from kvops_connectors.catalogue import CATALOGUE
from kvops_connectors.nixl import Instrumented, WorkerEvents
from kvops_connectors.settings import Settings
from kvops_connectors.stats import KEY, KvopsStats, with_samples
from kvops_connectors.worker import WorkerInstrument

FOLDER = Path(sys.argv[1])
REPORT: dict[str, str] = {"vllm": vllm.__file__}


def check(function: Any) -> Any:
    try:
        function()
        REPORT[function.__name__] = "ok"
    except Exception as error:
        traceback.print_exc()
        REPORT[function.__name__] = f"{type(error).__name__}: {error}"
    return function


# The factory, and what rides on the class.


@check
def factory_gives_our_class_under_each_stock_name() -> None:
    for name in kvops_connectors.CONNECTORS:
        found = KVConnectorFactory.get_connector_class(transfer_config(name))
        assert found is getattr(kvops_connectors, name)
        assert issubclass(found, getattr(stock, name))
        assert found.__name__ == getattr(stock, name).__name__
        assert supports_hma(found)


@check
def every_facade_method_that_we_override_exists() -> None:
    ours = {name for name, value in vars(Instrumented).items() if callable(value) and not name.startswith("_")}
    assert not {name for name in ours if not hasattr(stock.NixlPullConnector, name)}


@check
def overridden_methods_take_the_arguments_of_the_stock_ones() -> None:
    for name, ours in vars(Instrumented).items():
        theirs = getattr(stock.NixlPullConnector, name, None)
        if not inspect.isfunction(ours) or name.startswith("_kvops") or theirs is None:
            continue
        wanted = [one.name for one in inspect.signature(theirs).parameters.values()]
        assert [one.name for one in inspect.signature(ours).parameters.values()] == wanted, name


@check
def wrapped_worker_methods_keep_their_leading_arguments() -> None:
    pull, push = stock.NixlPullConnectorWorker, stock.NixlPushConnectorWorker
    leading = {
        (pull, "_read_blocks_for_req"): ["req_id", "meta"],
        (push, "_xfer_blocks_for_req"): ["req_id", "meta"],
        (push, "_do_start_push_kv"): ["request_id", "local_block_ids", "registration_data"],
        (push, "_do_send_reg_notif"): ["req_id", "reg_data"],
        (pull, "_log_failure"): ["failure_type", "req_id"],
        (pull, "_nixl_handshake"): ["host", "port", "remote_tp_size", "expected_engine_id"],
    }
    for (worker, name), names in leading.items():
        found = list(inspect.signature(getattr(worker, name)).parameters)[1 : len(names) + 1]
        assert found == names, (name, found)


WORKERS = (stock.NixlPullConnectorWorker, stock.NixlPushConnectorWorker)


@check
def worker_attributes_that_we_read_exist() -> None:
    text = "".join(inspect.getsource(one) for worker in WORKERS for one in worker.__mro__[:-1])
    for name in (
        "nixl_wrapper",
        "_reqs_to_send",
        "_reqs_to_process",
        "_recving_metadata",
        "_remote_agents",
        "_failed_recv_reqs",
        "_reg_send_inbox",
        "_push_writer_wake",
        "_pending_d_registrations",
        "_push_finished_blocks",
    ):
        assert f"self.{name}" in text, name


# Stats and metrics.


def sample(name: str, value: float, *labels: str, request_id: str | None = None) -> list[Any]:
    return [name, list(labels), value, request_id]


SAMPLES = [
    sample("kvops_recompute_tokens_total", 7, "new_tokens"),
    sample("kvops_request_kv_wait_seconds", 0.2, "p_to_d", request_id="cmpl-" + "x" * 300),
    sample("kvops_held_blocks", 12, "decode"),
]


@check
def stats_add_up_and_reset() -> None:
    one, other = KvopsStats(), with_samples(None, [SAMPLES[0]])
    assert one.is_empty()
    assert not other.is_empty()
    stock_stats = NixlKVConnectorStats()
    stock_stats.record_transfer(SimpleNamespace(xferDuration=5, postDuration=2, totalBytes=10, descCount=1))
    joined = one.aggregate(other).aggregate(with_samples(stock_stats, []))
    assert joined.data[KEY] == [SAMPLES[0]]
    assert joined.data["bytes_transferred"] == [10]
    assert joined.reduce()["Num successful transfers"] == 1
    kept = joined.clone_and_reset()
    assert joined.is_empty()
    assert not kept.is_empty()


@check
def a_payload_has_every_key_of_the_stock_class() -> None:
    assert set(NixlKVConnectorStats().data) < set(with_samples(None, SAMPLES).data)


CLASSES = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}


def prom(classes: dict[Any, Any] = CLASSES, engines: int = 2) -> Any:
    config = SimpleNamespace(kv_transfer_config=transfer_config("NixlConnector", {"bidirectional_kv_xfer": True}))
    labels = {number: ["m", str(number)] for number in range(engines)}
    return kvops_connectors.NixlConnector.build_prom_metrics(config, classes, ["model_name", "engine"], labels)


@check
def samples_end_in_prometheus() -> None:
    prom().observe(with_samples(None, SAMPLES).data, 1)
    engine = {"model_name": "m", "engine": "1"}
    assert REGISTRY.get_sample_value("kvops_recompute_tokens_total", {**engine, "reason": "new_tokens"}) == 7
    assert REGISTRY.get_sample_value("kvops_recompute_tokens_total", {**engine, "reason": "preempted"}) == 0
    assert REGISTRY.get_sample_value("kvops_request_kv_wait_seconds_sum", {**engine, "direction": "p_to_d"}) == 0.2
    assert REGISTRY.get_sample_value("kvops_held_blocks", {**engine, "holder": "decode"}) == 12


@check
def a_second_logger_in_the_process_counts_on() -> None:
    engine = {"model_name": "m", "engine": "1", "reason": "new_tokens"}
    before = REGISTRY.get_sample_value("kvops_recompute_tokens_total", engine)
    unregister_vllm_metrics()
    prom().observe(with_samples(None, SAMPLES).data, 1)
    assert REGISTRY.get_sample_value("kvops_recompute_tokens_total", engine) == (before or 0) + 7


@check
def a_broken_payload_is_counted_and_never_raised() -> None:
    unregister_vllm_metrics()
    metrics = prom()
    for payload in (
        {},
        {KEY: [["kvops_no_such_metric", [], 1, None], ["kvops_recompute_tokens_total", ["a", "b"], 1, None], 5]},
        {KEY: [["kvops_recompute_tokens_total", ["new_tokens"], -1, None]]},
    ):
        metrics.observe(payload, 0)
        metrics.observe(payload, 99)
    where = {"model_name": "m", "engine": "0", "where": "metrics"}
    assert (REGISTRY.get_sample_value("kvops_instrument_errors_total", where) or 0) >= 5


class RayMetric:
    """Like vLLM's wrappers for Ray: no exemplar, labels() returns the object."""

    def __init__(self, name: str, documentation: str = "", labelnames: Any = None, **options: Any) -> None:
        self.values: list[float] = []

    def labels(self, *values: str) -> RayMetric:
        return self

    def inc(self, value: float = 1) -> None:
        self.values.append(value)

    def observe(self, value: float) -> None:
        self.values.append(value)

    def set(self, value: float) -> None:
        self.values.append(value)


@check
def rays_metric_wrappers_work() -> None:
    metrics = prom({one: type(f"Ray{one.__name__}", (RayMetric,), {}) for one in CLASSES})
    metrics.observe(with_samples(None, SAMPLES).data, 0)
    assert metrics._metrics["kvops_request_kv_wait_seconds"].values == [0.2]
    assert not metrics._guard.errors


@check
def the_catalogue_is_registered_whole() -> None:
    registered = set(prom({one: type(f"Other{one.__name__}", (RayMetric,), {}) for one in CLASSES})._metrics)
    assert registered == {name for name, metric in CATALOGUE.items() if metric.source == "engine"}


@check
def the_log_line_is_made() -> None:
    lines: list[Any] = []
    log = KVConnectorLogging(transfer_config("NixlConnector"))
    log.observe(with_samples(None, SAMPLES).data)
    log.observe(with_samples(None, []).data)
    log.log(lambda *words: lines.append(words))
    assert lines


@check
def ranks_are_joined() -> None:
    outputs = []
    for rank in range(2):
        output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
        output.kv_connector_output = KVConnectorOutput(
            finished_recving={"a"},
            kv_connector_stats=with_samples(None, [SAMPLES[0]]),
            kv_connector_worker_meta=WorkerEvents([events.Handshake(rank, 0.1, "ok")]),
        )
        outputs.append(output)
    joined = KVOutputAggregator(2).aggregate(outputs).kv_connector_output
    assert joined.finished_recving == {"a"}
    assert len(joined.kv_connector_stats.data[KEY]) == 2
    assert [event.rank for event in joined.kv_connector_worker_meta.events] == [0, 1]


def over_the_wire(payload: Any) -> Any:
    outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=payload))
    decoded = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
    return decoded.scheduler_stats.kv_connector_stats


@check
def a_payload_survives_msgpack() -> None:
    assert over_the_wire(with_samples(None, SAMPLES).data)[KEY] == SAMPLES


@check
def multi_connector_carries_the_payload() -> None:
    for name in ("NixlConnector", "NixlPushConnector"):
        child = getattr(kvops_connectors, name).__name__
        stats = MultiKVConnectorStats(data={child: with_samples(None, SAMPLES)})
        payload = stats.to_dict() if hasattr(stats, "to_dict") else stats.data
        one, other = (MultiConnector.build_kv_connector_stats(over_the_wire(payload)) for _ in range(2))
        one.aggregate(other)
        one.reduce()


# The scheduler's side, with a request that is as real as it can be without an engine.


def scheduler(label: str, name: str, extra: dict[str, Any], role: str = "kv_both") -> Any:
    extra = {**extra, "kvops": {"journal_dir": str(FOLDER), "engine_name": label}}
    return getattr(kvops_connectors, name)(vllm_config(name, extra, role), KVConnectorRole.SCHEDULER, kv_cache_config())


def step(side: Any, **output: Any) -> Any:
    scheduled = MagicMock()
    scheduled.scheduled_new_reqs = []
    scheduled.scheduled_cached_reqs = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    metadata = side.build_connector_meta(scheduled)
    side.update_connector_output(KVConnectorOutput(**output))
    return metadata, side.get_kv_connector_stats()


def lines(side: Any, label: str) -> list[journal.Line]:
    side.shutdown()
    assert side._kvops_scheduler.guard.errors == 0
    return [journal.decode(line) for line in (FOLDER / f"{label}.dp0.jsonl").read_bytes().splitlines()]


def prefill(side: Any, name: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
    one = request(name, {"do_remote_decode": True, "do_remote_prefill": False, **(params or {})})
    side.on_new_request(one)
    assert side.get_num_new_matched_tokens(one, 0) == (0, False)
    side.update_state_after_alloc(one, blocks(4), 0)
    metadata, _ = step(side)
    assert name in metadata.reqs_in_batch
    one.num_computed_tokens = 64
    held, handle = side.request_finished_all_groups(one, ([1, 2, 3, 4],))
    assert held
    metadata, _ = step(side)
    assert name in metadata.reqs_to_send
    return handle


def decode(side: Any, name: str, handle: dict[str, Any], output: int = 8) -> dict[str, Any] | None:
    one = request(name, handle, output=output)
    side.on_new_request(one)
    assert side.get_num_new_matched_tokens(one, 16) == (48, True)
    side.update_state_after_alloc(one, blocks(4), 48)
    metadata, _ = step(side)
    assert name in metadata.reqs_to_recv
    ended = events.Ended(0, 1, name, "READ", True, "10.0.0.7:5600", 0.001, 0.002, 4096, 3)
    step(side, finished_recving={name}, kv_connector_worker_meta=WorkerEvents([ended]))
    one.num_computed_tokens = 63
    side.get_num_new_matched_tokens(one, 16)
    side.update_state_after_alloc(one, blocks(4), 0)
    one.num_computed_tokens = 64 + output - 1
    _, back = side.request_finished_all_groups(one, ([1, 2, 3, 4, 5],))
    step(side)
    return back


@check
def pull_is_recorded_on_both_sides() -> None:
    side = scheduler("pull-p", "NixlConnector", {})
    handle = prefill(side, "cmpl-1-0-0000000a")
    done = events.PeerDone("cmpl-1-0-0000000a", 29.0)
    _, stats = step(side, finished_sending={"cmpl-1-0-0000000a"}, kv_connector_worker_meta=WorkerEvents([done]))
    assert any(one[0] == "kvops_holds_ended_total" for one in stats.data[KEY])
    record, end = lines(side, "pull-p")
    assert record.tokens.recomputed == {"new_tokens": 64}
    assert (end.hold.ended_by, end.hold.blocks, end.hold.ttl_left_seconds) == ("read", 4, 29.0)
    other = scheduler("pull-d", "NixlConnector", {})
    assert decode(other, "cmpl-1-0-0000000b", dict(handle)) is None
    (record,) = lines(other, "pull-d")
    assert (record.tokens.local_hit, record.tokens.remote, record.tokens.recomputed) == (16, 47, {"last_token": 1})
    assert (record.transfer.bytes, record.transfer.descriptors, record.direction) == (4096, 3, "p_to_d")


BIDIRECTIONAL = {"bidirectional_kv_xfer": True}


def decodes_handle(label: str) -> dict[str, Any]:
    first = scheduler(f"{label}-p", "NixlConnector", BIDIRECTIONAL)
    handle = prefill(first, "cmpl-1-0-0000000a")
    side = scheduler(label, "NixlConnector", BIDIRECTIONAL)
    back = decode(side, "cmpl-1-0-0000000b", dict(handle), output=17)
    assert back is not None
    return json.loads(json.dumps(back))


def readback(label: str, back: dict[str, Any], prompt: list[int], extra: dict[str, Any] | None = None) -> Any:
    side = scheduler(label, "NixlConnector", extra or BIDIRECTIONAL)
    one = request("cmpl-2-0-0000000c", {**back, "do_remote_decode": True, "do_remote_prefill": False}, len(prompt))
    one.prompt_token_ids = prompt
    side.on_new_request(one)
    return side, one, side.get_num_new_matched_tokens(one, 0)


HISTORY = [*range(64), *range(900, 917)]


@check
def a_matching_history_is_read_back_whole() -> None:
    side, one, answer = readback("match", decodes_handle("match-d"), [*HISTORY, *range(5000, 5040)])
    assert answer == (80, True)
    side.update_state_after_alloc(one, blocks(5), 80)
    metadata, _ = step(side)
    assert one.request_id in metadata.reqs_to_recv


@check
def an_edited_history_is_read_back_up_to_the_edit() -> None:
    edited = [*HISTORY]
    edited[70] = 1
    side, one, answer = readback("edit", decodes_handle("edit-d"), edited)
    assert answer == (64, True)
    assert [len(group) for group in one.kv_transfer_params["remote_block_ids"]] == [4]
    side.update_state_after_alloc(one, blocks(4), 64)
    metadata, _ = step(side)
    assert one.request_id in metadata.reqs_to_recv


@check
def a_wholly_other_history_releases_the_peers_blocks() -> None:
    side, one, answer = readback("other", decodes_handle("other-d"), [7, *HISTORY])
    assert answer == (0, False)
    side.update_state_after_alloc(one, blocks(6), 0)
    metadata, _ = step(side)
    assert not any(metadata.reqs_to_recv[one.request_id].local_block_ids)


@check
def an_expired_handle_is_not_offered() -> None:
    back = decodes_handle("late-d")
    back["kvops"]["expires_at"] = time.time() + 1
    side, one, answer = readback("late", back, HISTORY)
    assert answer == (0, False)
    side.update_state_after_alloc(one, blocks(6), 0)
    metadata, _ = step(side)
    assert not metadata.reqs_to_recv


@check
def a_handle_is_ignored_where_bidirectional_is_off() -> None:
    side, one, answer = readback("off", decodes_handle("off-d"), HISTORY, {"kv_lease_duration": 30})
    assert answer == (0, False)
    side.update_state_after_alloc(one, blocks(6), 0)


@check
def a_spent_load_is_not_offered_again() -> None:
    side, one, answer = readback("spent", decodes_handle("spent-d"), HISTORY)
    assert answer[1]
    side.update_state_after_alloc(one, blocks(5), answer[0])
    assert side.get_num_new_matched_tokens(one, 0) == (0, False)


@check
def a_malformed_handle_is_dropped() -> None:
    for number, broken in enumerate(({"remote_block_ids": None}, {"remote_request_id": None}, {"remote_port": "x"})):
        for name in ("NixlConnector", "NixlPushConnector"):
            if name == "NixlPushConnector" and "remote_block_ids" in broken:
                continue
            handle = {
                "do_remote_prefill": True,
                "remote_block_ids": [[1, 2, 3, 4]],
                "remote_engine_id": "e",
                "remote_request_id": "r",
                "remote_host": "10.0.0.7",
                "remote_port": 5600,
                "tp_size": 1,
            }
            side = scheduler(f"broken-{number}-{name}", name, {})
            one = request("cmpl-3-0-0000000d", {**handle, **broken})
            side.on_new_request(one)
            assert side.get_num_new_matched_tokens(one, 0) == (0, False)
            side.update_state_after_alloc(one, blocks(4), 0)
            step(side)


@check
def a_request_with_nothing_but_the_routers_words_holds_nothing() -> None:
    side = scheduler("words", "NixlConnector", BIDIRECTIONAL)
    one = request("cmpl-4-0-0000000e", {"kvops": {"router_id": "r", "turn": 1}})
    side.on_new_request(one)
    assert side.get_num_new_matched_tokens(one, 0) == (0, False)
    side.update_state_after_alloc(one, blocks(4), 0)
    one.num_computed_tokens = 64
    assert side.request_finished_all_groups(one, ([1, 2, 3, 4],)) == (False, None)
    step(side)
    (record,) = lines(side, "words")
    assert (record.request.router_id, record.tokens.recomputed) == ("r", {"no_handle": 64})


@check
def push_is_recorded_on_both_sides() -> None:
    side = scheduler("push-p", "NixlPushConnector", {})
    handle = prefill(side, "cmpl-1-0-0000000a")
    met = events.PushMet(0, "cmpl-1-0-0000000a", "10.0.0.9:5600", "engine-2", 100.0, 101.5)
    ended = events.Ended(0, 1, "cmpl-1-0-0000000a", "WRITE", True, "10.0.0.9:5600", 0.001, 0.002, 4096, 3)
    done = events.PeerDone("cmpl-1-0-0000000a", 29.0)
    step(
        side,
        finished_sending={"cmpl-1-0-0000000a"},
        kv_connector_worker_meta=WorkerEvents([met, ended, done]),
    )
    record, end = lines(side, "push-p")
    assert record.push.prefill_done_at is not None
    assert (end.push.waited_for, end.push.waited_seconds, end.transfer.bytes) == ("prefill_blocks", 1.5, 4096)
    other = scheduler("push-d", "NixlPushConnector", {})
    decode(other, "cmpl-1-0-0000000b", dict(handle))
    (record,) = lines(other, "push-d")
    assert (record.tokens.remote, record.mode) == (47, "push")


# The worker's side: instruments on a worker object whose agent is a stand-in.


@check
def a_transfer_is_seen_through_vllms_own_polling() -> None:
    worker = bare(stock.NixlPullConnectorWorker)
    ours = WorkerInstrument(worker, 0, Settings(), 480.0)
    ours._tap.current.request_id, ours._tap.current.peer = "r1", "10.0.0.7:5600"
    handle = worker.nixl_wrapper.make_prepped_xfer("READ", 1, [1, 2], 2, [3, 4], notif_msg=b"p:1")
    worker.nixl_wrapper.transfer(handle)
    done = worker._pop_done_transfers({"r1": [handle]})
    assert (done[0] if isinstance(done, tuple) else done) == {"r1"}
    seen = ours.take_events()
    assert seen[:2] == [
        events.Posted(0, 1, "r1", "READ"),
        events.Ended(0, 1, "r1", "READ", True, "10.0.0.7:5600", 0.002, 0.003, 4096, 5),
    ]
    assert not ours._tap._transfers


@check
def completion_notices_are_seen_through_vllms_own_accounting() -> None:
    worker = bare(stock.NixlPullConnectorWorker)
    ours = WorkerInstrument(worker, 0, Settings(), 480.0)
    worker._reqs_to_send = {"p-1": time.perf_counter() + 9}
    worker._reqs_to_process = {"p-1"}
    worker.nixl_wrapper.notices = {"x": [b"p-1:1", b"gone-1:1", b"HB:p-1,other"]}
    if hasattr(worker, "_lease_extension") is False:
        worker._lease_extension = 20
    sent = worker._get_new_notifs()
    assert sent == {"p-1"}
    ours.results(sent, set())
    seen = ours.take_events()
    late = [one for one in seen if isinstance(one, events.LateNotice)]
    done = [one for one in seen if isinstance(one, events.PeerDone)]
    levels = [one for one in seen if isinstance(one, events.Levels)]
    assert late == [events.LateNotice("gone-1")]
    assert done[0].request_id == "p-1"
    assert 8 < done[0].ttl_left_seconds <= 9
    assert levels[0].lease_renewals == 1


@check
def an_unfulfilled_registration_is_cancelled_and_then_failed() -> None:
    worker = bare(stock.NixlPushConnectorWorker)
    ours = WorkerInstrument(worker, 0, Settings(push_cancel_grace_seconds=0.0), 0.0)
    registration = {"request_id": "d-1", "decode_engine_id": "me", "remote_engine_id": "p", "local_block_ids": [[1]]}
    worker._recving_metadata["d-1"] = object()
    metadata = SimpleNamespace(reqs_to_recv={}, push_finished_blocks={}, push_registrations={"d-1": registration})
    ours.loads_asked(metadata)
    assert registration["kvops_timeout_seconds"] == 0.0
    ours.results(set(), set())
    name, cancel = worker._reg_send_inbox.get_nowait()
    assert name == "d-1"
    assert cancel["decode_engine_id"] != "me"
    ours.results(set(), set())
    assert worker._failed_recv_reqs.get_nowait() == "d-1"


def parted_push(settings: Settings) -> tuple[Any, WorkerInstrument]:
    """Return a prefill rank whose handshake with decode has failed, after registration and blocks have met."""
    worker = bare(stock.NixlPushConnectorWorker)
    worker._deferred_push_inbox = queue.Queue()
    worker._ensure_handshake = lambda *args, **kwargs: failed
    ours = WorkerInstrument(worker, 0, settings, 480.0)
    failed: Future[Any] = Future()
    failed.set_exception(TimeoutError())
    met = {
        "request_id": "r-0000000b",
        "decode_engine_id": "d",
        "decode_host": "h",
        "decode_port": 1,
        "decode_tp_size": 1,
    }
    worker._push_finished_blocks["r-0000000a"] = ([1],)
    worker._handle_push_reg_notif(b"PUSH_REG:" + msgspec.msgpack.encode({**met, "local_block_ids": [[2]]}))
    ours._pushes._due = dict.fromkeys(ours._pushes._due, 0.0)
    ours.results(set(), set())
    assert not worker._push_finished_blocks
    assert not worker._pending_d_registrations
    return worker, ours


@check
def a_push_whose_handshake_failed_is_begun_again() -> None:
    # Before 0.27 vLLM shakes hands in the writer thread and has no way back in.
    if "_deferred_push_inbox" not in inspect.getsource(stock.NixlPushConnectorWorker):
        return
    worker, ours = parted_push(Settings())
    assert worker._deferred_push_inbox.get_nowait()[0] == "r-0000000a"
    assert events.PushRetried("r-0000000a") in ours.take_events()
    worker, _ = parted_push(Settings(push_retry=False))
    assert worker._deferred_push_inbox.empty()


@check
def a_push_peer_can_be_let_go_of() -> None:
    worker_class = stock.NixlPushConnectorWorker
    if not hasattr(worker_class, "_cleanup_remote_engines"):
        return
    inspect.signature(worker_class._cleanup_remote_engine).bind(None, "engine", log_eviction=False)
    source = inspect.getsource(worker_class)
    assert "_sending_transfers_lock" in source
    # What a failed write tells of its peer.
    assert "dst_engine_id=dst_engine_id" in source


@check
def a_streamed_answer_gives_its_handle_to_the_middleware() -> None:

    assert "kv_transfer_params" in inspect.signature(RequestOutput.__init__).parameters
    assert inspect.isasyncgenfunction(AsyncLLM.generate)
    streaming._listen_to_answers()
    assert AsyncLLM.generate.kvops


print(json.dumps(REPORT), flush=True)
os._exit(0)
