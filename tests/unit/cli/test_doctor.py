"""kvops doctor on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result
from doctor_cases import Scene, pair
from doctor_hosts import Fixture, p5en
from doctor_tables.efa import use_mixed_verbs

from kvops.cli import doctor
from kvops.doctor.capture import write
from kvops.doctor.check import State
from kvops.doctor.checks import CHECKS
from kvops.doctor.facts import Facts
from kvops.doctor.run import Result as RunResult
from kvops.doctor.run import run, select

if TYPE_CHECKING:
    from pathlib import Path


def evaluated(check_id: str, host: Fixture) -> RunResult:
    return run(Facts(host.host()), select([check_id])).results[0]


def call(*words: object) -> Result:
    return CliRunner().invoke(doctor.command, [str(word) for word in words])


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    path = tmp_path / "p5en.tar.gz"
    write(p5en().members(), path)
    return path


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    scene = Scene(p5en())
    use_mixed_verbs(scene)
    scene.host.command("fi_info -p efa", "", "fi_getinfo: -61 (No data available)\n", 61)
    path = tmp_path / "broken.tar.gz"
    write(scene.host.members(), path)
    return path


def test_a_healthy_snapshot_exits_0(healthy: Path) -> None:
    result = call("--snapshot", healthy)
    assert result.exit_code == 0
    assert "p5en.48xlarge" in result.output
    assert "nothing failed" in result.output


def test_a_broken_snapshot_exits_1_with_the_cause_first(broken: Path) -> None:
    result = call("--snapshot", broken)
    assert result.exit_code == 1
    lines = [line for line in result.output.splitlines() if line.startswith(("FAIL", "WARN"))]
    assert lines[0].split()[:2] == ["FAIL", "EFA-17"]
    assert len(lines) == 1
    assert "explains" in result.output


def test_a_snapshot_without_evidence_exits_2(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text("{}")
    result = call("--snapshot", tmp_path)
    assert result.exit_code == 2
    assert "no evidence" in result.output


def test_a_snapshot_that_is_not_there_exits_2_without_a_traceback(tmp_path: Path) -> None:
    result = call("--snapshot", tmp_path / "nothing.tar.gz")
    assert result.exit_code == 2
    assert "cannot read the snapshot" in result.output
    assert "Traceback" not in result.output


def test_json_has_the_documented_keys(broken: Path) -> None:
    result = call("--snapshot", broken, "--json")
    report = json.loads(result.output)
    assert set(report) == {"schema", "kvops", "host", "instance_type", "exit", "summary", "problems", "findings"}
    assert report["exit"] == result.exit_code == 1
    assert sum(report["summary"].values()) == len(report["findings"]) == len(CHECKS)
    by_id = {finding["id"]: finding for finding in report["findings"]}
    assert by_id["LF-01"]["explained_by"] == "EFA-17"
    assert "LF-01" in by_id["EFA-17"]["explains"]
    assert by_id["EFA-17"]["sources"][0].startswith("https://")


def test_only_and_skip_take_groups_and_ids(healthy: Path) -> None:
    report = json.loads(
        call("--snapshot", healthy, "--only", "efa", "--only", "LF-01", "--skip", "efa-02", "--json").output
    )
    ids = [finding["id"] for finding in report["findings"]]
    assert "EFA-01" in ids
    assert "LF-01" in ids
    assert "EFA-02" not in ids
    assert "GDR-01" not in ids


def test_an_unknown_check_is_answered_with_the_nearest(healthy: Path) -> None:
    result = call("--snapshot", healthy, "--only", "libfabrik")
    assert result.exit_code == 2
    assert "did you mean 'libfabric'?" in result.output


def test_nothing_left_to_run_is_not_success(healthy: Path) -> None:
    assert call("--snapshot", healthy, "--only", "efa", "--skip", "efa").exit_code == 2


def test_the_instance_type_can_be_given(healthy: Path) -> None:
    result = call("--snapshot", healthy, "--instance-type", "p5.48xlarge", "--only", "EFA-01")
    assert result.exit_code == 1
    assert "p5.48xlarge takes 32" in result.output


def test_junit_has_a_case_for_every_check(broken: Path, tmp_path: Path) -> None:
    call("--snapshot", broken, "--junit", tmp_path / "doctor.xml")
    suite = ET.parse(tmp_path / "doctor.xml").getroot()
    assert int(suite.attrib["tests"]) == len(suite) == len(CHECKS)
    failed = [case.attrib["name"] for case in suite if case.find("failure") is not None]
    assert len(failed) == int(suite.attrib["failures"])
    assert "EFA-17" in failed


def test_a_pair_that_fits_exits_0(tmp_path: Path) -> None:
    scene = pair()
    for name, side in (("p", scene.host), ("d", scene.peer)):
        write(side.members(), tmp_path / f"{name}.tar.gz")
    result = call("--pair", tmp_path / "p.tar.gz", tmp_path / "d.tar.gz")
    assert result.exit_code == 0, result.output
    assert "p.tar.gz and d.tar.gz" in result.output


def test_a_pair_that_does_not_fit_exits_1(tmp_path: Path) -> None:
    scene = pair()
    scene.peer.env(VLLM_KV_CACHE_LAYOUT="NHD")
    for name, side in (("p", scene.host), ("d", scene.peer)):
        write(side.members(), tmp_path / f"{name}.tar.gz")
    result = call("--pair", tmp_path / "p.tar.gz", tmp_path / "d.tar.gz")
    assert result.exit_code == 1
    assert "VL-09" in result.output


def test_explain_names_why_rule_fix_and_source() -> None:
    output = call("--explain", "nx-05").output
    for word in ("NX-05", "why", "evidence", "rule", "fix", "https://"):
        assert word in output


def test_explain_of_a_group_names_its_checks() -> None:
    result = call("--explain", "nccl")
    assert result.exit_code == 2
    assert "NX-17" in result.output


def test_list_has_every_check_once() -> None:
    lines = call("--list").output.splitlines()
    assert len(lines) == len({line.split()[0] for line in lines}) == len(CHECKS)


def test_capture_and_read_back(tmp_path: Path, healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "_host", lambda options: p5en().host())
        result = call("--capture", tmp_path / "here.tar.gz")
    assert result.exit_code == 0
    assert "look through it" in result.output
    back, direct = (
        json.loads(call("--snapshot", path, "--json").output) for path in (tmp_path / "here.tar.gz", healthy)
    )
    assert [f["state"] for f in back["findings"]] == [f["state"] for f in direct["findings"]]


def test_this_machine_is_judged_without_a_crash() -> None:
    report = json.loads(call("--json").output)
    assert report["exit"] in {0, 1}
    assert [f for f in report["findings"] if "has a defect" in f["message"]] == []


@pytest.mark.parametrize("more", [("--pair", "p", "d"), ("--aws",), ("--probe",)])
def test_what_no_captured_machine_can_do_is_refused(healthy: Path, more: tuple[str, ...]) -> None:
    result = call("--snapshot", healthy, *more)
    assert (result.exit_code, "judges one captured machine" in result.output) == (2, True)


def test_watch_of_a_snapshot_is_refused(healthy: Path) -> None:
    result = call("--snapshot", healthy, "--watch")
    assert result.exit_code == 2
    assert "live machine" in result.output


def test_watch_prints_what_changes_and_ends_on_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [p5en(), p5en(), p5en().file("/sys/module/efa/version", "1.0\n")]
    looks = iter([host.host() for host in hosts])
    monkeypatch.setattr(doctor, "_host", lambda options: next(looks))
    pauses = iter([None, None])

    def pause(_seconds: float) -> None:
        if next(pauses, "end") == "end":
            raise KeyboardInterrupt

    monkeypatch.setattr(doctor.time, "sleep", pause)
    result = call("--watch", "--only", "EFA-05", "--only", "EFA-01")
    assert result.exit_code == 1
    changed = [line for line in result.output.splitlines() if "->" in line]
    assert len(changed) == 1
    assert "EFA-05 pass -> fail" in changed[0]


def test_a_change_is_a_json_line_on_request() -> None:
    result = evaluated("EFA-01", p5en())
    line = json.loads(doctor._change(result, State.UNKNOWN, as_json=True))
    assert (line["id"], line["before"], line["after"]) == ("EFA-01", "unknown", "pass")


def test_aws_away_from_ec2_is_one_sentence() -> None:
    result = call("--aws")
    assert result.exit_code == 2
    assert "instance id" in result.output


def test_help_has_an_example() -> None:
    assert "kvops doctor --snapshot node7.tar.gz" in call("--help").output


def test_doctor_needs_no_heavy_import() -> None:
    code = (
        "import sys, click.testing, kvops.cli.doctor as d\n"
        "click.testing.CliRunner().invoke(d.command, ['--json'])\n"
        "print(sorted({'pydantic', 'aiohttp', 'rich', 'yaml', 'msgspec', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
