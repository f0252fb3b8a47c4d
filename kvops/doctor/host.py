"""Where the doctor gets its evidence: the live machine, or a snapshot of one, behind the same four reads.

Every read returns the content or a `Gap` that says why there is none, so that a check can tell "not there" (evidence)
from "could not look" (no evidence).
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import shutil
import stat
import subprocess
import tempfile
import zlib
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterable

Argv = tuple[str, ...]

MAX_FILE_BYTES = 8 << 20
COMMAND_TIMEOUT_SECONDS = 10.0
TOOL_FOLDERS = ("/opt/amazon/efa/bin", "/opt/aws/neuron/bin", "/usr/sbin", "/sbin")


class Why(StrEnum):
    """Why there is no content."""

    ABSENT = "absent"
    DENIED = "denied"
    TIMED_OUT = "timed out"
    NOT_CAPTURED = "not captured"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Gap:
    """A read that gave nothing: what was asked for, and why it is not there."""

    what: str
    why: Why

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True, slots=True)
class Output:
    """What a command printed and its exit status."""

    exit: int
    stdout: str
    stderr: str


class Host(ABC):
    """Four read-only questions about a machine; each is asked at most once and its answer kept."""

    name: str

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._texts: dict[str, str | Gap] = {}
        self._listings: dict[str, tuple[str, ...] | Gap] = {}
        self._links: dict[str, str | Gap] = {}
        self._outputs: dict[Argv, Output | Gap] = {}

    def read(self, path: str) -> str | Gap:
        """Return the text of a file; of a ``.gz`` file its decompressed text."""
        if path not in self._texts:
            self._texts[path] = self._read(path)
        return self._texts[path]

    def listdir(self, path: str) -> tuple[str, ...] | Gap:
        """Return the sorted names in a directory."""
        if path not in self._listings:
            self._listings[path] = self._listdir(path)
        return self._listings[path]

    def readlink(self, path: str) -> str | Gap:
        """Return the target of a symbolic link as it is written."""
        if path not in self._links:
            self._links[path] = self._readlink(path)
        return self._links[path]

    def run(self, argv: Argv) -> Output | Gap:
        """Return what a command printed."""
        if argv not in self._outputs:
            self._outputs[argv] = self._run(argv)
        return self._outputs[argv]

    def answers(
        self,
    ) -> tuple[dict[str, str | Gap], dict[str, tuple[str, ...] | Gap], dict[str, str | Gap], dict[Argv, Output | Gap]]:
        """Return everything that was asked so far: texts, listings, links, and outputs of commands."""
        return dict(self._texts), dict(self._listings), dict(self._links), dict(self._outputs)

    def prefetch(self, commands: Iterable[Argv]) -> None:
        """Ask for several commands at once, so that the slowest sets the time and not their sum."""
        waiting = [argv for argv in dict.fromkeys(commands) if argv not in self._outputs]
        with ThreadPoolExecutor(max_workers=8, thread_name_prefix="doctor") as pool:
            self._outputs.update(zip(waiting, pool.map(self._run, waiting), strict=True))

    @abstractmethod
    def _read(self, path: str) -> str | Gap: ...

    @abstractmethod
    def _listdir(self, path: str) -> tuple[str, ...] | Gap: ...

    @abstractmethod
    def _readlink(self, path: str) -> str | Gap: ...

    @abstractmethod
    def _run(self, argv: Argv) -> Output | Gap: ...

    @abstractmethod
    def python_paths(self) -> tuple[str, ...]:
        """Return the site-packages directories whose distributions count as installed."""

    @abstractmethod
    def captured_commands(self) -> tuple[Argv, ...]:
        """Return the commands whose argv depends on the machine: all of a snapshot, those of AWS on a live one."""


class LiveHost(Host):
    """This machine. Reads only; commands are argv lists with a time limit, never a shell string."""

    name = "this machine"

    def __init__(self) -> None:
        super().__init__()
        self._search_path = os.pathsep.join([os.environ.get("PATH", os.defpath), *TOOL_FOLDERS])

    def _read(self, path: str) -> str | Gap:
        try:
            with _open_regular(path) as file:
                data = file.read(MAX_FILE_BYTES)
            if path.endswith(".gz"):
                data = _gunzip(data)
        except OSError as error:
            return Gap(path, _why(error))
        return data.decode("utf-8", "replace")

    def _listdir(self, path: str) -> tuple[str, ...] | Gap:
        try:
            return tuple(sorted(os.listdir(path)))  # noqa: PTH208
        except OSError as error:
            return Gap(path, _why(error))

    def _readlink(self, path: str) -> str | Gap:
        try:
            return str(Path(path).readlink())
        except OSError as error:
            return Gap(path, _why(error))

    def _run(self, argv: Argv) -> Output | Gap:
        from kvops.doctor import stand_ins  # noqa: PLC0415

        program = shutil.which(argv[0], path=self._search_path)
        if program is None:
            return stand_ins.answer(argv) or Gap(" ".join(argv), Why.ABSENT)
        env = {**os.environ, "LC_ALL": "C", "PATH": self._search_path}
        # Files and not pipes: memory stays bounded whatever a tool prints, and nothing waits for its children.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            try:
                status = subprocess.run(
                    [program, *argv[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    timeout=COMMAND_TIMEOUT_SECONDS,
                    env=env,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                return Gap(" ".join(argv), Why.TIMED_OUT)
            except OSError as error:
                return Gap(" ".join(argv), _why(error))
            stdout, stderr = _head(out), _head(err)
        if status and "permitted" in stderr and not stdout:
            return Gap(" ".join(argv), Why.DENIED)
        return Output(status, stdout, stderr)

    def python_paths(self) -> tuple[str, ...]:
        """Return the site-packages directories of the interpreter that runs kvops."""
        import sys  # noqa: PLC0415

        return tuple(path for path in sys.path if PurePosixPath(path).name in {"site-packages", "dist-packages"})

    def captured_commands(self) -> tuple[Argv, ...]:
        """Return the calls to AWS that were made."""
        return tuple(argv for argv in self._outputs if argv[0] == "aws")


def _open_regular(path: str) -> BinaryIO:
    """Open a regular file; a pipe or device would block or do something when read."""
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: PTH123, SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", path)
    return file


def _head(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_FILE_BYTES).decode("utf-8", "replace")


def _gunzip(data: bytes) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as unpacked:
            return unpacked.read(MAX_FILE_BYTES)
    except (EOFError, zlib.error) as error:
        raise OSError(errno.EIO, str(error)) from error


def _why(error: OSError) -> Why:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return Why.ABSENT
    if isinstance(error, PermissionError):
        return Why.DENIED
    return Why.UNREADABLE
