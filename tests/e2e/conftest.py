"""Real vLLM engines on the CPU; every test here carries the marker ``engine``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from real_fleet import UP_TIMEOUT_SECONDS, Fleet, Up, kvops


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(UP_TIMEOUT_SECONDS))


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def stage(_own_folders: None) -> Iterator[contextlib.ExitStack]:
    """Hold what ends the fleet that is up; close it before another one, for two would starve each other."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def up(stage: contextlib.ExitStack) -> Up:
    """Bring up a fleet that lives until the next one."""

    def bring_up(name: str, *args: str) -> Fleet:
        stage.close()
        stage.callback(kvops, "down", "--name", name)
        result = kvops("up", "-d", "--preset", "cpu-demo", "--name", name, *args)
        assert result.returncode == 0, result.stdout + result.stderr
        return Fleet(name)

    return bring_up
