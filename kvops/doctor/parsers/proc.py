"""Files of ``/proc`` and ``/boot``, and ``df``."""

from __future__ import annotations

import re

from kvops.doctor.parsers import ParseError
from kvops.doctor.parsers.versions import Version, version

UNLIMITED = -1
CAP_IPC_LOCK = 14


def parse_memlock_bytes(limits: str) -> int:
    """Return the soft limit of locked memory in bytes from ``/proc/<pid>/limits``; `UNLIMITED` for none.

    Raises:
        ParseError: no line ``Max locked memory``.
    """
    found = re.search(r"^Max locked memory\s+(unlimited|\d{1,20})\b", limits, re.MULTILINE)
    if found is None:
        raise ParseError("no 'Max locked memory' line")
    return UNLIMITED if found[1] == "unlimited" else int(found[1])


def may_lock_any_memory(status: str) -> bool:
    """Tell from ``/proc/<pid>/status`` whether a process has CAP_IPC_LOCK, which the limit does not bind."""
    found = re.search(r"^CapEff:\s*([0-9a-f]{1,16})$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> CAP_IPC_LOCK & 1)


def parse_effective_uid(status: str) -> int | None:
    """Return the effective user id in ``/proc/<pid>/status``; None where it names none."""
    found = re.search(r"^Uid:\s+\d{1,10}\s+(\d{1,10})\b", status, re.MULTILINE)
    return int(found[1]) if found else None


def parse_meminfo(text: str) -> dict[str, int]:
    """Return the numbers of ``/proc/meminfo`` in the units it prints (kB, or pages).

    Raises:
        ParseError: no ``Name: number`` line.
    """
    values = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d{1,20})\b", text, re.MULTILINE)}
    if not values:
        raise ParseError(f"no 'Name: number' line in {text.strip()[:60]!r}")
    return values


def parse_environ(text: str) -> dict[str, str]:
    """Return a process environment from ``/proc/<pid>/environ``; lines are accepted in place of NUL bytes."""
    pairs = (entry.partition("=") for entry in re.split(r"[\0\n]", text) if "=" in entry)
    return {name: value for name, _, value in pairs if name}


def parse_cmdline(text: str) -> tuple[str, ...]:
    """Return the argv of ``/proc/<pid>/cmdline``, which NUL bytes divide."""
    return tuple(text.rstrip("\0\n").split("\0")) if text.strip("\0\n") else ()


def parse_mapped_files(maps: str) -> list[str]:
    """Return the distinct files that ``/proc/<pid>/maps`` shows, in order."""
    return list(dict.fromkeys(re.findall(r"(/\S+)$", maps, re.MULTILINE)))


def parse_uname_release(text: str) -> str:
    """Return the kernel release of ``uname -a`` or ``/proc/version``.

    Raises:
        ParseError: no ``N.N`` word in it.
    """
    found = re.search(r"(?<!\S)(\d{1,3}\.\d{1,4}(?:\.\d{1,5})?[-.\w+]*)", text)
    if found is None:
        raise ParseError(f"no kernel release in {text.strip()[:60]!r}")
    return found[1]


def kernel_version(release: str) -> Version:
    """Return the first three numbers of a kernel release."""
    return version(release)[:3]


def parse_kernel_options(text: str) -> dict[str, str]:
    """Return the options of a kernel configuration; those "not set" have the value ``n``."""
    options = dict(re.findall(r"^(CONFIG_\w+)=(\S+)", text, re.MULTILINE))
    options.update((name, "n") for name in re.findall(r"^# (CONFIG_\w+) is not set", text, re.MULTILINE))
    return options


def parse_df_size_bytes(text: str) -> int:
    """Return the size of the one file system in ``df -Pk``.

    Raises:
        ParseError: no row of numbers.
    """
    found = re.search(r"^\S+\s+(\d{1,20})\s+\d+\s+\d+\s+\S+\s+/", text, re.MULTILINE)
    if found is None:
        raise ParseError(f"no row in {text.strip()[:60]!r}")
    return int(found[1]) * 1024


def parse_modes(text: str) -> dict[str, str]:
    """Return the mode string (``crw-rw-rw-``) of each name that ``ls -l`` lists."""
    rows = (line.split() for line in text.splitlines())
    return {row[-1]: row[0] for row in rows if len(row) >= 9 and re.match(r"[-bcdlps][-rwxsStT]{9}", row[0])}
