from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from kvops.journal.advice import (
    Advice,
    advise,
    decoder_ttl,
    fit_costs,
    mode_by_comparison,
    patch,
    recompute_threshold,
    ttl_point,
)
from kvops.journal.legs import ALL, Leg, legs_of_paths
from kvops.journal.observations import Turns
from kvops.journal.tables import Journal, find_files
from kvops.topology import load_topology
from kvops_connectors.journal import Engine, Hold, HoldEnd, Record, RequestIds, Times, Tokens, Transfer

T0 = 1796003386.0
PREFILL = Engine("prefill-0", "prefill", 0, "p")
DECODE = Engine("decode-0", "decode", 0, "d")


def turns(gaps: list[float], tokens: float = 100, blocks: float = 10, last: int = 0) -> Turns:
    """Return turns followed after ``gaps``, and ``last`` more that nobody followed for 1000 s."""
    none = [np.nan] * last
    return Turns(
        np.array([*gaps, *none]),
        np.array([tokens] * len(gaps) + [0.0] * last),
        np.full(len(gaps) + last, blocks),
        np.full(len(gaps) + last, 1000.0),
    )


def leg(mode: str, mean: float, count: int = 200) -> Leg:
    times = np.random.default_rng(int(mean * 1000)).exponential(mean, count)
    return Leg(mode, mode, {ALL: {"good": np.ones(count), "ttft_seconds": times}})


def test_the_ttl_is_the_smallest_that_wins_95_percent_of_the_reuse() -> None:
    # 95 gaps of 10 s and 5 of 300 s: 10 s are enough, and the router's margin is a quarter of so short a TTL.
    found = decoder_ttl(turns([10.0] * 95 + [300.0] * 5))

    assert found.value == 14
    assert found.measured["reuse_share"] == pytest.approx(0.95)


def test_one_more_long_gap_makes_the_ttl_cover_it() -> None:
    assert decoder_ttl(turns([10.0] * 94 + [300.0] * 6)).value == 300 + 1 + 30


def test_tokens_not_turns_decide_about_the_ttl() -> None:
    seen = turns([10.0] * 95 + [300.0] * 5)
    seen.reusable_tokens[95:] = 10_000

    assert decoder_ttl(seen).value == 300 + 1 + 30


def test_a_hold_is_paid_until_the_next_turn_the_ttl_or_the_end_of_the_journal() -> None:
    seen = Turns(
        np.array([20.0, 500.0, np.nan]),
        np.array([7.0, 9.0, 0.0]),
        np.array([1.0, 10.0, 100.0]),
        np.array([900, 900, 5.0]),
    )

    point = ttl_point(seen, 60)

    assert point.reused_tokens == 7
    assert point.block_seconds == 1 * 20 + 10 * 60 + 100 * 5


def test_a_gap_within_the_margin_of_the_router_wins_nothing() -> None:
    assert ttl_point(turns([40.0]), 53).reused_tokens == 0
    assert ttl_point(turns([40.0]), 54).reused_tokens == 100
    assert ttl_point(turns([400.0]), 430).reused_tokens == 0
    assert ttl_point(turns([400.0]), 431).reused_tokens == 100


def test_too_few_gaps_are_not_enough_data() -> None:
    found = decoder_ttl(turns([10.0] * 4))

    assert found.value is None
    assert found.missing == "26 more turns that continue a conversation (there are 4)"


def test_the_mode_with_the_shorter_time_to_first_token_is_advised() -> None:
    assert mode_by_comparison([leg("pull", 1.3), leg("push", 0.3)]).value == "push"


def test_no_mode_is_advised_where_no_difference_is_shown() -> None:
    found = mode_by_comparison([leg("pull", 0.5), leg("push", 0.501)])

    assert found.value is None
    assert "no difference" in found.reason


def test_legs_of_one_mode_say_nothing_about_modes() -> None:
    assert "two modes" in mode_by_comparison([leg("pull", 1.3), leg("pull", 0.3)]).missing


def conversation_lines(number: int, rng: np.random.Generator) -> list[Any]:
    """Return the lines of two turns 5 s apart: moving takes 4 ms + 1 us a token, computing 20 ms + 20 us a token."""
    at, history = T0 + 20.0 * number, int(rng.integers(500, 6000))
    lines: list[Any] = []
    for turn, prompt, read in ((1, history, 0), (2, history + int(rng.integers(100, 900)), history)):
        moving = (0.004 + 1e-6 * read) * rng.normal(1, 0.03) if read else 0.0
        computing = (0.02 + 2e-5 * (prompt - read)) * rng.normal(1, 0.03)
        done = at + moving + computing
        ids = RequestIds(
            f"cmpl-{number}-{turn}-0-x", f"cmpl-{number:08x}{turn}-0", conversation=f"c{number}", turn=turn
        )
        carried = {
            "post_seconds": 0.3 * moving,
            "wire_seconds": moving,
            "bytes": read * 1000,
            "descriptors": 8,
            "transfers": 1,
        }
        lines.append(
            Record(
                done, PREFILL, ids, "bidirectional", Tokens(prompt, 0, read, {"new_tokens": prompt - read}, read, None, 1),
                Times(at, at, at + moving if read else None, done), "ok", "d_to_p" if read else None,
                Transfer(**carried) if read else None, Hold("prefill", -(-prompt // 32), 30.0),
            )
        )  # fmt: skip
        wait = 0.005 + 1e-6 * prompt
        lines.append(
            Record(
                done + wait + 0.3, DECODE, ids, "bidirectional", Tokens(prompt, 0, prompt - 1, {"last_token": 1}, prompt, None, 16),
                Times(done, done, done + wait, done + wait + 0.3), "ok", "p_to_d",
                Transfer(post_seconds=0.3 * wait, wire_seconds=wait, bytes=prompt * 1000, descriptors=8, transfers=1),
                Hold("decode", -(-(prompt + 16) // 32), 480.0),
            )
        )  # fmt: skip
        lines.append(HoldEnd(done + wait, PREFILL, ids, "bidirectional", Hold("prefill", 9, 30.0, 12.0, 18.0, "read")))
        at = done + wait + 0.3 + 5.5
    return lines


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    lines = [line for number in range(80) for line in conversation_lines(number, rng)]
    (tmp_path / "fleet.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")
    return tmp_path


@pytest.fixture
def found(journal: Path) -> dict[str, Advice]:
    return {one.topic: one for one in advise(legs_of_paths([journal]))}


def test_the_threshold_of_a_journal_is_where_its_costs_are_equal(found: dict[str, Advice]) -> None:
    # 4 ms + 1 us n = 20 us n at 210.5 tokens.
    assert found["kv_recompute_threshold"].value == pytest.approx(210.5, rel=0.1)


def test_prefills_of_legs_without_readback_count_for_the_threshold(tmp_path: Path) -> None:
    # With readback every prefill computes about as much, so only the other leg tells what more tokens would cost.
    rng = np.random.default_rng(1)
    reading, computing = tmp_path / "reading", tmp_path / "computing"
    for folder in (reading, computing):
        folder.mkdir()
    lines = [line for number in range(80) for line in conversation_lines(number, rng)]
    prefills = [line for line in lines if isinstance(line, Record) and line.engine is PREFILL]
    readers = [line for line in lines if not (line in prefills and line.request.turn == 1)]
    (reading / "a.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, readers)))
    first = [line for line in prefills if line.request.turn == 1]
    (computing / "a.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, first)))
    alone = Journal(find_files([reading]))

    costs, missing = fit_costs(alone, [alone, Journal(find_files([computing]))])

    assert not missing
    assert recompute_threshold(costs, missing).value == pytest.approx(210.5, rel=0.1)


def test_a_pushed_request_tells_nothing_about_moving(tmp_path: Path) -> None:
    # Decode waits for the prefill, too.
    lines = [line for number in range(80) for line in conversation_lines(number, np.random.default_rng(1))]
    pushed = [msgspec.structs.replace(line, mode="push") for line in lines if not isinstance(line, HoldEnd)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, pushed)))

    found = next(one for one in advise(legs_of_paths([tmp_path])) if one.topic == "kv_recompute_threshold")

    assert found.value is None
    assert "more transfers of KV (there are 0)" in found.missing


def test_the_ttl_of_a_journal_follows_its_gaps(found: dict[str, Advice]) -> None:
    assert found["decoder_kv_blocks_ttl"].value == 8


def test_the_lease_is_three_times_the_longest_hold(found: dict[str, Advice]) -> None:
    assert found["kv_lease_duration"].value == 54


def test_slow_posting_asks_for_larger_blocks(found: dict[str, Advice]) -> None:
    advice = found["block size and descriptors"]

    assert advice.measured["post_share"] == pytest.approx(0.3)
    assert "from 32 to 128 tokens" in advice.reason


def test_conversations_that_come_back_ask_for_bidirectional(found: dict[str, Advice]) -> None:
    assert found["mode"].value == "bidirectional"


def test_the_patch_loads_as_a_topology(found: dict[str, Advice], tmp_path: Path) -> None:
    changes = patch(list(found.values()))
    file = tmp_path / "kvops.yaml"
    file.write_text(yaml.safe_dump({"preset": "cpu-demo", **changes}))

    topology = load_topology(file)

    assert topology.mode == "bidirectional"
    assert topology.kv.decoder_ttl == 8
    assert topology.kv.lease == 54


def test_an_expired_hold_doubles_the_lease(journal: Path) -> None:
    ids = RequestIds("cmpl-x-0-x", "cmpl-x-0")
    line = HoldEnd(T0 + 99, PREFILL, ids, "pull", Hold("prefill", 9, 30.0, 0.0, 30.0, "expired"))
    (journal / "more.jsonl").write_bytes(msgspec.json.encode(line))

    lease = next(one for one in advise(legs_of_paths([journal])) if one.topic == "kv_lease_duration")

    assert lease.value == 60
    assert "expired unread" in lease.reason
