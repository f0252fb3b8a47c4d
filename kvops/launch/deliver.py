"""Copying kvops to engines whose image has vLLM and NIXL alone: ``python3 -m kvops.launch.deliver FOLDER``.

With the folder as ``PYTHONPATH`` such an engine loads the connectors, its init container runs the doctor, and its pod
drains. Only our own code is copied: vLLM brings all that it imports, and a second copy of that would be found first.
"""

from __future__ import annotations

import shutil
import sys
from importlib import resources
from pathlib import Path

PACKAGES = ("kvops", "kvops_connectors")


def deliver(folder: Path) -> list[Path]:
    """Copy the packages into ``folder`` and return where they are; what an earlier start left there is replaced.

    Raises:
        OSError: the folder cannot be written.
    """
    copies = []
    for package in PACKAGES:
        copy = folder / package
        shutil.rmtree(copy, ignore_errors=True)
        with resources.as_file(resources.files(package)) as source:
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        copies.append(copy)
    return copies


if __name__ == "__main__":
    for path in deliver(Path(sys.argv[1])):
        print(path)  # noqa: T201
