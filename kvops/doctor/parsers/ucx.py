"""``ucx_info -d`` and ``-v``; structure from UCX ``src/tools/info/tl_info.c``, spacing differs between releases."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvops.doctor.parsers import ParseError

_FIELD = re.compile(r"^#\s*(Memory domain|memory types|register|Transport|Device):\s*(\S.*?)\s*$")


@dataclass(slots=True)
class MemoryDomain:
    """A memory domain: the kinds of memory it can register, and its (transport, device) pairs."""

    name: str
    memory_types: str = ""
    register: str = ""
    devices: tuple[tuple[str, str], ...] = ()

    def registers(self, kind: str) -> bool:
        """Tell whether memory of a kind (``cuda``) can be registered here."""
        return bool(re.search(rf"\b{re.escape(kind)}\b[^,]*\([^)]*\breg\b", self.memory_types))


def parse_devices(text: str) -> list[MemoryDomain]:
    """Return the memory domains in order.

    Raises:
        ParseError: there is text, but no ``# Memory domain:`` line.
    """
    domains: list[MemoryDomain] = []
    transport = ""
    for line in text.splitlines():
        field = _FIELD.match(line)
        if field is None:
            continue
        name, value = field[1], field[2]
        if name == "Memory domain":
            domains.append(MemoryDomain(value))
        elif not domains:
            continue
        elif name == "Transport":
            transport = value
        elif name == "Device":
            domains[-1].devices += ((transport, value),)
        elif name == "memory types":
            domains[-1].memory_types = value
        else:
            domains[-1].register = value
    if text.strip() and not domains:
        raise ParseError(f"no 'Memory domain:' line in {text.strip()[:60]!r}")
    return domains


def parse_version(text: str) -> str:
    """Return the library version of ``ucx_info -v``.

    Raises:
        ParseError: no ``# Library version:`` or ``# UCT version=`` line.
    """
    found = re.search(r"^#\s*(?:Library version:|UCT version=)\s*(\d\S*)", text, re.MULTILINE)
    if found is None:
        raise ParseError(f"no version line in {text.strip()[:60]!r}")
    return found[1]
