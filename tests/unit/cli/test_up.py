from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from click.testing import Result as CliResult

from kvops.cli.main import main
from kvops.doctor.check import failed
from kvops.doctor.checks import CHECKS
from kvops.doctor.run import Report, Result
from kvops.launch.rundir import state_home


def up(*args: str) -> CliResult:
    return CliRunner().invoke(main, ["up", *args])


@pytest.mark.parametrize("preset", ["cpu-demo", "cuda-local", "p5", "p5en", "p6-b200", "trn1", "trn2"])
def test_a_dry_run_prints_the_whole_plan_of_every_preset(preset: str) -> None:
    result = up("--preset", preset, "--dry-run")
    assert result.exit_code == 0
    assert all(
        word in result.output for word in ("prefill-0", "decode-0", "router", "side channel", "--kv-transfer-config")
    )


def test_a_dry_run_writes_nothing() -> None:
    up("--preset", "cpu-demo", "--dry-run")
    assert not state_home().exists()


def test_the_plan_as_json_is_complete() -> None:
    plan = json.loads(up("--preset", "p5en", "--dry-run", "--json", "--decode", "1", "--mode", "push").output)
    decode = plan["processes"][1]
    assert plan["mode"] == "push"
    assert set(decode) == {
        "name",
        "role",
        "host",
        "port",
        "argv",
        "env",
        "log_file",
        "engine_id",
        "devices",
        "side_channel_ports",
    }


def test_secrets_of_the_environment_are_not_printed(tmp_path: Path) -> None:
    file = tmp_path / "kvops.yaml"
    file.write_text("preset: cpu-demo\ndecode:\n  env: {HF_TOKEN: hf_abcdef}\n")
    for form in ([], ["--json"]):
        output = up("-f", str(file), "--dry-run", *form).output
        assert "HF_TOKEN" in output
        assert "hf_abcdef" not in output


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("modde: pull\n", "kvops.yaml:1: unknown key modde; did you mean mode?"),
        ("mode: 3\n", "kvops.yaml:1: mode is 3 but should be 'pull', 'bidirectional' or 'push'"),
        ("decode: {replicas: 0}\n", "kvops.yaml:1: decode.replicas is 0"),
        ("preset: p5en\ndecode: {replicas: 2}\n", "decode needs 8 devices on a host"),
        (
            "mode: push\nprefill:\n  args: [bidirectional_kv_xfer]\n",
            "mode push cannot be combined with bidirectional_kv_xfer",
        ),
        ("prefill: {port: 9000}\ndecode: {port: 9000}\n", "port of decode-0 and port of prefill-0 are both 9000"),
        ("prefill: {hosts: [0.0.0.0]}\n", "prefill.hosts has 0.0.0.0"),
        ("prefill: {hosts: [localhost]}\ndecode: {hosts: [10.9.9.9]}\n", "the fleet spans machines (10.9.9.9 too)"),
    ],
)
def test_a_broken_file_gives_its_sentence_exits_2_and_starts_nothing(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "kvops.yaml"
    file.write_text(text)
    preset = [] if "preset" in text else ["--preset", "cpu-demo"]
    result = up("-f", str(file), *preset)
    assert result.exit_code == 2
    assert sentence in result.output
    assert not state_home().exists()


def test_engines_of_another_machine_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "kvops.yaml"
    file.write_text("preset: cpu-demo\nprefill: {hosts: [10.255.0.1]}\ndecode: {hosts: [10.255.0.2]}\n")
    result = up("-f", str(file))
    assert (result.exit_code, "prefill-0 runs on 10.255.0.1" in result.output) == (2, True)


def test_an_impossible_number_on_the_command_line_is_explained() -> None:
    result = up("--decode", "0", "--preset", "cpu-demo")
    assert (result.exit_code, "decode.replicas is 0" in result.output) == (2, True)


def test_a_name_that_is_no_name_is_refused() -> None:
    assert up("--name", "a/b", "--dry-run").exit_code == 2


def test_a_machine_on_which_kv_will_not_move_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = failed("the LIBFABRIC plugin misses libfabric.so.1", fix="install the EFA software")
    monkeypatch.setattr("kvops.doctor.run.run_quick", lambda _: Report("here", "", [Result(CHECKS[0], missing)]))
    result = up("--preset", "cpu-demo")
    assert result.exit_code == 2
    assert f"{CHECKS[0].id}: the LIBFABRIC plugin misses libfabric.so.1; install the EFA software" in result.output
    assert not state_home().exists()
