from __future__ import annotations

import aiohttp
import pytest

from kvops.bench.fleets import Target, copy_journals, given, model_of
from kvops.errors import KvopsError
from kvops.launch.plan import make_plan
from kvops.launch.rundir import RunDir
from kvops.topology import load_topology

URLS = "router=http://r:1,prefill=http://p:1,decode=http://d:1"


def test_a_leg_is_read_from_its_description():
    leg = given(f"new,mode=push,connectors=stock,{URLS},decode=http://d:2/", prefill_cache="cold").leg
    assert (leg.name, leg.mode, leg.connectors, leg.dispatch) == ("new", "push", "stock", "concurrent")
    assert leg.decode == ("http://d:1", "http://d:2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,mode=push", "lacks router, prefill, decode"),
        (f"a,{URLS},colour=red", "'colour=red'"),
        (f"a,{URLS},mode=auto", "mode=auto; write one of pull, push, bidirectional"),
        (f"a,{URLS},connectors=old", "connectors=old"),
        ("a,fleet=gone", "no fleet called gone is up"),
        (f"../a,{URLS}", "lacks a name"),
    ],
)
def test_a_wrong_leg_is_refused(text, said):
    with pytest.raises(KvopsError, match=said):
        given(text, prefill_cache="cold")


def test_a_fleet_of_kvops_up_is_a_leg_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run_dir = RunDir("mine")
    topology = load_topology(overrides={"mode": "bidirectional"}, preset="cpu-demo")
    plan = make_plan(topology, name="mine", folder=run_dir.path)
    run_dir.prepare(plan)
    lock = run_dir.take_lock()
    assert lock

    with lock:
        target = given("a,fleet=mine,conversations=off", prefill_cache="cold")

    assert (target.leg.mode, target.leg.conversation_ids) == ("bidirectional", False)
    assert (target.leg.router, target.leg.decode) == (plan.router.url, (plan.role("decode")[0].url,))
    assert target.journal == run_dir.journal_dir


async def test_a_request_that_is_too_long_for_the_model_is_refused_before_any_is_sent(fleet):
    leg = fleet.leg()
    async with aiohttp.ClientSession() as session:
        assert await model_of(session, leg, {}, 8192) == "tiny"
        with pytest.raises(KvopsError, match="8193 tokens do not fit tiny, which takes 8192"):
            await model_of(session, leg, {}, 8193)


async def test_only_lines_of_the_legs_own_time_are_copied(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "decode-0.dp0.jsonl").write_text('{"ts":5.0}\n{"ts":15.0}\n{"ts":25.0}\n{"ts":')
    target = Target(given(f"a,{URLS}", prefill_cache="cold").leg, source)
    (tmp_path / "a").mkdir()
    await copy_journals([target], {"a": [(10.0, 20.0)]}, lambda leg: tmp_path / leg)
    assert (tmp_path / "a" / "decode-0.dp0.jsonl").read_text() == '{"ts":15.0}\n'
