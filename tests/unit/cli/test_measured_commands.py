"""The commands that docs/results tells others to run are commands of today's kvops."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from kvops.cli.main import main
from kvops.topology import load_topology

FOLDER = Path(__file__).parents[3] / "docs" / "results" / "two-h200"


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Return the argument lists with which the script calls kvops."""
    folder = tmp_path_factory.mktemp("bin")
    stand_in = folder / "kvops"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\t" "$@"\necho\n')
    stand_in.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    output = subprocess.run([FOLDER / "run.sh"], env={"PATH": path}, check=True, capture_output=True, text=True).stdout
    return [line.split("\t")[:-1] for line in output.splitlines()]


def test_the_script_measures_both_experiments(commands: list[list[str]]) -> None:
    assert [command[:2] for command in commands if command[0] == "bench"] == [
        ["bench", "sweep"], ["bench", "sweep"], ["bench", "sweep"], ["bench", "turns"],
    ]  # fmt: skip


def test_every_command_of_the_script_is_understood(commands: list[list[str]]) -> None:
    for arguments in commands:
        verb, *rest = arguments
        command = main.get_command(click.Context(main), verb)
        if isinstance(command, click.Group):
            command, rest = command.get_command(click.Context(command), rest[0]), rest[1:]
        assert command, arguments
        command.make_context(command.name, rest)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.name)
def test_prefill_and_decode_have_a_gpu_each(file: Path) -> None:
    topology = load_topology(file)

    assert (topology.prefill.devices, topology.decode.devices) == ((0,), (1,))
    assert "--load-format=dummy" in yaml.safe_load(file.read_text())["decode"]["args"]
