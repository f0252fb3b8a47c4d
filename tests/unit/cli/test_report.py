from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from kvops.bench import results
from kvops.cli.main import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of two legs, of which push takes half as long."""
    folder = tmp_path / "run"
    legs = [results.Leg(name="pull", mode="pull"), results.Leg(name="push", mode="push")]
    cell = results.Cell(input_tokens=1024, rate_per_second=4)
    with results.RunWriter(folder) as writer:
        for number in range(60):
            for leg, factor in (("pull", 1.0), ("push", 0.5)):
                writer.add(
                    results.RequestResult(
                        leg=leg, round=1, cell=cell, request_id=f"{leg}{number}", scheduled=1.0 + number, sent=1.0 + number,
                        prompt_tokens=1024, new_tokens=1024, outcome="ok", ttft_seconds=factor * (1 + number % 7 / 10),
                        tpot_seconds=0.01, itl_p50_seconds=0.01, itl_p99_seconds=0.02, e2e_seconds=2.0, output_tokens=32,
                    )
                )  # fmt: skip
        environment = results.Environment(host="h", cpu="c", cpus=2, memory_bytes=1)
        writer.finish(
            results.Run(
                kind="sweep", started=1.0, command=["kvops"], seed=1, environment=environment, workload={}, legs=legs,
                counters=[], verdict=results.Verdict(ok=True),
            )
        )  # fmt: skip
    return folder


def invoke(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.stdout, done.stderr


def test_the_legs_of_a_run_are_compared_by_cell(run: Path) -> None:
    code, output, _ = invoke("report", run, "--compare", "push", "pull", "--json")

    ratio = json.loads(output)["compared"]["1024 tokens, 4 req/s"]["ttft_seconds"]
    assert code == 0
    assert ratio["value"] == pytest.approx(0.5)
    assert ratio["high"] < 1


def test_the_table_in_a_pipe_keeps_a_row_on_one_line(run: Path) -> None:
    _, output, _ = invoke("report", run)

    row = next(line for line in output.splitlines() if line.startswith("push") and "1024 tokens" in line)
    assert "10.0 [10.0, 10.0]" in row


def test_a_run_without_journals_says_so(run: Path) -> None:
    _, _, errors = invoke("report", run)

    assert "push: no journal, so nothing is known of its KV" in errors


def test_a_handful_of_requests_gets_no_verdict(run: Path) -> None:
    rows = (run / results.REQUESTS).read_text().splitlines(keepends=True)
    (run / results.REQUESTS).write_text("".join(rows[:8]))

    _, output, _ = invoke("report", run, "--compare", "push", "pull")

    assert "too few requests" in output
    assert "faster" not in output


def test_a_run_that_failed_is_reported_as_one(run: Path) -> None:
    content = (run / results.RUN).read_text()
    verdict = '"verdict": {"ok": false, "problems": ["pull, round 1, 1024 tokens: no KV moved"]}'
    (run / results.RUN).write_text(re.sub(r'"verdict": \{.*?\}', verdict, content, flags=re.DOTALL))

    _, output, _ = invoke("report", run, "--json")

    assert json.loads(output)["notes"][0] == "run: the run FAILED: pull, round 1, 1024 tokens: no KV moved"
    assert "the run FAILED" in invoke("report", run)[2]


def test_runs_of_different_workloads_are_not_compared_as_a_whole(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    rows = (other / results.REQUESTS).read_text().splitlines(keepends=True)
    longer = [row.replace('"input_tokens":1024', '"input_tokens":8192') for row in rows[: len(rows) // 2]]
    (other / results.REQUESTS).write_text("".join(longer + rows[len(rows) // 2 :]))
    (other / results.RUN).write_text(
        (other / results.RUN).read_text().replace('"workload": {}', '"workload": {"output_tokens": 9}')
    )

    _, output, _ = invoke("report", run, other, "--compare", "run:push", "other:push", "--json")

    found = json.loads(output)
    assert list(found["compared"]) == ["1024 tokens, 4 req/s"]
    assert "differ in output_tokens" in " ".join(found["notes"])


def test_legs_of_one_run_differ_in_nothing_else(run: Path) -> None:
    assert "differ in" not in invoke("report", run, "--compare", "push", "pull")[2]


def test_a_p99_of_few_requests_is_left_out(run: Path) -> None:
    _, output, _ = invoke("report", run, "--json")

    assert json.loads(output)["legs"][0]["cells"][0]["ttft_p99_seconds"] is None


def test_an_unknown_leg_is_refused_with_the_known_ones(run: Path) -> None:
    code, _, errors = invoke("report", run, "--compare", "push", "pul")

    assert code == 2
    assert "the legs are: pull, push" in errors


def test_a_page_that_cannot_be_written_is_one_sentence(run: Path, tmp_path: Path) -> None:
    code, _, errors = invoke("report", run, "--html", tmp_path / "missing" / "r.html")

    assert code == 2
    assert "give another file with --html" in errors


def test_names_in_the_page_are_escaped(run: Path, tmp_path: Path) -> None:
    content = (run / results.RUN).read_text().replace('"push"', '"<script>alert(1)</script>"')
    (run / results.RUN).write_text(content)
    rows = (run / results.REQUESTS).read_text().replace('"leg":"push"', '"leg":"<script>alert(1)</script>"')
    (run / results.REQUESTS).write_text(rows)

    invoke("report", run, "--html", tmp_path / "r.html")

    assert "<script" not in (tmp_path / "r.html").read_text()


def test_the_faster_mode_of_a_run_is_advised_as_a_patch(run: Path) -> None:
    code, output, _ = invoke("advise", run, "--patch")

    assert code == 0
    assert yaml.safe_load(output) == {"mode": "push"}


def test_advice_without_any_data_is_found_trouble(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(msgspec.json.encode({"kind": "request"}))

    code, output, _ = invoke("advise", tmp_path)

    assert code == 1
    assert "not enough data" in output


@pytest.mark.parametrize("verb", ["report", "advise"])
def test_nothing_to_read_is_one_sentence(verb: str) -> None:
    code, _, errors = invoke(verb)

    assert code == 2
    assert "nothing" in errors
