from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvops.cli.main import main

FIXTURES = Path(__file__).parents[2] / "fixtures" / "render"
TWO_NODES = FIXTURES / "p6-b200-two-nodes.yaml"


def rendered(file: Path) -> str:
    result = CliRunner().invoke(main, ["render", "slurm", "-f", str(file)])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_same_topology_gives_the_committed_bytes() -> None:
    assert rendered(TWO_NODES) == TWO_NODES.with_suffix(".sbatch").read_text()


@pytest.mark.system("shellcheck")
@pytest.mark.parametrize("fleet", ["p5en-1p1d", "trn2-1p1d", "p6-b200-two-nodes"])
def test_shellcheck_finds_nothing(fleet: str) -> None:
    text = rendered(FIXTURES / f"{fleet}.yaml")
    done = subprocess.run(["shellcheck", "-"], input=text, capture_output=True, text=True, check=False)
    assert done.stdout == ""


def test_the_job_takes_a_node_for_each_machine_of_an_engine() -> None:
    assert "#SBATCH --nodes=4\n" in rendered(TWO_NODES)


def test_settings_become_directives(tmp_path: Path) -> None:
    file = tmp_path / "kvops.yaml"
    file.write_text(
        "preset: p5en\nslurm: {partition: gpu, account: team-a, time_limit: 1-00:00:00, drain_seconds: 90}\n"
    )
    text = rendered(file)
    for line in ("--partition=gpu", "--account=team-a", "--time=1-00:00:00", "--signal=B:TERM@90"):
        assert f"\n#SBATCH {line}\n" in text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("preset: cpu-demo\n", "model kvops-tiny is no folder that all nodes see"),
        ("preset: p5en\nslurm: {time_limit: tomorrow}\n", "kvops.yaml:2: slurm.time_limit is 'tomorrow'"),
        ("preset: p5en\nslurm: {partition: 'a b; rm -rf /'}\n", "kvops.yaml:2: slurm.partition is 'a b; rm -rf /'"),
    ],
)
def test_what_cannot_be_rendered_is_said_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "kvops.yaml"
    file.write_text(text)
    result = CliRunner().invoke(main, ["render", "slurm", "-f", str(file)])
    assert (result.exit_code, sentence in result.output) == (2, True), result.output
