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
from engine_pair import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    LEASE_SECONDS,
    TTL_SECONDS,
    Answer,
    Engine,
    Pair,
    alone,
    complete,
    completion,
    events,
    eventually,
    said,
    tokens,
)
from truth import check_holds, check_instruments, check_moves, check_tokens

from kvops_connectors import journal

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
MARGIN_SECONDS = 5
# vLLM's kv_recompute_threshold.
THRESHOLD_TOKENS = 64
# Tokens that prefill has to compute in a later turn: the last one of the answer before, and those of the question.
NEW_TOKENS = 71
Fleet = dict[str, Engine]


@pytest.fixture
def fleet(bidirectional_fleet: Fleet) -> Fleet:
    return bidirectional_fleet


@pytest.fixture
def pair(fleet: Fleet) -> Pair:
    return Pair(fleet["prefill"], fleet["decode"])


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


# Prefill and decode that have not met yet.


def test_a_client_that_hangs_up_before_the_first_handshake_leaves_no_blocks(fleet: Fleet):
    pair = Pair(fleet["stock"], fleet["decode"])
    prompt = tokens(200)
    first = pair.prefill_leg(prompt)
    body = completion(prompt, said(first.handle, first.id, 1), 8)
    with (
        pair.prefill.suspended(),
        pytest.raises(TimeoutError),
        pair.decode.hasty("/v1/completions", body, {"X-Request-Id": first.id}),
    ):
        pass
    record = pair.decode.record(first.id)
    assert (record.outcome, record.direction, record.tokens.recomputed) == ("aborted", "p_to_d", {})
    assert record.transfer.handshake_seconds > 1
    assert eventually(lambda: pair.decode.kv_usage() == 0)


# A first turn: pull from prefill to decode.


def test_a_first_turn_leaves_a_whole_record_on_both_sides(pair: Pair):
    answer = pair.turn(tokens(200))
    done, loaded = pair.prefill.record(answer.id), pair.decode.record(answer.id)
    # Prefill loads nothing in a first turn; a hold that lasts has no end yet; push has no part in it.
    idle = {"request.remote_id", "tokens.matched", "times.loaded", "direction", "transfer", "push", "error"}
    lasting = {"hold.ttl_left_seconds", "hold.held_seconds", "hold.ended_by"}
    assert set(missing(done)) == idle | lasting
    assert set(missing(loaded)) == {"tokens.matched", "transfer.ttl_left_seconds", "push", "error"} | lasting
    assert (done.outcome, loaded.outcome, loaded.direction) == ("ok", "ok", "p_to_d")
    assert (loaded.request.base_id, loaded.request.remote_id) == (done.request.base_id, done.request.id)
    assert (loaded.request.router_id, loaded.request.turn) == (f"r-{answer.id}", 1)
    assert loaded.transfer.peer_engine == done.engine.engine_id


def test_a_first_turn_computes_on_prefill_and_loads_on_decode(pair: Pair):
    answer = pair.turn(tokens(200))
    assert pair.prefill.record(answer.id).tokens.recomputed == {"new_tokens": 200}
    loaded = pair.decode.record(answer.id).tokens
    assert (loaded.local_hit, loaded.remote, loaded.recomputed, loaded.generated) == (0, 199, {"last_token": 1}, 8)


@pytest.mark.parametrize("count", [33, 200, 1000])
def test_the_bytes_are_those_of_the_models_shape(pair: Pair, count: int):
    answer = pair.turn(tokens(count))
    moved = pair.decode.record(answer.id).transfer
    assert (moved.bytes, moved.transfers, moved.ranks) == (blocks(count) * BLOCK_BYTES, 1, 1)


def test_a_hit_in_decodes_prefix_cache_is_not_loaded_again(pair: Pair):
    prompt = tokens(300)
    pair.turn(prompt[:160])
    answer = pair.turn(prompt)
    record = pair.decode.record(answer.id)
    assert (record.tokens.local_hit, record.tokens.remote) == (160, 139)
    assert record.transfer.bytes == (blocks(300) - 5) * BLOCK_BYTES


def test_a_hold_on_prefill_ends_with_the_read(pair: Pair):
    answer = pair.turn(tokens(200))
    end = pair.prefill.hold_end(answer.id)
    assert (end.hold.holder, end.hold.ended_by, end.hold.blocks) == ("prefill", "read", 7)
    assert 0 < end.hold.ttl_left_seconds < end.hold.ttl_granted_seconds


def test_a_request_without_params_is_recorded_too(pair: Pair):
    request_id = uuid.uuid4().hex
    complete(pair.decode, tokens(100), request_id, None, 4)
    record = pair.decode.record(request_id)
    assert (record.outcome, record.direction, record.tokens.recomputed) == ("ok", None, {"new_tokens": 100})


def test_an_openmetrics_scrape_names_the_request_behind_a_figure(pair: Pair):
    answer = pair.turn(tokens(100))
    loaded = pair.decode.record(answer.id)
    # Without the slash vLLM's instrumentator answers, which knows no OpenMetrics.
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}

    def exemplars() -> list[str]:
        text = pair.decode.call("GET", "/metrics/", headers=accept)[1]
        return [line for line in text.splitlines() if line.startswith("kvops_") and loaded.request.id in line]

    assert any("kvops_request_kv_wait_seconds_bucket" in line for line in eventually(exemplars))


# Later turns: prefill reads decode's blocks back.


def test_a_second_turn_reads_the_history_back_and_computes_only_what_is_new(pair: Pair):
    prompt = tokens(200)
    first = pair.turn(prompt)
    pair.prefill.reset_prefix_cache()
    second = pair.turn([*history(prompt, first), *tokens(40)], first.handle, turn=2)
    record = pair.prefill.record(second.id)
    assert (record.direction, record.outcome, record.tokens.matched) == ("d_to_p", "ok", 207)
    assert (record.tokens.remote, record.tokens.recomputed) == (207, {"new_tokens": 41})
    assert record.transfer.bytes == blocks(207) * BLOCK_BYTES
    assert TTL_SECONDS > record.transfer.ttl_left_seconds > MARGIN_SECONDS
    end = pair.decode.hold_end(first.id)
    assert (end.hold.holder, end.hold.ended_by) == ("decode", "read")


def test_what_prefill_still_has_is_not_read_back(pair: Pair):
    prompt = tokens(200)
    first = pair.turn(prompt, max_tokens=100)
    second = pair.turn([*history(prompt, first), *tokens(40)], first.handle, turn=2)
    record = pair.prefill.record(second.id)
    assert (record.tokens.local_hit, record.tokens.remote) == (192, 299 - 192)
    assert record.transfer.bytes == (blocks(299) - 6) * BLOCK_BYTES


def test_fewer_tokens_than_the_threshold_are_computed_and_decode_is_told(pair: Pair):
    prompt = tokens(200)
    first = pair.turn(prompt)
    second = pair.turn([*history(prompt, first), *tokens(40)], first.handle, turn=2)
    record = pair.prefill.record(second.id)
    assert record.tokens.recomputed == {"below_threshold": 207 - 192, "new_tokens": 41}
    assert pair.decode.hold_end(first.id).hold.ended_by == "read"


def test_a_later_turn_without_a_handle_says_so(pair: Pair):
    answer = pair.turn(tokens(100), turn=2)
    assert pair.prefill.record(answer.id).tokens.recomputed == {"no_handle": 100}


def test_a_streamed_conversation_reuses_decodes_blocks_in_every_turn_from_the_second(pair: Pair):
    messages: list[dict[str, str]] = []
    handle = None
    for turn in range(1, 6):
        messages.append({"role": "user", "content": f"{turn} " + bytes(tokens(120)).decode()})
        request_id = uuid.uuid4().hex
        pair.prefill.reset_prefix_cache()
        text, handle = streamed_chat_turn(pair, messages, handle, request_id, turn)
        record = pair.prefill.record(request_id)
        assert (record.tokens.remote > 100 * (turn - 1)) == (turn > 1), record
        messages.append({"role": "assistant", "content": text})
    for asked in range(1, len(messages), 2):
        assert messages[asked]["content"] == chat_alone(pair.decode, messages[:asked])


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
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 40, "cache_salt": uuid.uuid4().hex}
    return json.loads(engine.call("POST", "/v1/chat/completions", body)[1])["choices"][0]["message"]["content"]


def test_a_streaming_client_gets_no_handle_unless_the_router_asks(pair: Pair):
    prompt = tokens(100)
    first = pair.prefill_leg(prompt)
    body = completion(prompt, first.handle, 4, stream=True)
    _, text = pair.decode.call("POST", "/v1/completions", body, {"X-Request-Id": first.id})
    assert not any("kv_transfer_params" in event for event in events(text))


# Token truth.


@pytest.mark.parametrize("edited", [0, 100, 150, 206])
def test_an_edited_history_is_used_up_to_the_edit_and_never_beyond(pair: Pair, edited: int):
    prompt = tokens(200)
    first = pair.turn(prompt)
    changed = history(prompt, first)
    changed[edited] = 35 if changed[edited] != 35 else 36
    changed += tokens(40)
    pair.prefill.reset_prefix_cache()
    second = pair.turn(changed, first.handle, turn=2)
    record = pair.prefill.record(second.id)
    kept = edited // BLOCK_TOKENS * BLOCK_TOKENS
    used = kept if kept >= 64 else 0
    assert (record.tokens.offered, record.tokens.matched, record.tokens.remote) == (207, kept, used)
    assert record.tokens.recomputed["prefix_mismatch"] == 207 - kept
    assert "token_truth" in record.mended
    assert second.token_ids == alone(pair.decode, changed)
    assert pair.decode.hold_end(first.id).hold.ended_by == "read"


def test_stock_prefill_takes_an_edited_history_for_its_own(fleet: Fleet):
    pair = Pair(fleet["stock"], fleet["decode"])
    prompt = tokens(200)
    first = pair.turn(prompt)
    changed = history(prompt, first)
    changed[10] = 35 if changed[10] != 35 else 36
    changed += tokens(40)
    pair.prefill.reset_prefix_cache()
    assert pair.turn(changed, first.handle, turn=2).token_ids != alone(pair.decode, changed)


# Expiry. The first turns are made together, so that their time runs out but once.


def test_a_readback_in_time_leaves_no_expiry(pair: Pair):
    prompt = tokens(150)
    first = pair.turn(prompt)
    pair.prefill.reset_prefix_cache()
    time.sleep(2)
    second = pair.turn(history(prompt, first), first.handle, turn=2)
    assert pair.prefill.record(second.id).tokens.remote == 157
    assert pair.decode.hold_end(first.id).hold.ended_by == "read"


@pytest.fixture(scope="module")
def expired(bidirectional_fleet: Fleet) -> dict[str, tuple[list[int], Answer]]:
    """Prompts and answers of first turns whose blocks nobody has asked for in time."""
    prefill, decode = bidirectional_fleet["prefill"], bidirectional_fleet["decode"]
    pair, stock = Pair(prefill, decode), Pair(bidirectional_fleet["stock"], decode)
    turns = {}
    for name, one in {"scheduler": pair, "ranks": pair, "stock": stock, "nobody": pair}.items():
        prompt = tokens(150)
        turns[name] = prompt, one.turn(prompt)
    unread = tokens(100)
    turns["prefill"] = unread, pair.prefill_leg(unread)
    time.sleep(TTL_SECONDS - MARGIN_SECONDS + 1)
    return turns


def stripped(handle: dict[str, Any]) -> dict[str, Any]:
    """Return a handle as a stock decode engine gives it, so that only prefill's ranks can tell that it has expired."""
    return {name: value for name, value in handle.items() if name != "kvops"}


@pytest.mark.parametrize("known_to", ["scheduler", "ranks"])
def test_a_readback_too_late_is_computed(pair: Pair, expired: dict[str, tuple[list[int], Answer]], known_to: str):
    prompt, first = expired[known_to]
    handle = first.handle if known_to == "scheduler" else stripped(first.handle)
    pair.prefill.reset_prefix_cache()
    longer = [*history(prompt, first), *tokens(40)]
    second = pair.turn(longer, handle, turn=2)
    record = pair.prefill.record(second.id)
    assert (record.outcome, record.error) == ("recomputed", "ttl_expired")
    assert record.tokens.recomputed == {"ttl_expired": 157, "new_tokens": 41}
    assert "expired_readback" in record.mended
    assert second.token_ids == alone(pair.decode, longer)
    assert pair.decode.hold_end(first.id, TTL_SECONDS).hold.ended_by == "expired"
    assert eventually(lambda: pair.prefill.kv_usage() == 0, TTL_SECONDS + 5)


def test_stock_prefill_answers_a_readback_too_late_with_an_error(
    fleet: Fleet, expired: dict[str, tuple[list[int], Answer]]
):
    pair = Pair(fleet["stock"], fleet["decode"])
    prompt, first = expired["stock"]
    pair.prefill.reset_prefix_cache()
    assert pair.prefill_leg(history(prompt, first), stripped(first.handle), 2).status == 500


def test_a_hold_on_decode_that_no_turn_follows_expires(pair: Pair, expired: dict[str, tuple[list[int], Answer]]):
    end = pair.decode.hold_end(expired["nobody"][1].id, TTL_SECONDS + 10)
    assert end.hold.ended_by == "expired"
    assert end.hold.held_seconds >= end.hold.ttl_granted_seconds - 0.1
    wasted = "kvops_held_block_seconds_total"
    least = end.hold.blocks * end.hold.held_seconds
    assert eventually(lambda: pair.decode.metrics().total(wasted, ended_by="expired") >= least)


def test_a_hold_on_prefill_that_nobody_reads_expires(pair: Pair, expired: dict[str, tuple[list[int], Answer]]):
    end = pair.prefill.hold_end(expired["prefill"][1].id, LEASE_SECONDS + 10)
    assert (end.hold.ended_by, end.hold.ttl_left_seconds, end.hold.blocks) == ("expired", 0, 4)


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
def test_a_broken_handle_costs_a_recompute_and_not_the_engine(pair: Pair, change: dict[str, Any]):
    prompt = tokens(100)
    first = pair.prefill_leg(prompt)
    answer = pair.decode_leg(prompt, {**first.handle, **change}, first.id)
    assert answer.status == 200
    record = pair.decode.record(first.id)
    assert (record.tokens.recomputed, record.mended) == ({"no_handle": 100}, ["valid_handle"])
    # Prefill's cache can be emptied only when nothing is held, and the tests below have no time to wait for that.
    assert pair.decode_leg(prompt, first.handle, first.id).status == 200
    assert pair.prefill.hold_end(first.id).hold.ended_by == "read"


# Clients that hang up.


def test_a_client_that_hangs_up_during_prefill_is_recorded(pair: Pair):
    request_id = uuid.uuid4().hex
    params = said({"do_remote_decode": True, "do_remote_prefill": False}, request_id, 1)
    body = completion(tokens(3000), params, 200, stream=True)
    with pair.prefill.stream("/v1/completions", body, {"X-Request-Id": request_id}) as answer:
        answer.read(10)
    record = pair.prefill.record(request_id)
    assert (record.outcome, record.status, record.hold) == ("aborted", "FINISHED_ABORTED", None)


def test_a_client_that_hangs_up_during_decode_is_recorded_with_its_load(pair: Pair):
    prompt = tokens(200)
    first = pair.prefill_leg(prompt)
    body = completion(prompt, first.handle, 2000, stream=True)
    with pair.decode.stream("/v1/completions", body, {"X-Request-Id": first.id}) as answer:
        answer.read(10)
    record = pair.decode.record(first.id)
    assert (record.outcome, record.tokens.remote, record.transfer.bytes) == ("aborted", 199, 7 * BLOCK_BYTES)
    assert pair.prefill.hold_end(first.id).hold.ended_by == "read"


# Stock on one side.


@pytest.mark.parametrize("stock", ["prefill", "decode"])
def test_a_stock_engine_on_one_side_works(fleet: Fleet, stock: str):
    sides = {side: fleet["stock" if side == stock else side] for side in ("prefill", "decode")}
    pair = Pair(**sides)
    prompt = tokens(200)
    first = pair.turn(prompt)
    assert first.token_ids == alone(pair.decode, prompt)
    pair.prefill.reset_prefix_cache()
    longer = [*history(prompt, first), *tokens(40)]
    second = pair.turn(longer, first.handle, turn=2)
    assert second.token_ids == alone(pair.decode, longer)
    if stock == "decode":
        record = pair.prefill.record(second.id)
        assert (record.tokens.remote, record.tokens.matched) == (207, None)
    else:
        assert pair.decode.record(second.id).tokens.remote > 0


# Many at once, and the sums over everything above.


def test_32_conversations_at_once_each_reuse_their_own_history(pair: Pair):
    def converse(number: int) -> list[Answer]:
        prompt, handle, answers = tokens(100 + number, 100 + number), None, []
        for turn in range(1, 4):
            answer = pair.turn(prompt, handle, turn=turn)
            answers.append(answer)
            prompt = [*history(prompt, answer), *tokens(NEW_TOKENS - 1, 1000 * turn + number)]
            handle = answer.handle
        return answers

    with ThreadPoolExecutor(32) as pool:
        conversations = list(pool.map(converse, range(32)))
    for number, answers in enumerate(conversations):
        prompt = tokens(100 + number, 100 + number)
        for turn, answer in enumerate(answers, 1):
            check_reuse(pair.prefill.record(answer.id), prompt, len(prompt) - NEW_TOKENS if turn > 1 else 0)
            prompt = [*history(prompt, answer), *tokens(NEW_TOKENS - 1, 1000 * turn + number)]


def check_reuse(record: journal.Record, prompt: list[int], known: int) -> None:
    """Everything known is found or read back, unless it is too little to be worth a read or the turn came too late."""
    spent = record.tokens
    assert spent.local_hit + spent.remote + sum(spent.recomputed.values()) == spent.prompt == len(prompt)
    assert spent.offered == known
    wanted = max(0, known - spent.local_hit)
    assert spent.remote == (wanted if wanted >= THRESHOLD_TOKENS and not record.error else 0)
    assert record.error in (None, "ttl_expired")


def holds_are_over(engine: Engine) -> bool:
    metrics = engine.metrics()
    return metrics.total("kvops_held_requests") == 0 and metrics.total("kvops_transfers_inflight") == 0


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_all_sums_agree(fleet: Fleet, name: str):
    engine = fleet[name]
    assert eventually(lambda: holds_are_over(engine), TTL_SECONDS + 10)
    metrics, lines = engine.metrics(), engine.lines()
    assert metrics.total("kvops_transfer_bytes_total") == engine.nixl_metrics().total("agent_rx_bytes_total") > 0
    check_tokens(metrics, lines)
    check_moves(metrics, lines)
    check_holds(metrics, lines)
    check_instruments(metrics, lines)


# Engines that die.


def test_prefill_killed_before_the_read_fails_the_request_and_says_why(fleet: Fleet):
    pair = Pair(fleet["stock"], fleet["decode"])
    prompt = tokens(150)
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


def test_decode_killed_between_turns_costs_prefill_a_recompute(pair: Pair):
    prompt = tokens(150)
    first = pair.turn(prompt)
    pair.prefill.reset_prefix_cache()
    pair.decode.stop(signal.SIGKILL)
    longer = [*history(prompt, first), *tokens(40)]
    second = pair.prefill_leg(longer, first.handle, 2)
    assert second.status == 200
    record = pair.prefill.record(second.id)
    assert record.outcome == "recomputed"
    assert record.error in ("transfer_failed", "remote_gone", "ttl_expired")
    assert record.tokens.recomputed == {record.error: 157, "new_tokens": 41}
    assert second.token_ids == alone(pair.prefill, longer, 1)
