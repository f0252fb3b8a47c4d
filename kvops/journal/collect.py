"""Bringing journals together: out of the pods of a cluster or the folder of a run, without anybody's addresses.

Ids of requests and engines stay, for they are what ``kvops trace`` joins by; addresses, host names and secrets that can
be recognised go, each to the same placeholder through all files.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from kvops import kubectl
from kvops.doctor.redact import Redactor
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

JOURNAL_MOUNT = "/journal"
_KEPT = {"id", "base_id", "router_id", "remote_id", "client_id", "engine_id", "conversation", "type"}
# A line is a few kilobytes; one that is longer is no journal line.
_LINE_BYTES = 1 << 20


class Collected:
    """What was brought: lines, lines that were no JSON and were left out, and files."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.lines = 0
        self.unreadable = 0
        self.files: list[str] = []


class Collector:
    """Writes redacted journals into one flat folder, as ``kvops trace --journal`` reads it."""

    def __init__(self, folder: Path) -> None:
        """Keep where to write.

        Raises:
            KvopsError: the folder cannot be made, or has journals already.
        """
        self.result = Collected()
        self._folder, self._redactor = folder, Redactor("")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise KvopsError(f"cannot write to {folder}: {error.strerror}", "choose another folder with -o") from None
        if any(folder.glob("*.jsonl*")):
            raise KvopsError(f"{folder} has journals already", "name a new folder with -o, or requests count twice")

    def add(self, name: str, file: IO[bytes]) -> None:
        """Write the redacted lines of ``file`` as ``name``; a file appears whole or not at all."""
        target, part = self._folder / name, self._folder / f".{name}.part"
        with part.open("wb") as out:
            while line := file.readline(_LINE_BYTES):
                redacted = self._redacted(line)
                self.result.lines += redacted is not None
                self.result.unreadable += redacted is None
                out.write(redacted or b"")
        part.rename(target)
        self.result.files.append(name)

    def _redacted(self, line: bytes) -> bytes | None:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return json.dumps(self._walk(value), separators=(",", ":")).encode() + b"\n"

    def _walk(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: self._walk(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [self._walk(item, key) for item in value]
        return self._redactor.text(value) if isinstance(value, str) and key not in _KEPT else value


def from_folder(collector: Collector, folder: Path) -> None:
    """Collect the journals of a folder.

    Raises:
        KvopsError: there is none.
    """
    files = sorted(path for path in folder.glob("*.jsonl*") if path.is_file())
    if not files:
        raise KvopsError(f"no journal in {folder}", "send a request first, or give --name of the fleet")
    for path in files:
        with path.open("rb") as file:
            collector.add(path.name, file)


def from_pod(collector: Collector, namespace: str, pod: dict[str, Any]) -> None:
    """Collect the journals of a pod, by ``tar`` inside of its first container.

    Raises:
        KvopsError: the pod cannot be read.
    """
    name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]["name"]
    argv = ["kubectl", "exec", "-n", namespace, name, "-c", container, "--"]
    argv += ["tar", "cf", "-", "-C", JOURNAL_MOUNT, "."]
    try:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError:
        raise kubectl.missing() from None
    with process:
        assert process.stdout is not None  # noqa: S101
        assert process.stderr is not None  # noqa: S101
        try:
            for file_name, file in _journals(process.stdout):
                collector.add(f"{name}.{file_name}", file)
        except tarfile.TarError:
            process.kill()
        complaint = process.stderr.read()
    # tar exits with 1 where a journal grew while it was read; what it sent is whole lines but for the last.
    if process.returncode not in (0, 1) or (process.returncode and b"file changed" not in complaint):
        raise KvopsError(f"{name} cannot be read: {kubectl.reason(complaint)}", "check 'kubectl get pods'")


def _journals(stream: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield name and content of the journals in a tar stream; a pod's word on paths is not taken."""
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            name = PurePosixPath(member.name).name
            file = archive.extractfile(member) if member.isreg() and ".jsonl" in name else None
            if file is not None:
                yield name, file
