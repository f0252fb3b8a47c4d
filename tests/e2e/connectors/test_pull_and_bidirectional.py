"""Pull and bidirectional on real engines: records and metrics against what vLLM, NIXL and the model's shape say.

The tests share one fleet and run from top to bottom; those that kill engines come last.
"""

from __future__ import annotations

import json
import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from e2e.connectors.conftest import TTL_SECONDS
from e2e.connectors.pair import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    Answer,
    Engine,
    Metrics,
    Pair,
    alone,
    complete,
    completion,
    events,
    eventually,
    said,
    tokens,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
MARGIN_SECONDS = 5
Fleet = dict[str, Engine]


@pytest.fixture
def fleet(bidirectional_fleet: Fleet) -> Fleet:
    return bidirectional_fleet


@pytest.fixture
def pair(fleet: Fleet) -> Pair:
    return Pair(fleet["prefill"], fleet["decode"])


@pytest.fixture
def fresh(pair: Pair) -> Pair:
    """A pair that finds nothing in its prefix caches."""
    pair.prefill.reset_prefix_cache()
    pair.decode.reset_prefix_cache()
    return pair


def history(prompt: list[int], answer: Answer) -> list[int]:
    return [*prompt, *answer.token_ids]


def blocks(count: int) -> int:
    return -(-count // BLOCK_TOKENS)


def missing(struct: Any, path: str = "") -> list[str]:
    """Return the names of the fields that are None, in a struct and those below it."""
    found = []
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if value is None:
            found.append(path + name)
        elif isinstance(value, msgspec.Struct):
            found += missing(value, f"{path}{name}.")
    return found


# A first turn: pull from prefill to decode.


def test_a_first_turn_leaves_a_whole_record_on_both_sides(fresh: Pair):
    answer = fresh.turn(tokens(200, 1))
    done, loaded = fresh.prefill.record(answer.id), fresh.decode.record(answer.id)
    # Prefill loads nothing in a first turn; a hold that lasts has no end yet; push has no part in it.
    idle = {"request.remote_id", "tokens.matched", "times.loaded", "direction", "transfer", "push", "error"}
    lasting = {"hold.ttl_left_seconds", "hold.held_seconds", "hold.ended_by"}
    assert set(missing(done)) == idle | lasting
    assert set(missing(loaded)) == {"tokens.matched", "transfer.ttl_left_seconds", "push", "error"} | lasting
    assert (done.outcome, loaded.outcome, loaded.direction) == ("ok", "ok", "p_to_d")
    assert (loaded.request.base_id, loaded.request.remote_id) == (done.request.base_id, done.request.id)
    assert (loaded.request.router_id, loaded.request.turn) == (f"r-{answer.id}", 1)
    assert loaded.transfer.peer_engine == done.engine.engine_id


def test_a_first_turn_computes_on_prefill_and_loads_on_decode(fresh: Pair):
    answer = fresh.turn(tokens(200, 2))
    assert fresh.prefill.record(answer.id).tokens.recomputed == {"new_tokens": 200}
    loaded = fresh.decode.record(answer.id).tokens
    assert (loaded.local_hit, loaded.remote, loaded.recomputed, loaded.generated) == (0, 199, {"last_token": 1}, 8)


@pytest.mark.parametrize("count", [33, 200, 1000])
def test_the_bytes_are_those_of_the_models_shape(fresh: Pair, count: int):
    answer = fresh.turn(tokens(count, count))
    moved = fresh.decode.record(answer.id).transfer
    assert (moved.bytes, moved.transfers, moved.ranks) == (blocks(count) * BLOCK_BYTES, 1, 1)


def test_a_hit_in_decodes_prefix_cache_is_not_loaded_again(fresh: Pair):
    prompt = tokens(300, 3)
    fresh.turn(prompt[:160])
    answer = fresh.turn(prompt)
    record = fresh.decode.record(answer.id)
    assert (record.tokens.local_hit, record.tokens.remote) == (160, 139)
    assert record.transfer.bytes == (blocks(300) - 5) * BLOCK_BYTES


def test_a_hold_on_prefill_ends_with_the_read(fresh: Pair):
    answer = fresh.turn(tokens(200, 4))
    end = fresh.prefill.hold_end(answer.id)
    assert (end.hold.holder, end.hold.ended_by, end.hold.blocks) == ("prefill", "read", 7)
    assert 0 < end.hold.ttl_left_seconds < end.hold.ttl_granted_seconds


def test_a_hold_on_prefill_that_nobody_reads_expires(fresh: Pair):
    first = fresh.prefill_leg(tokens(100, 5))
    end = fresh.prefill.hold_end(first.id, 30)
    assert (end.hold.ended_by, end.hold.ttl_left_seconds) == ("expired", 0)


def test_a_request_without_params_is_recorded_too(fresh: Pair):
    request_id = uuid.uuid4().hex
    complete(fresh.decode, tokens(100, 6), request_id, None, 4)
    record = fresh.decode.record(request_id)
    assert (record.outcome, record.direction, record.tokens.recomputed) == ("ok", None, {"new_tokens": 100})


# Later turns: prefill reads decode's blocks back.


def test_a_second_turn_reads_the_history_back_and_computes_only_what_is_new(fresh: Pair):
    prompt = tokens(200, 10)
    first = fresh.turn(prompt)
    fresh.prefill.reset_prefix_cache()
    second = fresh.turn([*history(prompt, first), *tokens(40, 11)], first.handle, turn=2)
    record = fresh.prefill.record(second.id)
    assert (record.direction, record.outcome, record.tokens.matched) == ("d_to_p", "ok", 207)
    assert (record.tokens.remote, record.tokens.recomputed) == (207, {"new_tokens": 41})
    assert record.transfer.bytes == blocks(207) * BLOCK_BYTES
    assert TTL_SECONDS > record.transfer.ttl_left_seconds > MARGIN_SECONDS
    end = fresh.decode.hold_end(first.id)
    assert (end.hold.holder, end.hold.ended_by) == ("decode", "read")


def test_what_prefill_still_has_is_not_read_back(fresh: Pair):
    prompt = tokens(200, 12)
    first = fresh.turn(prompt, max_tokens=100)
    second = fresh.turn([*history(prompt, first), *tokens(40, 13)], first.handle, turn=2)
    record = fresh.prefill.record(second.id)
    assert (record.tokens.local_hit, record.tokens.remote) == (192, 299 - 192)
    assert record.transfer.bytes == (blocks(299) - 6) * BLOCK_BYTES


def test_fewer_tokens_than_the_threshold_are_computed_and_decode_is_told(fresh: Pair):
    prompt = tokens(200, 14)
    first = fresh.turn(prompt)
    second = fresh.turn([*history(prompt, first), *tokens(40, 15)], first.handle, turn=2)
    record = fresh.prefill.record(second.id)
    assert record.tokens.recomputed == {"below_threshold": 207 - 192, "new_tokens": 41}
    assert fresh.decode.hold_end(first.id).hold.ended_by == "read"


def test_a_later_turn_without_a_handle_says_so(fresh: Pair):
    answer = fresh.turn(tokens(100, 16), turn=2)
    assert fresh.prefill.record(answer.id).tokens.recomputed == {"no_handle": 100}


def test_a_streamed_conversation_reuses_decodes_blocks_in_every_turn_from_the_second(fresh: Pair):
    messages: list[dict[str, str]] = []
    handle = None
    for turn in range(1, 6):
        messages.append({"role": "user", "content": f"{turn} " + bytes(tokens(120, 20 + turn)).decode()})
        request_id = uuid.uuid4().hex
        fresh.prefill.reset_prefix_cache()
        text, handle = streamed_chat_turn(fresh, messages, handle, request_id, turn)
        record = fresh.prefill.record(request_id)
        assert (record.tokens.remote > 100 * (turn - 1)) == (turn > 1), record
        messages.append({"role": "assistant", "content": text})
        assert text == chat_alone(fresh.decode, messages[:-1])


def streamed_chat_turn(
    pair: Pair, messages: list[dict[str, str]], handle: Any, request_id: str, turn: int
) -> tuple[str, Any]:
    params = said({**(handle or {}), "do_remote_decode": True, "do_remote_prefill": False}, request_id, turn)
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 1, "kv_transfer_params": params}
    name = {"X-Request-Id": request_id}
    status, text = pair.prefill.call("POST", "/v1/chat/completions", body, name)
    assert status == 200, text
    params = said(json.loads(text)["kv_transfer_params"], request_id, turn)
    body |= {"max_tokens": 40, "stream": True, "kv_transfer_params": params}
    status, text = pair.decode.call("POST", "/v1/chat/completions", body, {**name, "X-Kvops-Handle": "1"})
    assert status == 200, text
    *answer, last = events(text)
    assert last["choices"] == []
    assert last["id"] == answer[0]["id"]
    words = [choice["delta"].get("content") or "" for event in answer for choice in event["choices"]]
    return "".join(words), last["kv_transfer_params"]


def chat_alone(engine: Engine, messages: list[dict[str, str]]) -> str:
    engine.reset_prefix_cache()
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 40}
    return json.loads(engine.call("POST", "/v1/chat/completions", body)[1])["choices"][0]["message"]["content"]


def test_a_streaming_client_gets_no_handle_unless_the_router_asks(fresh: Pair):
    first = fresh.prefill_leg(tokens(100, 30))
    body = completion(tokens(100, 30), first.handle, 4, stream=True)
    _, text = fresh.decode.call("POST", "/v1/completions", body, {"X-Request-Id": first.id})
    assert not any("kv_transfer_params" in event for event in events(text))


# Token truth.


@pytest.mark.parametrize("edited", [0, 100, 150, 206])
def test_an_edited_history_is_used_up_to_the_edit_and_never_beyond(fresh: Pair, edited: int):
    prompt = tokens(200, 40)
    first = fresh.turn(prompt)
    changed = history(prompt, first)
    changed[edited] = 35 if changed[edited] != 35 else 36
    changed += tokens(40, 41)
    fresh.prefill.reset_prefix_cache()
    second = fresh.turn(changed, first.handle, turn=2)
    record = fresh.prefill.record(second.id)
    kept = edited // BLOCK_TOKENS * BLOCK_TOKENS
    used = kept if kept >= 64 else 0
    assert (record.tokens.offered, record.tokens.matched, record.tokens.remote) == (207, kept, used)
    assert record.tokens.recomputed["prefix_mismatch"] == 207 - kept
    assert "token_truth" in record.mended
    assert second.token_ids == alone(fresh.decode, changed)
    assert fresh.decode.hold_end(first.id).hold.ended_by == "read"
    assert eventually(lambda: fresh.decode.metrics().total("kvops_held_requests", holder="decode") <= 1)


def test_stock_prefill_takes_an_edited_history_for_its_own(fleet: Fleet):
    pair = Pair(fleet["stock-prefill"], fleet["decode"])
    prompt = tokens(200, 42)
    first = pair.turn(prompt)
    changed = history(prompt, first)
    changed[10] = 35 if changed[10] != 35 else 36
    changed += tokens(40, 43)
    pair.prefill.reset_prefix_cache()
    pair.decode.reset_prefix_cache()
    assert pair.turn(changed, first.handle, turn=2).token_ids != alone(pair.decode, changed)


# Expiry.


def test_a_readback_in_time_leaves_no_expiry(fresh: Pair):
    prompt = tokens(150, 50)
    first = fresh.turn(prompt)
    fresh.prefill.reset_prefix_cache()
    time.sleep(2)
    second = fresh.turn(history(prompt, first), first.handle, turn=2)
    assert fresh.prefill.record(second.id).tokens.remote == 156
    assert fresh.decode.hold_end(first.id).hold.ended_by == "read"


def stripped(handle: dict[str, Any]) -> dict[str, Any]:
    """Return a handle as a stock decode engine gives it, so that only prefill's ranks can tell that it has expired."""
    return {name: value for name, value in handle.items() if name != "kvops"}


@pytest.mark.parametrize("known_to", ["scheduler", "ranks"])
def test_a_readback_too_late_is_computed(fresh: Pair, known_to: str):
    prompt = tokens(150, 51)
    first = fresh.turn(prompt)
    handle = first.handle if known_to == "scheduler" else stripped(first.handle)
    fresh.prefill.reset_prefix_cache()
    time.sleep(TTL_SECONDS - MARGIN_SECONDS + 1)
    second = fresh.turn([*history(prompt, first), *tokens(40, 52)], handle, turn=2)
    record = fresh.prefill.record(second.id)
    assert (record.outcome, record.error) == ("recomputed", "ttl_expired")
    assert record.tokens.recomputed == {"ttl_expired": 157, "new_tokens": 41}
    assert "expired_readback" in record.mended
    assert second.token_ids == alone(fresh.decode, [*history(prompt, first), *tokens(40, 52)])
    assert fresh.decode.hold_end(first.id, TTL_SECONDS).hold.ended_by == "expired"
    assert eventually(lambda: fresh.prefill.kv_usage() == 0, TTL_SECONDS + 5)


def test_stock_prefill_answers_a_readback_too_late_with_an_error(fleet: Fleet):
    pair = Pair(fleet["stock-prefill"], fleet["decode"])
    prompt = tokens(150, 53)
    first = pair.turn(prompt)
    pair.prefill.reset_prefix_cache()
    time.sleep(TTL_SECONDS - MARGIN_SECONDS + 1)
    assert pair.prefill_leg(history(prompt, first), stripped(first.handle), 2).status == 500


def test_a_hold_on_decode_that_no_turn_follows_expires(fresh: Pair):
    before = fresh.decode.metrics()
    first = fresh.turn(tokens(150, 54))
    end = fresh.decode.hold_end(first.id, TTL_SECONDS + 10)
    assert end.hold.ended_by == "expired"
    assert abs(end.hold.held_seconds - TTL_SECONDS) < 2
    wasted = "kvops_held_block_seconds_total"

    def grown() -> float:
        return fresh.decode.metrics().total(wasted, ended_by="expired") - before.total(wasted, ended_by="expired")

    assert eventually(lambda: grown() >= end.hold.blocks * TTL_SECONDS * 0.99)


# Broken handles.


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": None},
        {"remote_block_ids": [["x"]]},
        {"remote_request_id": None},
        {"remote_port": "http"},
        {"remote_num_tokens": 10},
    ],
    ids=str,
)
def test_a_broken_handle_costs_a_recompute_and_not_the_engine(fresh: Pair, change: dict[str, Any]):
    prompt = tokens(100, 60)
    first = fresh.prefill_leg(prompt)
    answer = fresh.decode_leg(prompt, {**first.handle, **change}, first.id)
    assert answer.status == 200
    record = fresh.decode.record(first.id)
    assert (record.tokens.recomputed, record.mended) == ({"no_handle": 100}, ["valid_handle"])


# Clients that hang up.


def test_a_client_that_hangs_up_during_prefill_is_recorded(fresh: Pair):
    request_id = uuid.uuid4().hex
    params = said({"do_remote_decode": True, "do_remote_prefill": False}, request_id, 1)
    body = completion(tokens(3000, 70), params, 200, stream=True)
    with fresh.prefill.stream("/v1/completions", body, {"X-Request-Id": request_id}) as answer:
        answer.read(10)
    record = fresh.prefill.record(request_id)
    assert (record.outcome, record.status, record.hold) == ("aborted", "FINISHED_ABORTED", None)


def test_a_client_that_hangs_up_during_decode_is_recorded_with_its_load(fresh: Pair):
    prompt = tokens(200, 71)
    first = fresh.prefill_leg(prompt)
    body = completion(prompt, first.handle, 2000, stream=True)
    with fresh.decode.stream("/v1/completions", body, {"X-Request-Id": first.id}) as answer:
        answer.read(10)
    record = fresh.decode.record(first.id)
    assert (record.outcome, record.tokens.remote, record.transfer.bytes) == ("aborted", 199, 7 * BLOCK_BYTES)
    assert fresh.prefill.hold_end(first.id).hold.ended_by == "read"


# Stock on one side.


@pytest.mark.parametrize("stock", ["prefill", "decode"])
def test_a_stock_engine_on_one_side_works(fleet: Fleet, stock: str):
    sides = {side: fleet[f"stock-{side}" if side == stock else side] for side in ("prefill", "decode")}
    pair = Pair(**sides)
    prompt = tokens(200, 80)
    for engine in sides.values():
        engine.reset_prefix_cache()
    first = pair.turn(prompt)
    assert first.token_ids == alone(pair.decode, prompt)
    pair.prefill.reset_prefix_cache()
    longer = [*history(prompt, first), *tokens(40, 81)]
    second = pair.turn(longer, first.handle, turn=2)
    assert second.token_ids == alone(pair.decode, longer)
    if stock == "decode":
        record = pair.prefill.record(second.id)
        assert (record.tokens.remote, record.tokens.matched) == (207, None)
    else:
        assert pair.decode.record(second.id).tokens.remote > 0


# Many at once, and the sums over everything above.


def test_32_conversations_at_once_each_reuse_their_own_history(fresh: Pair):
    def converse(number: int) -> list[Answer]:
        prompt, handle, answers = tokens(100 + number, 100 + number), None, []
        for turn in range(1, 4):
            answer = fresh.turn(prompt, handle, turn=turn)
            answers.append(answer)
            prompt, handle = [*history(prompt, answer), *tokens(70, 1000 * turn + number)], answer.handle
        return answers

    with ThreadPoolExecutor(32) as pool:
        conversations = list(pool.map(converse, range(32)))
    for number, answers in enumerate(conversations):
        prompt = tokens(100 + number, 100 + number)
        for turn, answer in enumerate(answers, 1):
            record = fresh.prefill.record(answer.id)
            spent = record.tokens
            known = sum(spent.recomputed.values())
            assert spent.local_hit + spent.remote + known == spent.prompt == len(prompt)
            if turn > 1:
                assert spent.local_hit + spent.remote >= len(prompt) - 71 - BLOCK_TOKENS or record.error, record
            prompt = [*history(prompt, answer), *tokens(70, 1000 * turn + number)]


def holds_are_over(engine: Engine) -> bool:
    metrics = engine.metrics()
    return metrics.total("kvops_held_requests") == 0 and metrics.total("kvops_transfers_inflight") == 0


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_all_sums_agree(fleet: Fleet, name: str):
    engine = fleet[name]
    assert eventually(lambda: holds_are_over(engine), TTL_SECONDS + 10)
    metrics, nixl = engine.metrics(), engine.nixl_metrics()
    lines = engine.lines()
    records = [line for line in lines if hasattr(line, "tokens")]
    moved = metrics.total("kvops_transfer_bytes_total")
    assert moved > 0
    assert moved == metrics.total("vllm:nixl_bytes_transferred_sum") == nixl.total("agent_rx_bytes_total")
    assert moved == sum(record.transfer.bytes for record in records if record.transfer)
    assert moved == metrics.total("kvops_peer_bytes_total")
    assert metrics.total("kvops_transfers_total", outcome="ok") == metrics.total("vllm:nixl_bytes_transferred_count")
    assert metrics.total("kvops_transfer_descriptors_total") == metrics.total("vllm:nixl_num_descriptors_sum")
    assert metrics.total("kvops_holds_total") == metrics.total("kvops_holds_ended_total")
    assert metrics.total("kvops_holds_total") == sum(1 for record in records if record.hold)
    assert metrics.total("kvops_journal_records_total") == len(lines)
    assert metrics.total("kvops_journal_dropped_total") == metrics.total("kvops_instrument_errors_total") == 0
    check_tokens(metrics, records)


def check_tokens(metrics: Metrics, records: list[Any]) -> None:
    scheduled = [record.tokens for record in records if record.tokens.recomputed]
    for spent in scheduled:
        assert spent.local_hit + spent.remote + sum(spent.recomputed.values()) == spent.prompt
    by_source = metrics.by("kvops_prompt_tokens_total", "source")
    assert sum(by_source.values()) == sum(spent.prompt for spent in scheduled)
    assert by_source["computed"] == metrics.total("kvops_recompute_tokens_total")
    assert by_source["remote"] == metrics.total("kvops_loaded_tokens_total")
    theirs = metrics.by("vllm:prompt_tokens_by_source_total", "source")
    assert by_source["local_hit"] == theirs["local_cache_hit"]
    # vLLM counts at admission: a load that failed counts as loaded, and so does the last token, computed again.
    undone = ("last_token", "ttl_expired", "remote_gone", "transfer_failed", "handshake_failed")
    failed = sum(spent.recomputed.get(reason, 0) for spent in scheduled for reason in undone if spent.offered)
    declined = sum(record.tokens.recomputed.get("ttl_expired", 0) for record in records if record.direction is None)
    assert by_source["remote"] + failed - declined == theirs["external_kv_transfer"]


# Engines that die.


def test_decode_killed_between_turns_costs_prefill_a_recompute(fleet: Fleet):
    pair = Pair(fleet["prefill"], fleet["stock-decode"])
    prompt = tokens(150, 90)
    first = pair.turn(prompt)
    pair.prefill.reset_prefix_cache()
    pair.decode.stop(signal.SIGKILL)
    longer = [*history(prompt, first), *tokens(40, 91)]
    second = pair.prefill_leg(longer, first.handle, 2)
    assert second.status == 200
    record = pair.prefill.record(second.id)
    assert record.outcome == "recomputed"
    assert record.error in ("transfer_failed", "remote_gone", "ttl_expired")
    assert record.tokens.recomputed == {record.error: 157, "new_tokens": 41}
    assert second.token_ids == alone(fleet["decode"], longer, 1)


def test_prefill_killed_before_the_read_fails_the_request_and_says_why(fleet: Fleet):
    pair = Pair(fleet["stock-prefill"], fleet["decode"])
    prompt = tokens(150, 92)
    first = pair.prefill_leg(prompt)
    pair.prefill.stop(signal.SIGKILL)
    answer = pair.decode_leg(prompt, first.handle, first.id)
    assert answer.status == 500
    record = pair.decode.record(first.id)
    assert (record.outcome, record.status) == ("failed", "FINISHED_ERROR")
    assert record.error in ("transfer_failed", "remote_gone")
    failed = "kvops_kv_failed_requests_total"
    assert eventually(lambda: pair.decode.metrics().total(failed, reason=record.error) == 1)
    assert eventually(lambda: pair.decode.kv_usage() == 0, TTL_SECONDS + 5)
