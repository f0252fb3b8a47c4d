from __future__ import annotations

import json
from datetime import datetime

import pytest

from kvops.bench.imports import read
from kvops.bench.results import Leg
from kvops.errors import KvopsError

LEG = Leg(name="theirs", mode="push")
VLLM = {
    "date": "20261012-101500", "backend": "vllm", "model_id": "Qwen", "num_prompts": 2, "request_rate": 4.0, "completed": 1,
    "input_lens": [1024, 1024], "output_lens": [3, 0], "ttfts": [0.2, 0.0], "itls": [[0.01, 0.03], []],
    "errors": ["", "Internal Server Error"], "generated_texts": ["a", ""],
}  # fmt: skip
AIPERF = {
    "metadata": {
        "session_num": 0, "x_request_id": "r0", "x_correlation_id": "c0", "turn_index": 1,
        "request_start_ns": 1_791_800_000_000_000_000, "benchmark_phase": "profiling",
    },
    "metrics": {
        "time_to_first_token": {"value": 182.5, "unit": "ms"},
        "inter_token_latency": {"value": 11.25, "unit": "ms"},
        "inter_chunk_latency": {"value": [10.5, 30.0, 11.0], "unit": "ms"},
        "request_latency": {"value": 1600.0, "unit": "ms"},
        "input_sequence_length": {"value": 550, "unit": "tokens"},
        "output_sequence_length": {"value": 127, "unit": "tokens"},
    },
    "error": None,
}  # fmt: skip


def write(tmp_path, content):
    path = tmp_path / "theirs"
    path.write_text(content)
    return path


def test_vllm_bench_serve_is_read_request_by_request(tmp_path):
    good, bad = read(write(tmp_path, json.dumps(VLLM)), LEG)
    assert (good.outcome, good.ttft_seconds, good.cell.rate_per_second) == ("ok", 0.2, 4.0)
    assert good.tpot_seconds == pytest.approx(0.02)
    assert good.e2e_seconds == pytest.approx(0.24)
    assert (bad.outcome, bad.ttft_seconds, bad.error) == ("failed", None, "Internal Server Error")


def test_prompts_of_nearly_one_length_are_one_cell(tmp_path):
    requests = read(write(tmp_path, json.dumps(VLLM | {"input_lens": [1023, 1027]})), LEG)
    assert {request.cell.input_tokens for request in requests} == {1025}
    assert [request.prompt_tokens for request in requests] == [1023, 1027]


def test_times_of_vllms_own_clock_become_unix_times(tmp_path):
    times = {"start_times": [26498.25, 26499.75], "duration": 10.0}
    first, second = read(write(tmp_path, json.dumps(VLLM | times)), LEG)
    ended = datetime(2026, 10, 12, 10, 15).astimezone().timestamp()
    assert (first.sent, second.sent) == (ended - 10, ended - 8.5)


def test_a_request_without_output_has_failed(tmp_path):
    _, empty = read(write(tmp_path, json.dumps(VLLM | {"errors": ["", ""]})), LEG)
    assert (empty.outcome, empty.error) == ("failed", "no output")


def test_aiperf_is_read_in_seconds(tmp_path):
    (result,) = read(write(tmp_path, json.dumps(AIPERF) + "\n"), LEG)
    assert result.ttft_seconds == pytest.approx(0.1825)
    assert result.e2e_seconds == pytest.approx(1.6)
    assert (result.itl_p50_seconds, result.itl_p99_seconds) == pytest.approx((0.011, 0.03))
    assert (result.conversation, result.turn, result.output_tokens) == ("c0", 2, 127)


def test_aiperfs_warm_up_is_left_out(tmp_path):
    warm_up = AIPERF | {"metadata": AIPERF["metadata"] | {"benchmark_phase": "warmup"}}
    assert len(read(write(tmp_path, json.dumps(warm_up) + "\n" + json.dumps(AIPERF)), LEG)) == 1


@pytest.mark.parametrize("content", ["", "hello", "{}", '{"ttfts": [1]}', '{"metadata": 1}', "[1]"])
def test_anything_else_is_refused(tmp_path, content):
    with pytest.raises(KvopsError):
        read(write(tmp_path, content), LEG)
