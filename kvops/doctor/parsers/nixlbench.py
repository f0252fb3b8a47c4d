"""The table that nixlbench prints: one row a block size."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvops.doctor.parsers import ParseError


class Measured(NamedTuple):
    """The fastest row: GB/s (decimal) of one pair, and nixlbench's own percentage where it prints one."""

    gb_per_second: float
    network_util_percent: float | None


def parse_nixlbench(text: str) -> Measured:
    """Return the fastest row of a run.

    Raises:
        ParseError: no header with a bandwidth, or no row below it.
    """
    header, _, table = text.partition("B/W (GB/Sec)")
    if not table:
        raise ParseError("no column 'B/W (GB/Sec)'")
    # More than two ranks: two more columns, right after the bandwidth of a pair.
    has_percentage = "Network Util" in table.partition("\n")[0]
    row = r"^\s*\d{1,15}\s+\d{1,9}\s+(\d{1,9}\.\d{1,9})" + (
        r"\s+\d{1,9}\.\d{1,9}\s+(\d{1,9}\.\d{1,9})" * has_percentage
    )
    found = [match.groups() for match in re.finditer(row, table, re.MULTILINE)]
    if not found:
        raise ParseError(f"no row of numbers under {header.strip()[-40:]!r}")
    best = max(found, key=lambda groups: float(groups[0]))
    return Measured(float(best[0]), float(best[1]) if has_percentage else None)
