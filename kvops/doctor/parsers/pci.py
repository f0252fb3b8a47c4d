"""``lspci``: devices by number, and access control of bridges. Names depend on the age of pci.ids, numbers do not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvops.doctor.parsers import ParseError

_BDF = r"((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])"
_NAMED = re.compile(rf"^{_BDF}\s.*?\[([0-9a-f]{{4}})\]:.*\[([0-9a-f]{{4}}):([0-9a-f]{{4}})\]")
_NUMERIC = re.compile(rf"^{_BDF}\s+([0-9a-f]{{4}}):\s+([0-9a-f]{{4}}):([0-9a-f]{{4}})\b")
_PLAIN = re.compile(rf"^{_BDF}\s+\S")
_ACS = re.compile(r"^\s+ACSCtl:\s*(.*)$")


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A function on the PCI bus; ids and class are four lower-case hex digits, the address has its domain."""

    address: str
    vendor: str
    device: str
    pci_class: str


def full_address(address: str) -> str:
    """Return a PCI address in lower case with a four-digit domain: ``59:00.0`` gives ``0000:59:00.0``.

    Raises:
        ParseError: it is not a PCI address.
    """
    parts = re.fullmatch(r"(?:([0-9a-f]+):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", address.strip().lower())
    if parts is None:
        raise ParseError(f"{address!r} is not a PCI address")
    return f"{int(parts[1] or '0', 16):04x}:{parts[2]}"


def parse_lspci(text: str) -> list[PciDevice]:
    """Return the devices of ``lspci -nn`` or ``lspci -n``, with or without ``-D``.

    Raises:
        ParseError: there are devices, but printed without their numbers.
    """
    devices = []
    plain = False
    for line in text.splitlines():
        found = _NAMED.match(line) or _NUMERIC.match(line)
        if found:
            devices.append(PciDevice(full_address(found[1]), found[3], found[4], found[2]))
        plain = plain or bool(_PLAIN.match(line))
    if text.strip() and not devices:
        raise ParseError("lspci without -nn prints no ids" if plain else f"no device in {text.strip()[:60]!r}")
    return devices


def parse_redirecting_bridges(text: str) -> list[str]:
    """Return the addresses in ``lspci -vvv`` whose ACS control redirects requests or completions."""
    address = ""
    redirecting = []
    for line in text.splitlines():
        if start := re.match(rf"^{_BDF}\s", line):
            address = full_address(start[1])
        elif address and (control := _ACS.match(line)) and re.search(r"\b(?:Req|Cmplt)Redir\+", control[1]):
            redirecting.append(address)
    return redirecting


def shows_acs(text: str) -> bool:
    """Tell whether ``lspci -vvv`` was allowed to read the extended capabilities (only root is)."""
    return "Capabilities:" in text and "<access denied>" not in text
