"""Push on real engines: who came first, what was written, and registrations that nobody fulfils."""

from __future__ import annotations

import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_pair import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    LEASE_SECONDS,
    PUSH_TIMEOUT_SECONDS,
    Answer,
    Engine,
    Pair,
    alone,
    complete,
    completion,
    eventually,
    said,
    tokens,
)
from truth import check_holds, check_instruments, check_moves, check_tokens

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
Fleet = dict[str, Engine]
# Time that decode needs at most to give up a registration: timeout, grace, and a slow machine.
GIVEN_UP_SECONDS = PUSH_TIMEOUT_SECONDS + 20


@pytest.fixture
def fleet(push_fleet: Fleet) -> Fleet:
    return push_fleet


@pytest.fixture
def pair(fleet: Fleet) -> Pair:
    return Pair(fleet["prefill"], fleet["decode"])


@pytest.fixture
def hasty(fleet: Fleet) -> Pair:
    """The pair whose decode soon gives up a registration."""
    return Pair(fleet["prefill"], fleet["hasty-decode"])


@pytest.fixture(scope="module")
def address(push_fleet: Fleet) -> dict[str, Any]:
    return address_of(push_fleet["prefill"])


def address_of(prefill: Engine) -> dict[str, Any]:
    """Return prefill's coordinates, which a push router knows before prefill has answered."""
    first = complete(prefill, tokens(40), uuid.uuid4().hex, {"do_remote_decode": True, "do_remote_prefill": False})
    assert first.handle is not None
    names = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size", "transfer_mode")
    return {name: first.handle[name] for name in names if name in first.handle}


def registration(address: dict[str, Any], request_id: str) -> dict[str, Any]:
    return {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": request_id, **address}


def together(pair: Pair, address: dict[str, Any], prompt: list[int], lead_seconds: float = 0.0) -> Answer:
    """Start decode, and prefill after a lead; return decode's answer."""
    request_id = uuid.uuid4().hex
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pair.decode_leg, prompt, registration(address, request_id), request_id)
        time.sleep(lead_seconds)
        assert pair.prefill_leg(prompt, request_id=request_id).status == 200
        answer = waiting.result(60)
    assert answer.status == 200, answer.text
    return answer


def blocks(count: int) -> int:
    return -(-count // BLOCK_TOKENS)


def test_the_answer_is_that_of_one_engine_alone(pair: Pair, address: dict[str, Any]):
    prompt = tokens(300)
    answer = together(pair, address, prompt)
    assert answer.token_ids == alone(pair.decode, prompt)


def test_decode_that_comes_first_waits_for_prefill(pair: Pair, address: dict[str, Any]):
    answer = together(pair, address, tokens(300), lead_seconds=1.0)
    end = pair.prefill.hold_end(answer.id)
    assert (end.push.waited_for, end.hold.ended_by) == ("prefill_blocks", "read")
    assert end.push.waited_seconds >= 0.9
    assert end.push.registered_at < end.push.prefill_done_at
    record = pair.decode.record(answer.id)
    assert (record.direction, record.tokens.remote, record.tokens.recomputed) == ("p_to_d", 299, {"last_token": 1})
    assert record.transfer.wait_seconds >= 0.9
    assert abs(record.push.registered_at - end.push.registered_at) < 0.5


def test_prefill_that_comes_first_waits_for_decode(pair: Pair):
    prompt = tokens(300)
    first = pair.prefill_leg(prompt)
    time.sleep(1.0)
    assert pair.decode_leg(prompt, first.handle, first.id).status == 200
    end = pair.prefill.hold_end(first.id)
    assert (end.push.waited_for, end.hold.ended_by) == ("registration", "read")
    assert end.push.waited_seconds >= 0.9


def test_the_bytes_written_are_those_of_the_models_shape(pair: Pair, address: dict[str, Any]):
    answer = together(pair, address, tokens(500))
    moved = pair.prefill.hold_end(answer.id).transfer
    assert (moved.bytes, moved.transfers, moved.ranks) == (blocks(500) * BLOCK_BYTES, 1, 1)
    assert moved.peer.endswith(f":{pair.decode.side_port}")


def test_a_hit_in_decodes_prefix_cache_is_not_written_again(pair: Pair, address: dict[str, Any]):
    prompt = tokens(300)
    together(pair, address, prompt[:160])
    answer = together(pair, address, prompt)
    assert pair.decode.record(answer.id).tokens.local_hit == 160
    assert pair.prefill.hold_end(answer.id).transfer.bytes == (blocks(300) - 5) * BLOCK_BYTES


def test_a_conversation_writes_in_every_turn_only_what_decode_does_not_have(pair: Pair, address: dict[str, Any]):
    prompt = tokens(150)
    for turn in range(1, 6):
        answer = together(pair, address, prompt)
        spent = pair.decode.record(answer.id).tokens
        assert (spent.local_hit > 100 * (turn - 1)) == (turn > 1)
        assert spent.local_hit + spent.remote + 1 == len(prompt)
        written = blocks(len(prompt)) - spent.local_hit // BLOCK_TOKENS
        assert pair.prefill.hold_end(answer.id).transfer.bytes == written * BLOCK_BYTES
        assert answer.token_ids == alone(pair.decode, prompt)
        prompt = [*prompt, *answer.token_ids, *tokens(100)]


def test_finished_blocks_that_nobody_registers_for_expire(pair: Pair):
    first = pair.prefill_leg(tokens(200))
    pending = "kvops_push_pending"
    assert eventually(lambda: pair.prefill.metrics().total(pending, kind="finished_blocks") == 1)
    assert pair.prefill.hold_end(first.id, 2 * LEASE_SECONDS + 10).hold.ended_by == "expired"
    assert eventually(lambda: pair.prefill.metrics().total(pending, kind="finished_blocks") == 0)


def test_32_requests_at_once_all_get_their_blocks(pair: Pair, address: dict[str, Any]):
    def ask(number: int) -> Answer:
        return together(pair, address, tokens(150 + number, 100 + number))

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(32)))
    for number, answer in enumerate(answers):
        assert pair.decode.record(answer.id).tokens.remote == 149 + number
        assert pair.prefill.hold_end(answer.id).transfer.bytes == blocks(150 + number) * BLOCK_BYTES


def test_stock_prefill_writes_to_our_decode(fleet: Fleet):
    pair, prompt = Pair(fleet["stock"], fleet["decode"]), tokens(300)
    answer = together(pair, address_of(pair.prefill), prompt)
    assert answer.token_ids == alone(pair.decode, prompt)
    assert pair.decode.record(answer.id).tokens.remote == 299


# Registrations that nobody fulfils.


def test_a_registration_that_nobody_fulfils_fails_its_request_and_frees_its_blocks(
    hasty: Pair, address: dict[str, Any]
):
    request_id = uuid.uuid4().hex
    prompt = tokens(300)
    assert hasty.decode_leg(prompt, registration(address, request_id), request_id).status == 500
    record = hasty.decode.record(request_id)
    assert (record.outcome, record.error, record.mended) == ("failed", "push_timeout", ["push_timeout"])
    assert PUSH_TIMEOUT_SECONDS <= record.times.finished - record.times.allocated <= GIVEN_UP_SECONDS
    assert eventually(lambda: hasty.decode.kv_usage() == 0)
    # Prefill has forgotten the registration: it writes nothing, and its blocks wait for the end of their lease.
    assert hasty.prefill_leg(prompt, request_id=request_id).status == 200
    assert hasty.prefill.hold_end(request_id, 2 * LEASE_SECONDS + 10).hold.ended_by == "expired"


def test_stock_prefill_does_not_write_for_a_registration_that_was_taken_back(fleet: Fleet):
    pair, prompt, request_id = Pair(fleet["stock"], fleet["hasty-decode"]), tokens(300), uuid.uuid4().hex
    written = "vllm:nixl_bytes_transferred_sum"
    before = pair.prefill.metrics().total(written)
    given_up = pair.decode_leg(prompt, registration(address_of(pair.prefill), request_id), request_id)
    assert given_up.status == 500
    assert pair.prefill_leg(prompt, request_id=request_id).status == 200
    assert eventually(lambda: pair.prefill.kv_usage() == 0, 2 * LEASE_SECONDS + 10)
    assert pair.prefill.metrics().total(written) == before


def test_a_client_that_hangs_up_while_decode_waits_leaves_no_blocks(hasty: Pair, address: dict[str, Any]):
    request_id = uuid.uuid4().hex
    params = said(registration(address, request_id), request_id, 1)
    body = completion(tokens(300), params, 8)
    with pytest.raises(TimeoutError), hasty.decode.hasty("/v1/completions", body, {"X-Request-Id": request_id}):
        pass
    record = hasty.decode.record(request_id)
    assert (record.outcome, record.status) == ("aborted", "FINISHED_ABORTED")
    assert eventually(lambda: hasty.decode.kv_usage() == 0, GIVEN_UP_SECONDS)


# A handshake that fails.


def test_a_write_whose_handshake_failed_is_begun_again(fleet: Fleet, address: dict[str, Any]):
    """Decode, which prefill meets for the first time, answers its handshake only after vLLM's 5 seconds."""
    pair = Pair(fleet["prefill"], fleet["stock"])
    request_id, prompt = uuid.uuid4().hex, tokens(300)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pair.decode_leg, prompt, registration(address, request_id), request_id)
        assert eventually(lambda: pair.decode.metrics().total("vllm:num_requests_waiting") == 1)
        time.sleep(1)
        with pair.decode.suspended():
            assert pair.prefill_leg(prompt, request_id=request_id).status == 200
            assert eventually(lambda: "push_handshake_failed" in pair.prefill.log(), 30)
        assert waiting.result(60).token_ids == alone(pair.decode, prompt)
    assert pair.prefill.hold_end(request_id).hold.ended_by == "read"
    assert eventually(lambda: pair.prefill.metrics().total("kvops_mends_total", mend="push_retry") >= 1)


def test_stock_decode_waits_for_ever(fleet: Fleet, address: dict[str, Any]):
    decode = fleet["stock"]
    body = completion(tokens(300), registration(address, "nobody"), 8)
    with pytest.raises(TimeoutError), decode.hasty("/v1/completions", body, seconds=PUSH_TIMEOUT_SECONDS * 2):
        pass
    time.sleep(2)
    assert decode.kv_usage() > 0


@pytest.mark.parametrize("name", ["prefill", "decode", "hasty-decode"])
def test_all_sums_agree(fleet: Fleet, name: str):
    engine = fleet[name]
    assert eventually(lambda: engine.metrics().total("kvops_held_requests") == 0, 2 * LEASE_SECONDS + 10)
    metrics, lines = engine.metrics(), engine.lines()
    moved = metrics.total("kvops_transfer_bytes_total", direction="p_to_d")
    assert moved == engine.nixl_metrics().total("agent_tx_bytes_total")
    assert (moved > 0) == (name == "prefill")
    check_tokens(metrics, lines)
    check_moves(metrics, lines)
    check_holds(metrics, lines)
    check_instruments(metrics, lines)
    sent = metrics.total("kvops_push_registrations_total", outcome="sent")
    ended = sum(metrics.total("kvops_push_registrations_total", outcome=how) for how in ("fulfilled", "timed_out"))
    assert sent == ended
    assert (sent > 0) == (name != "prefill")
    assert metrics.total("kvops_reads_after_expiry_total") == 0


# The end: prefill dies.


def test_prefill_killed_while_decode_waits_fails_the_request_and_frees_its_blocks(hasty: Pair, address: dict[str, Any]):
    request_id = uuid.uuid4().hex
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(hasty.decode_leg, tokens(300), registration(address, request_id), request_id)
        assert eventually(lambda: hasty.decode.metrics().total("kvops_requests_waiting_kv") == 1)
        hasty.prefill.stop(signal.SIGKILL)
        assert waiting.result(60).status == 500
    record = hasty.decode.record(request_id)
    assert (record.outcome, record.error) == ("failed", "push_timeout")
    assert eventually(lambda: hasty.decode.kv_usage() == 0)
