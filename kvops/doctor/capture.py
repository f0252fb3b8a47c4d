"""Takes a snapshot: what the manifest names and whatever the checks asked for, filtered and redacted.

Because it saves the reads of a full run, the checks find in the bundle what they found on the machine.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import time
from typing import TYPE_CHECKING, Any

from kvops import __version__
from kvops.doctor import manifest
from kvops.doctor.engines import is_engine, is_fabric_manager, is_worker
from kvops.doctor.facts import Facts
from kvops.doctor.host import Gap, Host, Output
from kvops.doctor.parsers import proc
from kvops.doctor.redact import Redactor
from kvops.doctor.run import run
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvops.doctor.host import Argv

HOSTNAME = "/proc/sys/kernel/hostname"
NVIDIA_DETAILS = ("nvidia-smi", "-q")

_OF_INIT = {"/proc/1/limits", "/proc/1/status"}
_PID_FILE = re.compile(r"^/proc/(\d+)/")
_KERNEL_LOG = re.compile(r"(?i)efa|neuron|nvidia|infiniband|nvrm|gdrdrv")
_ENGINE_LOG = re.compile(
    r"(?i)nixl|libfabric|ucx|ucp_context|uct |net/|efa|rails?\b|topology:|accelerator|gdr|fi_ep_bind|nrt_|libnrt|neuron"
    r"|libnccom|ofi plugin|runtime|using network|plugin"
)
_PROMPT = re.compile(r"(?i)prompt|received request|messages|completion")
_LIBRARIES = re.compile(r"libs found|fabric|efa|ibverbs|nccl|nrt|cudart|libuc[pstm]|rdma|hwloc|plugin_")
_PACKAGES = re.compile(r"fabric|efa|ibverbs|rdma|nccl|neuron|nvidia|cuda|ucx|gdrcopy", re.IGNORECASE)
_DISTRIBUTIONS = re.compile(r"^\.?(?:vllm|nixl|torch|nvidia|libneuron|neuron|ucx|cuda)", re.IGNORECASE)
_OTHER_PROCESS = re.compile(r"^\s+(?:Process ID|Name)\s+:")
_KERNEL_OPTIONS = re.compile(r"PCI_P2PDMA|INFINIBAND|DMABUF|DMA_SHARED")
_METRICS = re.compile(r"^vllm:(?:nixl_|request_success|generation_tokens)")


def expand(host: Host, pattern: str) -> None:
    """Read everything that a pattern of the manifest names; the host keeps the answers."""
    read = host.read
    if pattern.endswith("/"):
        pattern, read = pattern.rstrip("/"), host.listdir  # type: ignore[assignment]
    elif pattern.endswith("->"):
        pattern, read = pattern.removesuffix("->"), host.readlink
    for path in _paths(host, pattern):
        read(path)


def _paths(host: Host, pattern: str) -> list[str]:
    head, star, tail = pattern.partition("/*")
    if not star:
        return [pattern]
    names = host.listdir(head)
    found = [] if isinstance(names, Gap) else [f"{head}/{name}{tail}" for name in names]
    return [path for inner in found for path in _paths(host, inner)]


def capture(host: Host) -> dict[str, bytes]:
    """Return the members of a snapshot of a host."""
    facts = Facts(host)
    run(facts)
    for pattern in manifest.PATHS:
        expand(host, pattern)
    host.prefetch((*manifest.COMMANDS, *manifest.FOR_PEOPLE))
    hostname = host.read(HOSTNAME)
    return _Bundle(host, facts, "" if isinstance(hostname, Gap) else hostname.strip()).members


class _Bundle:
    """Turns the answers that a host keeps into the members of a snapshot."""

    def __init__(self, host: Host, facts: Facts, hostname: str) -> None:
        self.members: dict[str, bytes] = {}
        self._redactor = Redactor(hostname)
        self._gaps: list[dict[str, Any]] = []
        self._engines = {str(pid) for pid, argv in _processes(facts).items() if _is_wanted_process(argv)}
        self._logs = _log_paths(host)
        texts, listings, links, outputs = host.answers()
        for path, text in texts.items():
            self._add_text(path, text)
        for path, names in listings.items():
            self._add_listing(path, names)
        for path, target in links.items():
            self._add(path, target, ".link")
        self._add_commands(outputs)
        self._add_meta(host, hostname)

    def _add(self, path: str, content: str | Gap, suffix: str = "") -> None:
        name = self._redactor.text(path)
        if isinstance(content, Gap):
            self._gaps.append({"path": name, "why": content.why})
        else:
            self.members[f"root{name}{suffix}"] = self._redactor.text(content).encode()

    def _add_text(self, path: str, text: str | Gap) -> None:
        process = _PID_FILE.match(path)
        if path == HOSTNAME or (process and process[1] not in self._engines and path not in _OF_INIT):
            return
        if isinstance(text, str):
            if path.endswith("/environ"):
                text = self._redactor.environ(text)
            elif path.endswith("/maps"):
                text = "".join(
                    f"0-0 r-xp 0 0:0 0 {file}\n" for file in proc.parse_mapped_files(text) if _is_wanted(file)
                )
            elif path in self._logs:
                text = _lines(text, _is_log_line)
            elif path.startswith("/boot/") or path.endswith("config.gz"):
                text = _lines(text, lambda line: bool(_KERNEL_OPTIONS.search(line)))
        self._add(path, text)

    def _add_listing(self, path: str, names: tuple[str, ...] | Gap) -> None:
        if isinstance(names, Gap):
            self._add(path, names)
            return
        if path == "/proc":
            names = tuple(name for name in names if not name.isdecimal() or name in self._engines)
        elif path.endswith(("site-packages", "dist-packages")):
            names = tuple(name for name in names if _DISTRIBUTIONS.match(name))
        self._add(path, "\n".join(names), "/.listing")

    def _add_commands(self, outputs: dict[Argv, Output | Gap]) -> None:
        index: list[dict[str, Any]] = []
        for argv, output in outputs.items():
            words = [self._redactor.text(word) for word in argv]
            if isinstance(output, Gap):
                self._gaps.append({"argv": words, "why": output.why})
                continue
            names = [f"{len(index):02}.{stream}" for stream in ("out", "err")]
            index.append({"argv": words, "exit": output.exit, "stdout": names[0], "stderr": names[1]})
            self.members[f"commands/{names[0]}"] = self._command_text(argv, output.stdout).encode()
            self.members[f"commands/{names[1]}"] = self._redactor.text(output.stderr).encode()
        self.members["commands/index.json"] = json.dumps(index, indent=1).encode()

    def _command_text(self, argv: Argv, text: str) -> str:
        if argv[-2:] == ("-o", "json") or argv[0] == "aws":
            return self._redactor.json(text)
        if argv == NVIDIA_DETAILS:
            text = _lines(text, lambda line: not _OTHER_PROCESS.match(line))
        wanted = {"dmesg": _KERNEL_LOG, "ldconfig": _LIBRARIES, "curl": _METRICS}.get(argv[0])
        if argv in {manifest.DPKG, manifest.RPM}:
            wanted = _PACKAGES
        if argv[:2] == ("kubectl", "logs"):
            text = _lines(text, _is_log_line)
        if wanted is not None:
            text = _lines(text, lambda line: bool(wanted.search(line)))
        return self._redactor.text(text)

    def _add_meta(self, host: Host, hostname: str) -> None:
        meta = {
            "kvops": __version__,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "hostname_hash": hashlib.sha256(hostname.encode()).hexdigest()[:16],
            "python_paths": [self._redactor.text(path) for path in host.python_paths()],
            "not_captured": self._gaps,
        }
        self.members["meta.json"] = json.dumps(meta, indent=1).encode()


def _processes(facts: Facts) -> dict[int, tuple[str, ...]]:
    return {} if isinstance(facts.host.listdir("/proc"), Gap) else facts.processes


def _is_wanted_process(argv: tuple[str, ...]) -> bool:
    return is_engine(argv) or is_worker(argv) or is_fabric_manager(argv)


def _log_paths(host: Host) -> set[str]:
    """Return the files that were read because an engine writes to them."""
    links = host.answers()[2]
    return {target for path, target in links.items() if isinstance(target, str) and "/fd/" in path}


def _is_wanted(file: str) -> bool:
    return bool(_LIBRARIES.search(file)) or "-packages/" in file


def _is_log_line(line: str) -> bool:
    return bool(_ENGINE_LOG.search(line)) and not _PROMPT.search(line)


def _lines(text: str, keep: Callable[[str], bool]) -> str:
    return "".join(line + "\n" for line in text.splitlines() if keep(line))


def write(members: dict[str, bytes], path: Path) -> None:
    """Write a snapshot as ``.tar.gz`` or ``.tar.zst``, readable by its owner only.

    Raises:
        KvopsError: the file exists, or its name ends otherwise, or it cannot be written.
    """
    packed = _packed(_tar(members), path)
    try:
        with open(path, "xb", opener=_private) as file:
            file.write(packed)
    except FileExistsError as error:
        raise KvopsError(f"{path} exists", "choose another name, a capture is never overwritten") from error
    except OSError as error:
        raise KvopsError(f"cannot write {path}: {error.strerror}", "choose a folder that you may write to") from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in sorted(members.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o600
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _packed(tar: bytes, path: Path) -> bytes:
    if path.name.endswith(".tar.gz"):
        return gzip.compress(tar, mtime=0)
    if not path.name.endswith(".tar.zst"):
        raise KvopsError(f"{path.name} does not end in .tar.gz or .tar.zst", f"call it {path.name}.tar.gz")
    program = shutil.which("zstd")
    if program is None:
        raise KvopsError("there is no zstd program here", "write a .tar.gz")
    return subprocess.run([program, "-qc"], input=tar, capture_output=True, check=True).stdout
