"""``fi_info`` of libfabric: the short form, ``--version``, and ``-e``.

Formats: libfabric ``util/info.c``. Entries have no separator; only ``provider:`` starts in the first column.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvops.doctor.parsers import ParseError

_FIELD = re.compile(r"^(\s*)(provider|fabric|domain|version|type|protocol):\s*(\S*)\s*$")


@dataclass(frozen=True, slots=True)
class FiEntry:
    """One endpoint that a provider offers."""

    provider: str
    fabric: str = ""
    domain: str = ""
    version: str = ""
    type: str = ""
    protocol: str = ""


def parse_entries(text: str) -> list[FiEntry]:
    """Return the entries of the short form, in order; layered providers (``efa;ofi_rxd``) stay as they are.

    Raises:
        ParseError: there is text, but no ``provider:`` line in it.
    """
    blocks: list[dict[str, str]] = []
    for line in text.splitlines():
        field = _FIELD.match(line)
        if field is None:
            continue
        if field[2] == "provider":
            blocks.append({"provider": field[3]})
        elif blocks:
            blocks[-1].setdefault(field[2], field[3])
    if text.strip() and not blocks:
        raise ParseError(f"no 'provider:' line in {text.strip()[:60]!r}")
    return [FiEntry(**block) for block in blocks]


def parse_version(text: str) -> str:
    """Return the libfabric version, with its AWS suffix, of ``fi_info --version``.

    Raises:
        ParseError: no line ``libfabric: <version>``.
    """
    found = re.search(r"^libfabric:\s*(\d\S*)", text, re.MULTILINE)
    if found is None:
        raise ParseError(f"no 'libfabric:' line in {text.strip()[:60]!r}")
    return found[1]


def parse_variable_names(text: str) -> frozenset[str]:
    """Return the environment variables that ``fi_info -e`` lists as ``# NAME: type`` or ``NAME=value``."""
    return frozenset(re.findall(r"^#?\s*(FI_[A-Z0-9_]+)\s*[:=]", text, re.MULTILINE))
