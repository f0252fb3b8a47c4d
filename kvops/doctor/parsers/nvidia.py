"""NVIDIA: the driver's version file, ``nvidia-smi -L`` and ``nvidia-smi topo -m``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kvops.doctor.parsers import ParseError

RELATIONS = ("X", "SYS", "NODE", "PHB", "PXB", "PIX")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CELL = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|NV\d+")


@dataclass(frozen=True, slots=True)
class NvidiaDriver:
    """The loaded kernel module: its version, and whether it is the open one."""

    version: str
    is_open: bool


@dataclass(frozen=True, slots=True)
class Topology:
    """Relations between the rows and columns of ``topo -m``; NIC columns carry their RDMA name where known."""

    relations: dict[tuple[str, str], str] = field(default_factory=dict)

    def nics_of(self, gpu: str) -> dict[str, str]:
        """Return the relation to each NIC of one GPU (``GPU0``)."""
        pairs = ((column, value) for (row, column), value in self.relations.items() if row == gpu)
        return {column: value for column, value in pairs if not column.startswith("GPU")}

    @property
    def gpus(self) -> list[str]:
        """Return the GPU rows in order."""
        return list(dict.fromkeys(row for row, _ in self.relations if row.startswith("GPU")))


def parse_driver(text: str) -> NvidiaDriver:
    """Return what line 1 of ``/proc/driver/nvidia/version`` says.

    Raises:
        ParseError: no line ``NVRM version: ... <number>``.
    """
    line = re.search(r"^NVRM version:.*?Kernel Module(?: for \S+)?\s+(\d{1,6}(?:\.\d{1,6})+)", text, re.MULTILINE)
    if line is None:
        raise ParseError(f"no 'NVRM version:' in {text.strip()[:60]!r}")
    return NvidiaDriver(line[1], "Open Kernel Module" in line[0])


def parse_gpu_list(text: str) -> list[str]:
    """Return the names in ``nvidia-smi -L``."""
    return re.findall(r"^GPU \d+: (.+?)(?: \(UUID: .*)?$", text, re.MULTILINE)


def parse_topology(text: str) -> Topology:
    """Return the matrix of ``nvidia-smi topo -m`` (or ``-mp``).

    Variants: cells split by tabs or blanks, escape sequences around the header, NICs as ``NIC0`` with a legend at the
    end or by RDMA name, with or without the last column ``GPU NUMA ID``.

    Raises:
        ParseError: no header row that names GPU0.
    """
    lines = _ANSI.sub("", text).splitlines()
    header = next((number for number, line in enumerate(lines) if re.match(r"\s*GPU0\b", line)), None)
    if header is None:
        raise ParseError(f"no header row with GPU0 in {text.strip()[:60]!r}")
    columns = re.split(r"\bCPU Affinity\b", lines[header])[0].split()
    legend = dict(re.findall(r"^\s+(NIC\d+):\s*(\S+)", "\n".join(lines), re.MULTILINE))
    relations = {}
    for line in lines[header + 1 :]:
        row, *cells = line.split() or [""]
        if not re.match(r"GPU\d+$|NIC\d+$|\w+$", row) or not cells or not _CELL.fullmatch(cells[0]):
            continue
        for column, cell in zip(columns, cells, strict=False):
            if _CELL.fullmatch(cell):
                relations[legend.get(row, row), legend.get(column, column)] = cell
    return Topology(relations)
