"""Both experiments of ``kvops bench`` in a tiny form: engines, load and report from one command each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvops.bench.results import RequestResult, read_requests, read_run
from real_fleet import BLOCK_TOKENS, kvops


def bench(*args: str) -> None:
    result = kvops("bench", *args, "--preset", "cpu-demo", "--output-tokens", "8")
    assert result.returncode == 0, result.stdout + result.stderr


def legs_of_report(folder: Path, *args: str) -> dict[str, Any]:
    result = kvops("report", str(folder), "--json", *args)
    assert result.returncode == 0, result.stderr
    return {leg["leg"]: leg for leg in json.loads(result.stdout)["legs"]}


def test_with_readback_prefill_computes_no_more_than_what_is_new(tmp_path: Path) -> None:
    folder = tmp_path / "turns"
    sizes = ("--start-tokens", "256", "--end-tokens", "1024", "--turns", "3", "--conversations", "2")
    bench("turns", *sizes, "--rate", "0", "--think-seconds", "0", "--out", str(folder))

    legs = legs_of_report(folder)
    computed = {
        name: {one["cell"]: one["computed"] for one in legs[name]["kv"]["prompts"]}
        for name in ("bidirectional-off", "bidirectional-on")
    }
    assert computed["bidirectional-off"] == {"turn 1": 256, "turn 2": 640, "turn 3": 1024}
    new = {f"turn {result.turn}": result.new_tokens for result in read_requests(folder)}
    assert set(new) == {"turn 1", "turn 2", "turn 3"}
    for turn, tokens in computed["bidirectional-on"].items():
        assert tokens <= new[turn] + BLOCK_TOKENS
    assert legs["bidirectional-on"]["counted"]["prefill"]["transferred_tokens"] > 1000


def test_pull_and_push_are_compared_in_one_run(tmp_path: Path) -> None:
    folder, page = tmp_path / "sweep", tmp_path / "report.html"
    bench("sweep", "--input-tokens", "256", "--rates", "4", "--seconds", "3", "--out", str(folder))

    legs = legs_of_report(folder, "--compare", "push", "pull", "--html", str(page))
    requests: list[RequestResult] = list(read_requests(folder))
    for mode in ("pull", "push"):
        mine = [request for request in requests if request.leg == mode]
        assert mine
        assert legs[mode]["kv"]["flows"][0]["requests"] == len(mine)
        assert legs[mode]["counted"]["decode"]["transferred_tokens"] >= 255 * len(mine)
    assert [leg.dispatch for leg in read_run(folder).legs] == ["serial", "concurrent"]
    assert "<svg" in page.read_text()
