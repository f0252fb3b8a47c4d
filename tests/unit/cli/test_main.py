from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from kvops import __version__
from kvops.cli.main import VERBS, main


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvops.cli.main", *args], capture_output=True, text=True, check=False)


def test_the_help_lists_every_verb() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert all(f"  {verb} " in result.output for verb in VERBS)


def test_the_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from kvops.cli.main import main;"
        "CliRunner().invoke(main, ['--help']);"
        "print([m for m in ('rich', 'aiohttp', 'pydantic', 'psutil', 'msgspec', 'yaml', 'vllm') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_dry_run_imports_no_server() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from kvops.cli.main import main;"
        "CliRunner().invoke(main, ['up', '--dry-run', '--json']);"
        "print([m for m in ('rich', 'aiohttp', 'psutil', 'numpy', 'vllm') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    result = CliRunner().invoke(main, [verb, "--help"])
    assert result.exit_code == 0
    # A line of its own, as written: click has understood the \\b before it.
    assert "\n  Example:\n" in result.output


def test_an_unknown_verb_is_refused() -> None:
    assert run("upp").returncode == 2


def test_the_version_is_shown() -> None:
    assert run("--version").stdout == f"kvops {__version__}\n"
