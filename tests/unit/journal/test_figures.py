from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvops.errors import KvopsError
from kvops.journal.figures import Prompts, compare, figures
from kvops.journal.legs import ALL, legs_of_paths
from kvops.journal.tables import Journal, find_files
from kvops.journal.text import notes
from kvops.router.journal import LegRecord
from kvops.router.journal import Record as RouterRecord
from kvops_connectors.journal import Engine, Hold, HoldEnd, Record, RequestIds, Times, Tokens, Transfer

T0 = 1796003386.0
PREFILL = Engine("prefill-0", "prefill", 0, "p")
DECODE = Engine("decode-0", "decode", 0, "d")
LEG = "f1b1417224844be8a376a953ccd94cae"
IDS = RequestIds(f"chatcmpl-{LEG}-a3c884e6", f"chatcmpl-{LEG}")


def pulled() -> list[msgspec.Struct]:
    """Return the lines of one pulled request: 100 ms of prefill, 40 ms of wait, 11 tokens in 200 ms."""
    first = T0 + 0.15
    return [
        RouterRecord(
            ts=T0 + 0.35, client_id="c", path="/v1/completions", mode="pull", streams=True, outcome="ok",
            legs=[
                LegRecord(role="prefill", engine="prefill-0", attempt=1, id=LEG, started_at=T0),
                LegRecord(role="decode", engine="decode-0", attempt=1, id=LEG, started_at=T0 + 0.1),
            ],
            first_byte_at=first, ended_at=T0 + 0.35, status=200,
        ),
        Record(
            T0 + 0.1, PREFILL, IDS, "pull", Tokens(271, 256, 0, {"new_tokens": 15}, 0, None, 1),
            Times(T0, T0 + 0.01, None, T0 + 0.1), "ok", hold=Hold("prefill", 9, 30.0),
        ),
        Record(
            T0 + 0.35, DECODE, IDS, "pull", Tokens(271, 0, 270, {"last_token": 1}, 271, None, 11),
            Times(T0 + 0.1, T0 + 0.105, T0 + 0.145, T0 + 0.35), "ok", "p_to_d",
            Transfer(bytes=8_000_000, descriptors=4, transfers=2, handshake_seconds=0.01, post_seconds=0.004, wire_seconds=0.02),
        ),
        HoldEnd(T0 + 0.146, PREFILL, IDS, "pull", Hold("prefill", 9, 30.0, 29.9, 0.05, "read")),
    ]  # fmt: skip


def encoded(lines: list[msgspec.Struct]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, line in zip(("router", "p", "d", "p2"), pulled(), strict=True):
        (tmp_path / f"{name}.jsonl").write_bytes(encoded([line]))
    return tmp_path


def test_router_prefill_and_decode_are_joined_to_one_request(folder: Path) -> None:
    found = figures(legs_of_paths([folder])[0])

    cell = found.cells[-1]
    assert (cell.name, cell.requests, cell.failed, found.mode) == (ALL, 1, 0, "pull")
    assert cell.ttft_seconds is not None
    assert cell.ttft_seconds.value == pytest.approx(0.15)
    assert cell.tpot_seconds is not None
    assert cell.tpot_seconds.value == pytest.approx(0.02)
    assert cell.output_tokens_per_second == pytest.approx(11 / 0.35, rel=1e-4)


def test_the_wait_for_kv_is_split_without_counting_posting_twice(folder: Path) -> None:
    kv = figures(legs_of_paths([folder])[0]).kv

    assert kv is not None
    phases = {name: found.value for name, found in kv.flows[0].phase_seconds.items()}
    expected = {"queue": 0.005, "prefill": 0, "handshake": 0.01, "post": 0.004, "data": 0.016, "other": 0.01}
    assert phases == pytest.approx(expected, abs=1e-5)
    assert kv.flows[0].post_share == pytest.approx(0.2)


def test_tokens_and_holds_are_summed(folder: Path) -> None:
    kv = figures(legs_of_paths([folder])[0]).kv

    assert kv is not None
    assert kv.prefill_tokens == {"local_hit": 256, "remote": 0, "computed": 15}
    assert kv.recomputed_tokens == {"new_tokens": 15, "last_token": 1}
    assert kv.held[0].block_seconds == pytest.approx(0.45)


def test_a_write_of_push_is_found_on_prefills_hold(tmp_path: Path) -> None:
    _, prefill, decode, hold = (msgspec.structs.replace(line, mode="push") for line in pulled())
    write = decode.transfer
    decode.transfer = Transfer(peer="127.0.0.1:5600")
    hold.transfer = write
    (tmp_path / "all.jsonl").write_bytes(encoded([prefill, decode, hold]))

    kv = figures(legs_of_paths([tmp_path])[0]).kv

    assert kv is not None
    assert kv.flows[0].phase_seconds["data"].value == pytest.approx(0.016)
    assert kv.flows[0].bytes == 8_000_000


def test_decodes_wait_for_a_prefill_that_goes_on_is_told_apart_in_push(tmp_path: Path) -> None:
    _, prefill, decode, hold = (msgspec.structs.replace(line, mode="push") for line in pulled())
    prefill.times.finished = decode.times.allocated + 0.008
    (tmp_path / "all.jsonl").write_bytes(encoded([prefill, decode, hold]))

    kv = figures(legs_of_paths([tmp_path])[0]).kv

    assert kv is not None
    phases = {name: found.value for name, found in kv.flows[0].phase_seconds.items()}
    assert phases["prefill"] == pytest.approx(0.008, abs=1e-5)
    assert sum(phases.values()) == pytest.approx(0.005 + 0.04, abs=1e-5)


def test_rotated_and_compressed_files_are_read(tmp_path: Path) -> None:
    content = encoded(pulled())
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "a.jsonl.1").write_bytes(content)
    (tmp_path / "a.jsonl.2.gz").write_bytes(gzip.compress(content))

    assert Journal(find_files([tmp_path])).one("SELECT count(*) FROM holds") == 3


def test_a_torn_last_line_is_counted_and_the_rest_is_read(folder: Path) -> None:
    with (folder / "d.jsonl").open("ab") as file:
        file.write(encoded(pulled())[:200])

    journal = Journal(find_files([folder]))

    assert journal.unreadable == 1
    assert journal.one("SELECT count(*) FROM requests") == 2


def test_lines_of_an_unknown_schema_are_left_out_and_counted(folder: Path) -> None:
    later = msgspec.structs.replace(pulled()[1], v=2)
    (folder / "later.jsonl").write_bytes(encoded([later]))

    journal = Journal(find_files([folder]))

    assert (journal.unknown_version, journal.unreadable) == (1, 0)
    assert journal.one("SELECT count(*) FROM requests") == 2


def test_a_broken_archive_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(encoded(pulled()))[:-30])

    with pytest.raises(KvopsError, match="cannot read the journals"):
        Journal(find_files([tmp_path]))


def test_a_name_with_special_characters_is_no_pattern(tmp_path: Path) -> None:
    (tmp_path / "a[1]*?'x.jsonl").write_bytes(encoded(pulled()))

    assert Journal(find_files([tmp_path])).one("SELECT count(*) FROM requests") == 2


def test_a_path_without_journals_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(KvopsError, match="no journal in"):
        find_files([tmp_path])


def test_journals_without_a_request_are_told_of(tmp_path: Path) -> None:
    (tmp_path / "router.jsonl").write_bytes(encoded(pulled()[:1]))

    assert "no request" in notes([figures(legs_of_paths([tmp_path])[0])])[0]


def test_a_leg_compared_with_itself_has_the_ratio_one(folder: Path) -> None:
    leg = legs_of_paths([folder])[0]

    assert compare(leg, leg)[ALL]["ttft_seconds"].value == 1


def test_only_the_requests_of_the_wanted_clients_are_kept(tmp_path: Path) -> None:
    router, *engines = pulled()
    other = msgspec.structs.replace(router, client_id="other", legs=[])
    warm_up = msgspec.structs.replace(engines[0], request=RequestIds("cmpl-w-0-x", "cmpl-w-0"))
    (tmp_path / "a.jsonl").write_bytes(encoded([router, *engines, other, warm_up]))
    journal = Journal(find_files([tmp_path]))

    assert journal.keep({"c": "turn 1", "lost": "turn 2"})

    assert [journal.one(f"SELECT count(*) FROM {table}") for table in ("routed", "requests", "holds")] == [1, 2, 1]


def test_prefills_tokens_are_told_by_cell_of_the_run_with_each_request_once(folder: Path) -> None:
    leg = legs_of_paths([folder])[0]
    assert leg.journal

    leg.journal.keep({"c": "turn 1"})

    kv = figures(leg).kv
    assert kv
    assert kv.prompts == [Prompts(cell="turn 1", requests=1, computed=15, remote=0, local_hit=256)]


def test_all_is_kept_where_no_line_is_of_a_wanted_client(folder: Path) -> None:
    journal = Journal(find_files([folder]))

    assert not journal.keep({"another": "turn 1"})

    assert journal.one("SELECT count(*) FROM requests") == 2


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["v", "kind", "ts", "tokens", "legs", "id"]), inner)
    ),
    max_leaves=8,
)
lines = st.one_of(
    st.binary(max_size=60),
    json_values.map(msgspec.json.encode),
    st.tuples(
        st.sampled_from(range(4)),
        st.sampled_from(["ts", "tokens", "times", "legs", "hold", "request", "v"]),
        json_values,
    ).map(lambda drawn: msgspec.json.encode(msgspec.to_builtins(pulled()[drawn[0]]) | {drawn[1]: drawn[2]})),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(lines, max_size=6))
def test_no_line_whatever_is_in_it_stops_the_report(tmp_path: Path, garbage: list[bytes]) -> None:
    (tmp_path / "a.jsonl").write_bytes(encoded(pulled()) + b"\n".join(garbage))

    for leg in legs_of_paths([tmp_path]):
        kv = figures(leg).kv
        assert kv is not None
        assert kv.prefill_tokens["local_hit"] >= 0 or garbage
