"""Engines of more than one rank, several API servers, a MultiConnector, and no prefix cache.

The tests share one fleet and run from top to bottom.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from engine_pair import BLOCK_BYTES, BLOCK_TOKENS, Answer, Pair, alone, tokens
from truth import check_holds, check_instruments, check_moves, check_tokens

if TYPE_CHECKING:
    from engine_pair import Engine

RANKS = (0, 1)


def blocks(count: int) -> int:
    return -(-count // BLOCK_TOKENS)


@pytest.fixture(params=RANKS, ids=lambda rank: f"dp{rank}")
def rank(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def pair(many_ranks_fleet: dict[str, Engine], rank: int) -> Pair:
    return at_rank(many_ranks_fleet, rank)


def at_rank(fleet: dict[str, Engine], rank: int) -> Pair:
    prefill = replace(fleet["prefill"], headers={"X-data-parallel-rank": str(rank)})
    return Pair(prefill, fleet["decode"])


def test_the_ranks_of_decode_are_joined_into_one_record(pair: Pair, rank: int):
    prompt = tokens(200)
    answer = pair.turn(prompt)
    loaded = pair.decode.record(answer.id)
    moved = loaded.transfer
    assert len(pair.decode.records(answer.id)) == 1
    assert (moved.bytes, moved.transfers, moved.ranks) == (blocks(200) * BLOCK_BYTES, 2, 2)
    assert (loaded.tokens.remote, loaded.tokens.recomputed) == (199, {"last_token": 1})
    assert moved.peer.endswith(f":{pair.prefill.side_port + rank}")
    assert answer.token_ids == alone(pair.decode, prompt)


def test_a_data_parallel_rank_writes_a_journal_of_its_own(pair: Pair, rank: int):
    answer = pair.turn(tokens(100))
    done = pair.prefill.record(answer.id)
    assert done.engine.dp_rank == rank
    assert done.engine.engine_id.endswith(f"_dp{rank}")
    assert pair.prefill.hold_end(answer.id).hold.ended_by == "read"


def test_a_second_turn_is_read_back_from_both_ranks_of_decode(pair: Pair):
    prompt = tokens(200)
    first = pair.turn(prompt)
    longer = [*prompt, *first.token_ids, *tokens(40)]
    second = pair.turn(longer, first.handle, turn=2)
    record = pair.prefill.record(second.id)
    assert (record.tokens.local_hit, record.tokens.remote, record.tokens.recomputed) == (0, 207, {"new_tokens": 41})
    assert (record.transfer.bytes, record.transfer.transfers) == (blocks(207) * BLOCK_BYTES, 2)
    assert pair.decode.hold_end(first.id).hold.ended_by == "read"
    assert second.token_ids == alone(pair.decode, longer)


def test_without_a_prefix_cache_the_same_prompt_is_loaded_whole_again(pair: Pair):
    prompt = tokens(200)
    for _ in range(2):
        answer = pair.turn(prompt)
        assert pair.prefill.record(answer.id).tokens.recomputed == {"new_tokens": 200}
        assert pair.decode.record(answer.id).tokens.remote == 199


def test_all_sums_agree_over_ranks_and_api_servers(many_ranks_fleet: dict[str, Engine]):
    def converse(number: int) -> list[Answer]:
        pair, prompt, handle, answers = at_rank(many_ranks_fleet, number % 2), tokens(100 + number), None, []
        for turn in range(1, 4):
            answers.append(pair.turn(prompt, handle, turn=turn))
            prompt, handle = [*prompt, *answers[-1].token_ids, *tokens(70)], answers[-1].handle
        return answers

    with ThreadPoolExecutor(8) as pool:
        asked = [answer.id for answers in pool.map(converse, range(8)) for answer in answers]
    for engine in many_ranks_fleet.values():
        for name in asked:
            engine.record(name)
        metrics, lines = engine.metrics(), engine.lines()
        assert metrics.total("kvops_transfer_bytes_total") > 0
        assert metrics.total("kvops_prompt_tokens_total", source="local_hit") == 0
        check_tokens(metrics, lines)
        check_moves(metrics, lines)
        check_holds(metrics, lines)
        check_instruments(metrics, lines)
