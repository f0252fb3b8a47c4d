"""``neuron-ls``: the JSON form and the two table forms (AWS Neuron SDK, neuron-ls page)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from kvops.doctor.parsers import ParseError, whole_number


@dataclass(frozen=True, slots=True)
class NeuronDevice:
    """One Neuron device, what it is connected to, and the processes that own its cores."""

    index: int
    address: str
    cores: int
    connected_to: tuple[int, ...]
    logical_core_size: int | None = None
    processes: tuple[tuple[int, str], ...] = ()


def parse_json(text: str) -> list[NeuronDevice]:
    """Return the devices of ``neuron-ls -j``.

    Raises:
        ParseError: the text is not a JSON array of devices.
    """
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"neuron-ls -j printed no JSON: {text.strip()[:60]!r}") from error
    if not isinstance(entries, list):
        raise ParseError("neuron-ls -j printed no array")
    return [_device(entry) for entry in entries if isinstance(entry, dict)]


def _device(entry: dict[str, Any]) -> NeuronDevice:
    connected = entry.get("connected_to")
    processes = entry.get("neuron_processes")
    core_size = entry.get("logical_neuroncore_config")
    return NeuronDevice(
        index=_integer(entry.get("neuron_device")),
        address=str(entry.get("bdf", "")),
        cores=_integer(entry.get("nc_count")),
        connected_to=tuple(map(_integer, connected)) if isinstance(connected, list) else (),
        logical_core_size=None if core_size is None else _integer(core_size),
        processes=tuple(
            (_integer(process.get("pid")), str(process.get("command", "")))
            for process in (processes if isinstance(processes, list) else [])
            if isinstance(process, dict)
        ),
    )


def _integer(value: object) -> int:
    return value if isinstance(value, int) else -1


def parse_table(text: str) -> list[NeuronDevice]:
    """Return the devices of plain ``neuron-ls``, whose columns differ between releases.

    Raises:
        ParseError: there is text, but no device row.
    """
    config = re.search(r"^logical-neuroncore-config:\s*(\d{1,3})", text, re.MULTILINE)
    devices = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        bdf = next((cell for cell in cells if re.fullmatch(r"(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.\d", cell)), "")
        index = whole_number(cells[0])
        if not bdf or index is None or len(cells) < 4:
            continue
        before_bdf = cells[cells.index(bdf) - 1]
        numbers = (whole_number(word.strip()) for word in before_bdf.split(","))
        connected = tuple(number for number in numbers if number is not None)
        cores = whole_number(cells[1])
        size = int(config[1]) if config else None
        devices.append(NeuronDevice(index, bdf, -1 if cores is None else cores, connected, size))
    if text.strip() and not devices:
        raise ParseError(f"no device row in {text.strip()[:60]!r}")
    return devices
