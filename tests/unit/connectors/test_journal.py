"""The journal's writer."""

import logging
import time

import msgspec
import pytest

from kvops_connectors.journal import Engine, Hold, HoldEnd, Record, RequestIds, Times, Tokens, Writer, decode

ENGINE = Engine("p0", "prefill", 0, "7f1c8c1e-1b7e-4d1c-a0d5-1d2b4b7f8a11")


def record(number: int = 0) -> Record:
    ids = RequestIds(f"cmpl-{number}-0-1234abcd", f"cmpl-{number}-0", conversation="c0ffee", turn=2)
    tokens = Tokens(100, local_hit=32, remote=60, recomputed={"new_tokens": 8}, offered=92, generated=1)
    return Record(1.5, ENGINE, ids, "pull", tokens, Times(1.0, 1.1, 1.2, 1.4), "ok", "d_to_p")


def hold_end() -> HoldEnd:
    return HoldEnd(2.5, ENGINE, RequestIds("a-12345678", "a"), "pull", Hold("prefill", 4, 30.0, 29.0, 1.0, "read"))


@pytest.mark.parametrize("line", [record(), hold_end()], ids=["request", "hold"])
def test_a_line_is_read_back_as_it_was_written(tmp_path, line):
    writer = Writer(tmp_path / "p0.jsonl", 10_000, 2, 10)
    writer.write(line)
    writer.close()
    assert decode((tmp_path / "p0.jsonl").read_bytes()) == line


def test_a_line_says_its_version_and_kind():
    raw = msgspec.json.decode(msgspec.json.encode(record()))
    assert (raw["v"], raw["kind"]) == (1, "request")


def test_files_are_rotated_by_size_and_the_oldest_go(tmp_path):
    path = tmp_path / "p0.jsonl"
    writer = Writer(path, 2000, 2, 1000)
    for number in range(100):
        writer.write(record(number))
        while not writer._queue.empty():
            time.sleep(0.001)
    writer.close()
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["p0.jsonl", "p0.jsonl.1", "p0.jsonl.2"]
    kept = [decode(line) for name in reversed(names) for line in (tmp_path / name).read_bytes().splitlines()]
    numbers = [int(line.request.base_id.split("-")[1]) for line in kept]
    assert numbers == list(range(numbers[0], 100))
    assert all((tmp_path / name).stat().st_size < 4000 for name in names)


def test_a_full_queue_drops_and_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(Writer, "_run", lambda self: None)
    writer = Writer(tmp_path / "p0.jsonl", 10_000, 2, 3)
    for number in range(5):
        writer.write(record(number))
    assert (writer.written, writer.dropped["queue_full"]) == (3, 2)


def test_a_disk_that_cannot_be_written_costs_lines_and_nothing_else(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    writer = Writer(tmp_path / "file" / "p0.jsonl", 10_000, 2, 10)
    with caplog.at_level(logging.WARNING, "vllm.kvops"):
        writer.write(record())
        writer.close()
    assert writer.dropped["write_error"] == 1


def test_a_line_of_another_shape_is_an_error():
    with pytest.raises(msgspec.DecodeError):
        decode(b'{"kind":"request","v":1}')
