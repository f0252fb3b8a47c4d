"""Fixtures for every layer."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No example may fail for being slow: the machine may be busy with engines.
settings.register_profile("kvops", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvops")


@pytest.fixture(scope="session")
def _state_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return paths of folders that do not exist yet; pytest's own numbering reads the folder of all tests each time."""
    base = tmp_path_factory.mktemp("state")
    return (base / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _own_folders(_state_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep run folders of tests away from those of the user; the model cache stays, for it costs time to fill."""
    monkeypatch.setenv("XDG_STATE_HOME", str(next(_state_folders)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Run a test marked ``system("ip", "promtool")`` only where those commands are; CI lets none stay out."""
    for mark in item.iter_markers("system"):
        missing = [command for command in mark.args if shutil.which(command) is None]
        if not missing:
            continue
        reason = f"not run: {', '.join(missing)} not installed (make system-packages)"
        if os.environ.get("KVOPS_ALL_TESTS_MUST_RUN"):
            pytest.fail(reason)
        pytest.skip(reason)
