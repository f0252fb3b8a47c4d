"""``ibv_devinfo`` and ``rdma statistic show``.

Formats: rdma-core, iproute2, and "Monitor an Elastic Fabric Adapter" of the EC2 user guide.
"""

from __future__ import annotations

import json
import re

from kvops.doctor.parsers import ParseError

_DEVICE = re.compile(r"^hca_id:\s*(\S+)")
_FIELD = re.compile(r"^\s+([a-z_]+):\s*(\S.*?)\s*$")
_LINK = re.compile(r"^link\s+(\S+?)/(\d+)\b(.*)$")


def parse_ibv_devinfo(text: str) -> dict[str, dict[str, str]]:
    """Return the fields of each device by its name; those of a port overwrite nothing, the first value stays.

    Raises:
        ParseError: there is text, but no ``hca_id:`` line and not the "No IB devices found" message.
    """
    devices: dict[str, dict[str, str]] = {}
    fields: dict[str, str] = {}
    for line in text.splitlines():
        if device := _DEVICE.match(line):
            fields = devices.setdefault(device[1], {})
        elif devices and (field := _FIELD.match(line)):
            fields.setdefault(field[1], field[2])
    if text.strip() and not devices and "No IB devices" not in text:
        raise ParseError(f"no 'hca_id:' line in {text.strip()[:60]!r}")
    return devices


def parse_statistics(text: str) -> dict[str, dict[str, int]]:
    """Return the counters of each device from ``rdma statistic show`` (pretty, one line a link, or JSON).

    Raises:
        ParseError: the text is none of the three.
    """
    if text.lstrip().startswith("["):
        return _statistics_from_json(text)
    counters: dict[str, dict[str, int]] = {}
    current: dict[str, int] = {}
    for line in text.splitlines():
        link = _LINK.match(line)
        if link:
            current = counters.setdefault(link[1], {})
        pairs = re.findall(r"\b([a-z_]+)\s+(\d{1,20})\b", link[3] if link else line)
        current.update((name, int(value)) for name, value in pairs)
    if text.strip() and not counters:
        raise ParseError(f"no 'link' line in {text.strip()[:60]!r}")
    return counters


def _statistics_from_json(text: str) -> dict[str, dict[str, int]]:
    try:
        links = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"rdma printed broken JSON: {error}") from error
    counters: dict[str, dict[str, int]] = {}
    for link in links:
        if isinstance(link, dict) and isinstance(link.get("ifname"), str):
            values = {name: value for name, value in link.items() if type(value) is int and name != "port"}
            counters.setdefault(link["ifname"], {}).update(values)
    return counters
