from __future__ import annotations

from pathlib import Path
from typing import Any

from kvops.launch.canary import Counters, judge, make_prompt
from kvops.launch.plan import Plan, make_plan
from kvops.topology import load_topology

NOTHING = Counters(transferred_tokens=0, cached_tokens=0, computed_tokens=0, kv_bytes=0, requests=0)


def plan_of(tmp_path: Path, **overrides: Any) -> Plan:
    return make_plan(load_topology(None, overrides, "cpu-demo"), name="f", folder=tmp_path)


def took_part(**counts: float) -> Counters:
    return Counters(**{name: counts.get(name, 0) for name in Counters.__struct_fields__ if name != "known"})


def test_kv_that_moved_passes_with_the_figures(tmp_path: Path) -> None:
    added = {
        "prefill-0": took_part(computed_tokens=614, requests=2),
        "decode-0": took_part(transferred_tokens=307, kv_bytes=655360, requests=1),
    }
    report = judge(plan_of(tmp_path), added, 307)
    assert report.passed
    assert report.verdict == (
        "answers match, 655360 bytes of KV moved, decode took 307 of 307 prompt tokens from prefill and computed 0 itself"
    )


def test_in_push_mode_the_bytes_are_those_that_prefill_wrote(tmp_path: Path) -> None:
    added = {
        "prefill-0": took_part(kv_bytes=4096, requests=2),
        "decode-0": took_part(transferred_tokens=300, requests=1),
    }
    assert judge(plan_of(tmp_path, mode="push"), added, 300).kv_bytes == 4096


def test_a_decode_that_computed_everything_itself_fails(tmp_path: Path) -> None:
    added = {
        "prefill-0": took_part(computed_tokens=614, requests=2),
        "decode-0": took_part(computed_tokens=307, requests=1),
    }
    report = judge(plan_of(tmp_path), added, 307)
    assert not report.passed
    assert report.verdict == "answers match, but decode computed all 307 prompt tokens itself: no KV moved"
    assert "decode got no handle" in report.cause


def test_a_router_that_skips_prefill_is_named(tmp_path: Path) -> None:
    added = {
        "prefill-0": took_part(computed_tokens=307, requests=1),
        "decode-0": took_part(computed_tokens=307, requests=1),
    }
    assert "the router sent nothing to prefill" in judge(plan_of(tmp_path), added, 307).cause


def test_the_cause_is_read_from_the_engines_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "decode-0.log").write_text("WARNING Got kv_transfer_params, but no KVConnector found.\n")
    added = {"prefill-0": took_part(requests=2), "decode-0": took_part(computed_tokens=307, requests=1)}
    assert judge(plan_of(tmp_path), added, 307).cause.startswith("decode-0: the engine runs without a KV connector")


def test_tokens_without_bytes_fail(tmp_path: Path) -> None:
    added = {"prefill-0": took_part(requests=2), "decode-0": took_part(transferred_tokens=307, requests=1)}
    assert "no engine moved a byte" in judge(plan_of(tmp_path), added, 307).verdict


def test_an_engine_that_took_part_in_nothing_fails(tmp_path: Path) -> None:
    added = {
        "prefill-0": took_part(requests=4),
        "decode-0": took_part(transferred_tokens=614, kv_bytes=1, requests=2),
        "decode-1": NOTHING,
    }
    report = judge(plan_of(tmp_path, decode={"replicas": 2}), added, 614)
    assert report.verdict == "KV moved, but decode-1 took part in no transfer"


def test_missing_counters_are_not_taken_for_zero(tmp_path: Path) -> None:
    unknown = Counters(transferred_tokens=0, cached_tokens=0, computed_tokens=0, kv_bytes=0, requests=0, known=False)
    report = judge(plan_of(tmp_path), {"prefill-0": unknown, "decode-0": unknown}, 307)
    assert not report.passed
    assert "--disable-log-stats" in report.cause


def test_no_two_canaries_share_a_prompt() -> None:
    assert make_prompt() != make_prompt()
