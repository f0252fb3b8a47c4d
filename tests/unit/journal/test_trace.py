from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from kvops.cli.main import main
from kvops.journal.reading import Lines, legs_of
from kvops.journal.requests import find_by_id, find_failed, find_slowest
from kvops.router.journal import LegRecord
from kvops.router.journal import Record as RouterRecord
from kvops_connectors.journal import Engine, Hold, HoldEnd, Record, RequestIds, Times, Tokens, Transfer

PREFILL = Engine("prefill-0", "prefill", 0, "default-prefill-0")
DECODE = Engine("decode-0", "decode", 0, "default-decode-0")
LEG = "f1b1417224844be8a376a953ccd94cae"
T0 = 1796003386.0


def prefill_line(leg: str = LEG, at: float = T0, **changes: Any) -> Record:
    line = Record(
        ts=at + 0.06,
        engine=PREFILL,
        request=RequestIds(f"chatcmpl-{leg}-a3c884e6", f"chatcmpl-{leg}", conversation="c0ffee", turn=2),
        mode="pull",
        tokens=Tokens(prompt=271, local_hit=256, recomputed={"new_tokens": 15}, generated=1),
        times=Times(at, at + 0.001, None, at + 0.05),
        outcome="ok",
        hold=Hold("prefill", 9, 30.0),
        status="FINISHED_LENGTH_CAPPED",
    )
    return msgspec.structs.replace(line, **changes)


def decode_line(leg: str = LEG, at: float = T0, wait: float = 0.03, **changes: Any) -> Record:
    line = Record(
        ts=at + 0.4,
        engine=DECODE,
        request=RequestIds(
            f"chatcmpl-{leg}-0011aabb", f"chatcmpl-{leg}", f"chatcmpl-{leg}-a3c884e6", conversation="c0ffee", turn=2
        ),
        mode="pull",
        tokens=Tokens(271, 0, 270, {"last_token": 1}, 271, None, 16),
        times=Times(at + 0.06, at + 0.061, at + 0.061 + wait, at + 0.4),
        outcome="ok",
        direction="p_to_d",
        transfer=Transfer(
            peer="127.0.0.1:5600",
            bytes=589824,
            descriptors=4,
            transfers=1,
            ranks=1,
            queue_seconds=0.001,
            handshake_seconds=0.004,
            post_seconds=0.0006,
            wire_seconds=0.0224,
            wait_seconds=wait,
            backend="UCX",
        ),
    )
    return msgspec.structs.replace(line, **changes)


def hold_end(leg: str = LEG, ended_by: str = "read", at: float = T0) -> HoldEnd:
    hold = Hold("prefill", 9, 30.0, 29.9, 0.1, ended_by)
    return HoldEnd(at + 0.1, PREFILL, RequestIds(f"chatcmpl-{leg}-a3c884e6", f"chatcmpl-{leg}"), "pull", hold)


def router_line(leg: str = LEG, at: float = T0, **changes: Any) -> RouterRecord:
    legs = [
        LegRecord(role="prefill", engine="http://127.0.0.1:8100", attempt=1, id=leg, started_at=at, outcome="ok"),
        LegRecord(
            role="decode", engine="http://127.0.0.1:8200", attempt=1, id=leg, started_at=at + 0.055, outcome="ok"
        ),
    ]
    line = RouterRecord(
        ts=at + 0.5,
        client_id="my-request",
        router_id=leg,
        path="/v1/chat/completions",
        mode="pull",
        streams=True,
        legs=legs,
        first_byte_at=at + 0.12,
        ended_at=at + 0.45,
        status=200,
        outcome="ok",
    )
    return msgspec.structs.replace(line, **changes)


def write(folder: Path, **files: list[Any]) -> Path:
    for name, lines in files.items():
        content = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        (folder / f"{name}.jsonl").write_bytes(content)
    return folder


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return write(tmp_path, prefill=[prefill_line(), hold_end()], decode=[decode_line()], router=[router_line()])


def trace(*args: str) -> Result:
    return CliRunner().invoke(main, ["trace", *args], env={"COLUMNS": "80", "TZ": "UTC"})


@pytest.mark.parametrize("name", ["my-request", LEG, LEG[:12], f"chatcmpl-{LEG}", f"chatcmpl-{LEG}-a3c884e6"])
def test_a_request_is_found_under_every_name_it_has(journal: Path, name: str) -> None:
    found = find_by_id(Lines(journal), name)
    assert [(len(request.records), len(request.holds), request.router is not None) for request in found] == [
        (2, 1, True)
    ]


@pytest.mark.parametrize("base_id", [f"chatcmpl-{LEG}", f"cmpl-{LEG}-0", f"2_chatcmpl-{LEG}", f"generate-tokens-{LEG}"])
def test_the_legs_id_is_what_vllm_was_given(base_id: str) -> None:
    assert legs_of(prefill_line(request=RequestIds("x", base_id))) == {LEG}


@pytest.mark.parametrize(
    ("handle", "said"), [("late", "the blocks' time on decode is over"), ("hit", "prefill may read the turn before")]
)
def test_it_says_why_there_was_no_reading_back(tmp_path: Path, handle: str, said: str) -> None:
    write(tmp_path, all=[router_line(handle=handle)])
    assert said in " ".join(trace(LEG, "--journal", str(tmp_path)).output.split())


def test_a_few_characters_are_no_id(journal: Path) -> None:
    assert find_by_id(Lines(journal), LEG[:4]) == []


def test_other_requests_stay_out(journal: Path) -> None:
    write(journal, other=[prefill_line("0" * 32), decode_line("0" * 32)])
    assert len(find_by_id(Lines(journal), LEG)[0].records) == 2


def test_the_legs_of_a_retried_request_are_one_request(tmp_path: Path) -> None:
    second = "9" * 32
    router = router_line()
    router.legs.append(
        LegRecord(role="decode", engine="http://127.0.0.1:8201", attempt=2, id=second, started_at=T0 + 1)
    )
    write(tmp_path, all=[prefill_line(), decode_line(second), router])
    found = find_by_id(Lines(tmp_path), second)
    assert [(sorted(request.legs), len(request.records)) for request in found] == [([second, LEG], 2)]


def test_lines_that_cannot_be_read_are_counted_and_passed_over(journal: Path) -> None:
    (journal / "broken.jsonl").write_bytes(b'{"kind": "request", "v": 1\n\xff\xfe' + LEG.encode() + b"\n")
    result = trace(LEG, "--journal", str(journal))
    assert "lines could not be read" in result.output
    assert "decode-0" in result.output


def test_rotated_journals_are_read_too(tmp_path: Path) -> None:
    write(tmp_path, prefill=[prefill_line()])
    (tmp_path / "prefill.jsonl").rename(tmp_path / "prefill.jsonl.1")
    assert find_by_id(Lines(tmp_path), LEG)


def test_the_slowest_come_first(tmp_path: Path) -> None:
    legs = [f"{number:032x}" for number in range(200)]
    write(tmp_path, decode=[decode_line(leg, wait=number / 1000) for number, leg in enumerate(legs)])
    assert [min(request.legs) for request in find_slowest(Lines(tmp_path), 3)] == legs[:-4:-1]


def test_failed_requests_are_those_whose_kv_or_answer_was_lost(tmp_path: Path) -> None:
    lines = [
        prefill_line("1" * 32),
        decode_line("2" * 32, outcome="recomputed", error="transfer_failed"),
        hold_end("3" * 32, "expired"),
        router_line("4" * 32, outcome="decode_failed"),
        hold_end("5" * 32, "read"),
    ]
    write(tmp_path, all=lines)
    assert sorted(min(request.legs)[0] for request in find_failed(Lines(tmp_path))) == ["2", "3", "4"]


def test_the_timeline_tells_who_did_what_when(journal: Path) -> None:
    result = trace(LEG, "--journal", str(journal))
    assert result.exit_code == 0
    for piece in (
        "arrived: 271 prompt tokens, 256 in its own cache",
        "computed 15: 15 new_tokens",
        "holds 9 blocks for 30 s",
        "KV is there: 270 tokens",
        "0.03 GB/s: post 0.6 ms, wire 22.4 ms",
        "9 blocks read after 100.0 ms, 29.9 of 30 s left",
        "first byte to the client",
    ):
        assert piece in " ".join(result.output.split()), piece


def test_the_timeline_fits_80_columns(journal: Path) -> None:
    assert max(map(len, trace(LEG, "--journal", str(journal)).output.splitlines())) <= 80


def test_events_are_in_order_of_time(journal: Path) -> None:
    output = trace(LEG, "--journal", str(journal)).output
    offsets = [float(line.split()[0][1:]) for line in output.splitlines() if line.strip().startswith("+")]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0


def test_json_holds_every_line_of_the_request(journal: Path) -> None:
    (request,) = json.loads(trace(LEG, "--journal", str(journal), "--json").output)
    assert [record["engine"]["name"] for record in request["records"]] == ["prefill-0", "decode-0"]
    assert request["router"]["client_id"] == "my-request"
    assert {span["what"] for span in request["spans"]} == {"queue", "prefill", "wait for KV", "decode"}


def test_a_conversation_is_a_table_of_its_turns(journal: Path) -> None:
    result = trace("--conversation", "c0ffee", "--journal", str(journal))
    assert result.exit_code == 0
    assert LEG[:12] in result.output


def test_a_request_that_failed_makes_exit_status_1(tmp_path: Path) -> None:
    write(tmp_path, decode=[decode_line(outcome="failed", error="transfer_failed")])
    result = trace("--failed", "--journal", str(tmp_path))
    assert (result.exit_code, "failed transfer_failed" in " ".join(result.output.split())) == (1, True)


def test_no_failed_request_is_good_news(journal: Path) -> None:
    result = trace("--failed", "--journal", str(journal))
    assert (result.exit_code, result.output) == (0, "no request failed\n")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "nothing or several things to trace"),
        (["x", "--failed"], "nothing or several things to trace"),
        (["nobody"], "is about nobody"),
    ],
)
def test_what_cannot_be_traced_is_explained(journal: Path, args: list[str], sentence: str) -> None:
    result = trace(*args, "--journal", str(journal))
    assert (result.exit_code, sentence in result.output) == (2, True)


def test_a_folder_without_journals_is_explained(tmp_path: Path) -> None:
    result = trace(LEG, "--journal", str(tmp_path))
    assert (result.exit_code, "no journal in" in result.output) == (2, True)
