"""Fixtures for every layer."""

from __future__ import annotations

import os
import shutil

import pytest


@pytest.fixture(autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep run folders of tests away from those of the user; the model cache stays, for it costs time to fill."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


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
