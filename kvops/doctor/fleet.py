"""Engines of fleets that ``kvops up`` runs on this machine, for comparing two of them by name."""

from __future__ import annotations

from kvops.errors import KvopsError
from kvops.launch.rundir import RunDir, known_names


def pids_of(names: list[str]) -> dict[int, str]:
    """Return the pids of engines that run here, by their names (``prefill-0``, or ``fleet/prefill-0``), in order.

    Raises:
        KvopsError: a name is no running engine's, or that of several.
    """
    running = _running_engines()
    found: dict[int, str] = {}
    for name in names:
        matching = [full for full in running if name in (full, full.partition("/")[2])]
        if not matching:
            raise KvopsError(
                f"{name!r} is neither a snapshot nor an engine that kvops runs here",
                f"running: {', '.join(running) or 'none'}; kvops status shows them",
            )
        if len(matching) > 1:
            raise KvopsError(f"{name!r} runs in several fleets", f"say which: {', '.join(matching)}")
        found[running[matching[0]]] = name
    if len(found) < len(names):
        raise KvopsError("an engine is not compared with itself", "name a prefill and a decode engine")
    return found


def _running_engines() -> dict[str, int]:
    engines: dict[str, int] = {}
    for fleet in known_names():
        run_dir = RunDir(fleet)
        state = run_dir.read_state() if run_dir.is_running() else None
        for process in state.processes if state else ():
            if process.role != "router" and process.pid is not None:
                engines[f"{fleet}/{process.name}"] = process.pid
    return engines
