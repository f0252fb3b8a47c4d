from __future__ import annotations

import pytest

from kvops.bench.fleets import Target, copy_journals, given
from kvops.errors import KvopsError

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
        (f"a,{URLS},mode=auto", "mode=auto"),
        (f"../a,{URLS}", "lacks a name"),
    ],
)
def test_a_wrong_leg_is_refused(text, said):
    with pytest.raises(KvopsError, match=said):
        given(text, prefill_cache="cold")


async def test_only_lines_of_the_legs_own_time_are_copied(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "decode-0.dp0.jsonl").write_text('{"ts":5.0}\n{"ts":15.0}\n{"ts":25.0}\n{"ts":')
    target = Target(given(f"a,{URLS}", prefill_cache="cold").leg, source)
    (tmp_path / "a").mkdir()
    await copy_journals([target], {"a": [(10.0, 20.0)]}, lambda leg: tmp_path / leg)
    assert (tmp_path / "a" / "decode-0.dp0.jsonl").read_text() == '{"ts":15.0}\n'
