"""What a fleet leaves on disk: one folder a name under the user's state directory.

``lock`` is held by the supervisor for as long as it lives, so a stale folder is told by taking the lock, never by a
process id alone. ``plan.json`` and ``state.json`` are written whole or not at all.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from pathlib import Path
from typing import IO

import msgspec

from kvops.errors import KvopsError
from kvops.launch.plan import JOURNAL, LOGS, Plan

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class CanaryReport(msgspec.Struct, kw_only=True):
    """What the canary saw, per prompt and in sum."""

    passed: bool
    verdict: str
    """One sentence: what was proven, or what is wrong."""
    cause: str = ""
    """For a failed canary: which of the known causes it was and what to do."""
    kv_bytes: int = 0
    """Bytes that the initiating side moved."""
    kv_tokens: int = 0
    """Prompt tokens that decode took from prefill."""
    prompt_tokens: int = 0
    seconds: float = 0.0


class ProcessState(msgspec.Struct, kw_only=True):
    """One process as the supervisor sees it."""

    name: str
    role: str
    url: str
    log_file: str
    phase: str = "waiting"
    """waiting, starting, ready, stopped or died."""
    pid: int | None = None
    exit_code: int | None = None
    ready_seconds: float | None = None
    """Seconds from its start to its first healthy answer."""


class FleetState(msgspec.Struct, kw_only=True):
    """A fleet as the supervisor sees it; ``state.json``."""

    run_id: str
    name: str
    mode: str
    model: str
    phase: str = "starting"
    """starting, checking (the canary runs), ready, stopping, stopped or failed."""
    supervisor_pid: int
    started_at: float
    """Unix time in seconds."""
    processes: list[ProcessState]
    canary: CanaryReport | None = None
    problem: str = ""
    """Why the fleet failed: who died, its last log lines, and advice where the cause is known."""

    @property
    def router_url(self) -> str:
        """Base URL that clients use."""
        return next(process.url for process in self.processes if process.role == "router")


class RunDir:
    """The folder of one fleet."""

    def __init__(self, name: str) -> None:
        """Name the folder; nothing is created.

        Raises:
            KvopsError: ``name`` cannot be a folder's and an engine id's part.
        """
        if not _NAME.fullmatch(name):
            raise KvopsError(
                f"{name!r} cannot be a fleet's name", "use up to 63 lower-case letters, digits, dots, - and _"
            )
        self.name = name
        self.path = state_home() / name
        self.log_dir = self.path / LOGS
        self.journal_dir = self.path / JOURNAL
        self._plan_file = self.path / "plan.json"
        self._state_file = self.path / "state.json"
        self._lock_file = self.path / "lock"

    def prepare(self, plan: Plan) -> None:
        """Create the folder, empty its logs and journals and write the plan.

        Only the user may read it, for the plan's environment may hold secrets.
        """
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (self.log_dir, self.journal_dir):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
        _write_whole(self._plan_file, msgspec.json.encode(plan))

    def take_lock(self) -> IO[str] | None:
        """Return the open, locked lock file, or None while another supervisor of this name lives.

        The lock goes with the process, so the file object must be kept until the end.
        """
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = self._lock_file.open("a")
        # `is_running` of another command holds its shared lock for microseconds; a supervisor holds on.
        for _ in range(20):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.01)
            else:
                return file
        file.close()
        return None

    def is_running(self) -> bool:
        """Return whether a supervisor of this name lives."""
        try:
            with self._lock_file.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def read_plan(self) -> Plan:
        """Return the plan that was written last."""
        return msgspec.json.decode(self._plan_file.read_bytes(), type=Plan)

    def read_state(self) -> FleetState | None:
        """Return the last state, or None where there is none (or none that this version can read)."""
        try:
            return msgspec.json.decode(self._state_file.read_bytes(), type=FleetState)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write_state(self, state: FleetState) -> None:
        """Replace the state."""
        _write_whole(self._state_file, msgspec.json.encode(state))


def state_home() -> Path:
    """Return the folder of all fleets: ``$XDG_STATE_HOME/kvops`` (default ``~/.local/state``)."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "kvops"


def known_names() -> list[str]:
    """Return the names of all fleets that have a folder, running or not."""
    home = state_home()
    return sorted(entry.name for entry in home.iterdir() if (entry / "plan.json").exists()) if home.is_dir() else []


def _write_whole(path: Path, content: bytes) -> None:
    draft = path.with_suffix(".new")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    draft.replace(path)
