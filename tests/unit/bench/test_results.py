from __future__ import annotations

import gzip

import pytest

from kvops.bench.results import Cell, Environment, RequestResult, Run, RunWriter, Verdict, read_requests, read_run
from kvops.errors import KvopsError

RESULT = RequestResult(
    leg="pull", round=0, cell=Cell(input_tokens=8, rate_per_second=2.0), request_id="r", scheduled=1.0, sent=1.5,
    prompt_tokens=8, new_tokens=8, outcome="ok", ttft_seconds=0.25,
)  # fmt: skip
RUN = Run(
    kind="sweep", started=1.0, command=["kvops", "bench", "sweep"], seed=0, workload={"rounds": 1}, legs=[], counters=[],
    environment=Environment(host="h", cpu="c", cpus=2, memory_bytes=1), verdict=Verdict(ok=True),
)  # fmt: skip


def write(folder):
    with RunWriter(folder) as writer:
        writer.add(RESULT)
        writer.finish(RUN)


def test_a_run_is_read_as_it_was_written(tmp_path):
    write(tmp_path / "run")
    assert read_run(tmp_path / "run") == RUN
    assert list(read_requests(tmp_path / "run")) == [RESULT]


def test_requests_may_be_compressed(tmp_path):
    write(tmp_path)
    plain = tmp_path / "requests.jsonl"
    (tmp_path / "requests.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert list(read_requests(tmp_path)) == [RESULT]


def test_a_run_is_never_overwritten(tmp_path):
    write(tmp_path)
    with pytest.raises(KvopsError, match="holds a run already"):
        RunWriter(tmp_path)


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(KvopsError, match=r"run\.json"):
        read_run(tmp_path)


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "requests.jsonl").write_text('{"leg": 1}\n')
    with pytest.raises(KvopsError, match="jsonl:1 is no request"):
        list(read_requests(tmp_path))
