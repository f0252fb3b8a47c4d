"""A snapshot of a machine: a folder, ``.tar``, ``.tar.gz`` or ``.tar.zst`` that somebody sent.

Layout (every member is optional)::

    root/<absolute path>            a captured file
    root/<absolute path>/.listing   the names in a directory, one a line
    root/<absolute path>.link       the target of a symbolic link (a real link is read as text, never followed)
    commands/index.json             [{"argv": [...], "exit": 0, "stdout": "00.out", "stderr": "00.err"}, ...]
    commands/NN.out, NN.err         what the commands printed
    meta.json                       {"kvops", "time", "hostname_hash", "python_paths", "not_captured": [...]}

The content is hostile until read: names are checked, links are text, and members and bytes are bounded.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import posixpath
import shutil
import subprocess
import tarfile
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from kvops.doctor.host import Argv, Gap, Host, Output, Why
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_MEMBERS = 50_000
MAX_MEMBER_BYTES = 8 << 20
MAX_TOTAL_BYTES = 256 << 20
TOP_NAMES = ("root", "commands", "meta.json")
WHY_BY_WORD = {why.value.replace(" ", "_"): why for why in Why} | {why.value: why for why in Why}
WHY_BY_WORD["not_attempted"] = Why.NOT_CAPTURED


class SnapshotHost(Host):
    """The machine that a snapshot was taken of.

    A path is absent only where the snapshot proves it: its directory's listing lacks it, an ancestor is absent, or
    ``meta.json`` says so. Everything else that is missing was not captured.
    """

    def __init__(self, members: Mapping[str, bytes], name: str = "snapshot") -> None:
        """Take the members by their name in the archive; links are members called ``root/<path>.link``."""
        super().__init__()
        self.name = name
        self._members = members
        self.meta = self._load_meta()
        self._gaps = self._load_gaps()
        self._recorded = self._load_commands()

    def python_paths(self) -> tuple[str, ...]:
        """Return the site-packages directories that ``meta.json`` names."""
        paths = self.meta.get("python_paths", [])
        return tuple(path for path in paths if isinstance(path, str)) if isinstance(paths, list) else ()

    def captured_commands(self) -> tuple[Argv, ...]:
        """Return the argv of every recorded command."""
        return tuple(self._recorded)

    def _read(self, path: str) -> str | Gap:
        data = self._members.get("root" + path)
        return self._missing(path) if data is None else data.decode("utf-8", "replace")

    def _listdir(self, path: str) -> tuple[str, ...] | Gap:
        data = self._members.get(f"root{path.rstrip('/')}/.listing")
        if data is None:
            return self._missing(path)
        return tuple(sorted(line for line in data.decode("utf-8", "replace").splitlines() if line))

    def _readlink(self, path: str) -> str | Gap:
        data = self._members.get(f"root{path}.link")
        return self._missing(path) if data is None else data.decode("utf-8", "replace").strip()

    def _run(self, argv: Argv) -> Output | Gap:
        what = " ".join(argv)
        found = self._recorded.get(argv)
        return found if found is not None else Gap(what, self._gaps.get(what, Why.NOT_CAPTURED))

    def _missing(self, path: str) -> Gap:
        if path in self._gaps:
            return Gap(path, self._gaps[path])
        child = path.rstrip("/")
        while child:
            parent, name = posixpath.split(child)
            if self._gaps.get(parent) is Why.ABSENT:
                return Gap(path, Why.ABSENT)
            listing = self._members.get(f"root{parent.rstrip('/')}/.listing")
            if listing is not None and name not in listing.decode("utf-8", "replace").splitlines():
                return Gap(path, Why.ABSENT)
            child = parent.rstrip("/")
        return Gap(path, Why.NOT_CAPTURED)

    def _load_json(self, member: str, kind: type, empty: Any) -> Any:
        data = self._members.get(member)
        if data is None:
            return empty
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            self.problems.append(f"{member} is not JSON: {error}")
            return empty
        if not isinstance(value, kind):
            self.problems.append(f"{member} holds a {type(value).__name__}, expected a {kind.__name__}")
            return empty
        return value

    def _load_meta(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self._load_json("meta.json", dict, {}))

    def _load_gaps(self) -> dict[str, Why]:
        gaps: dict[str, Why] = {}
        entries = self.meta.get("not_captured", [])
        for entry in entries if isinstance(entries, list) else []:
            what = _named(entry) if isinstance(entry, dict) else None
            if what is None:
                self.problems.append(f"meta.json: not_captured entry {str(entry)[:60]!r} has no path or argv")
            else:
                gaps[what] = WHY_BY_WORD.get(str(entry.get("why")), Why.NOT_CAPTURED)
        return gaps

    def _load_commands(self) -> dict[Argv, Output]:
        outputs: dict[Argv, Output] = {}
        for entry in self._load_json("commands/index.json", list, []):
            words: Any = entry.get("argv") if isinstance(entry, dict) else None
            if not _is_argv(words):
                self.problems.append(f"commands/index.json: entry {str(entry)[:60]!r} has no argv")
                continue
            stdout, stderr = (self._stream(entry.get(name)) for name in ("stdout", "stderr"))
            if stdout is None or stderr is None:
                self.problems.append(f"commands/index.json: the output of {' '.join(words)[:60]!r} is missing")
                continue
            status = entry.get("exit", 0)
            argv = (posixpath.basename(words[0]), *words[1:])
            outputs[argv] = Output(status if isinstance(status, int) else 1, stdout, stderr)
        return outputs

    def _stream(self, name: object) -> str | None:
        """Return a stream's text: empty where the index names none, None where it names one that is missing."""
        if name is None:
            return ""
        data = self._members.get(f"commands/{name}")
        return None if data is None else data.decode("utf-8", "replace")


def _is_argv(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(word, str) for word in value)


def _named(entry: dict[str, Any]) -> str | None:
    """Return the path or the joined argv of a ``not_captured`` entry; None when it has neither."""
    if isinstance(entry.get("path"), str):
        return str(entry["path"])
    return " ".join(entry["argv"]) if _is_argv(entry.get("argv")) else None


def load(path: Path) -> SnapshotHost:
    """Read a snapshot folder or archive.

    Raises:
        KvopsError: there is no snapshot at the path, or it breaks a bound (members, bytes, names).
    """
    try:
        members = _folder_members(path) if path.is_dir() else _archive_members(path)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, ValueError) as error:
        raise KvopsError(f"cannot read the snapshot {path}: {error}", "give a folder or a .tar.gz of one") from error
    members = _strip_top_folder(members)
    if not any(name.split("/", 1)[0] in TOP_NAMES for name in members):
        raise KvopsError(
            f"{path} holds no snapshot", "a snapshot has root/, commands/ or meta.json; take one with --capture"
        )
    return SnapshotHost(members, path.name)


def _folder_members(folder: Path) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    budget = _Budget(folder)
    for directory, subfolders, files in os.walk(folder, followlinks=False):
        for name in (*files, *(sub for sub in subfolders if Path(directory, sub).is_symlink())):
            file = Path(directory, name)
            member = file.relative_to(folder).as_posix()
            if file.is_symlink():
                budget.add(member, 0)
                members[member + ".link"] = os.fsencode(file.readlink())
            elif file.is_file():
                budget.add(member, file.stat().st_size)
                members[member] = file.read_bytes()
    return members


def _archive_members(path: Path) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    budget = _Budget(path)
    with _decompressed(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for entry in archive:
            member = posixpath.normpath(entry.name)
            if member.startswith(("/", "../")) or member == ".." or "\0" in member:
                raise KvopsError(f"{path} names a member outside of itself: {entry.name!r}", "do not trust this file")
            budget.add(member, entry.size)
            if entry.issym():
                members[member + ".link"] = os.fsencode(entry.linkname)
            elif entry.isreg():
                file = archive.extractfile(entry)
                members[member] = file.read(MAX_MEMBER_BYTES) if file else b""
    return members


class _Budget:
    """Counts members and bytes, and stops at the bounds before anything is read."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.members = 0
        self.total_bytes = 0

    def add(self, member: str, size_bytes: int) -> None:
        self.members += 1
        self.total_bytes += size_bytes
        if size_bytes > MAX_MEMBER_BYTES:
            raise KvopsError(
                f"{member} in {self.source} has {size_bytes} bytes, a member may have {MAX_MEMBER_BYTES}",
                "shorten the file in the snapshot",
            )
        if self.members > MAX_MEMBERS or self.total_bytes > MAX_TOTAL_BYTES:
            raise KvopsError(
                f"{self.source} is larger than {MAX_MEMBERS} members or {MAX_TOTAL_BYTES} bytes unpacked",
                "a capture by kvops stays far below; leave out what the manifest does not name",
            )


class _BoundedReader:
    """Limits what comes out of a decompressor, headers and padding included."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.left_bytes = MAX_TOTAL_BYTES + MAX_MEMBERS * 2048

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        self.left_bytes -= len(data)
        if self.left_bytes < 0:
            raise ValueError("it unpacks to more than a snapshot may hold")
        return data


@contextmanager
def _decompressed(path: Path) -> Iterator[BinaryIO]:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"\x28\xb5\x2f\xfd":
        with _unzstd(path) as stream:
            yield cast("BinaryIO", _BoundedReader(stream))
    elif magic[:2] == b"\x1f\x8b":
        with gzip.open(path) as unpacked:
            yield cast("BinaryIO", _BoundedReader(cast("BinaryIO", unpacked)))
    else:
        with path.open("rb") as plain:
            yield cast("BinaryIO", _BoundedReader(plain))


@contextmanager
def _unzstd(path: Path) -> Iterator[BinaryIO]:
    """Decompress with the zstd program: the standard library has no zstd before Python 3.14."""
    program = shutil.which("zstd")
    if program is None:
        raise KvopsError(f"{path} is zstd-compressed and there is no zstd program here", "repack it as .tar.gz")
    with subprocess.Popen([program, "-dcq", "--", str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None  # noqa: S101
        try:
            yield cast("BinaryIO", process.stdout)
        finally:
            process.kill()


def _strip_top_folder(members: dict[str, bytes]) -> dict[str, bytes]:
    """Accept an archive of a folder as well as of its content."""
    tops = {name.split("/", 1)[0] for name in members}
    if len(tops) != 1 or tops & set(TOP_NAMES):
        return members
    prefix = tops.pop() + "/"
    return {name.removeprefix(prefix): data for name, data in members.items()}
