"""``kvops probe``: move real bytes between two NIXL agents and say how they went."""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING

import click

from kvops.cli.options import json_option
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from kvops.cli.probe_view import ProbeView
    from kvops.doctor.probe.report import Report
    from kvops.doctor.probe.run import Settings

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_LOOPBACK = "127.0.0.1"


def parse_size(text: str) -> int:
    """Return the number of bytes of a size with an optional unit: 268435456, 256MiB, 1g."""
    found = re.fullmatch(r"(\d{1,12})\s*([kmg]?)(?:i?b)?", text.strip().lower(), re.ASCII)
    if not found or not int(found[1]):
        raise click.BadParameter(f"{text!r} is no size; write it like 256MiB or 1GiB")
    return int(found[1]) * _UNITS[found[2]]


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; the loopback address where only a port is given."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"\d{1,5}", port, re.ASCII) or int(port) > 65535:
        raise click.BadParameter(f"{text!r} is no HOST:PORT")
    return host.strip("[]") or _LOOPBACK, int(port)


def parse_devices(text: str) -> tuple[int, ...]:
    """Return one or two device indices: this side's, and the peer's if it runs here too."""
    if not re.fullmatch(r"\d{1,3}(,\d{1,3})?", text, re.ASCII):
        raise click.BadParameter(f"{text!r} is no device list; write it like 0 or 0,1")
    return tuple(int(part) for part in text.split(","))


@click.command()
@click.option(
    "--listen", type=parse_address, metavar="[HOST:]PORT", help="Wait here for one probe from another host, then end."
)
@click.option(
    "--connect", type=parse_address, metavar="HOST:PORT", help="Probe against a host that waits with --listen."
)
@click.option("--backend", default="UCX", show_default=True, metavar="NAME", help="NIXL's: UCX, LIBFABRIC.")
@click.option("--memory", type=click.Choice(["dram", "vram"]), default="dram", show_default=True, help="What to move.")
@click.option(
    "--devices", type=parse_devices, metavar="N[,M]", help="Accelerators for vram; different ones if left out."
)
@click.option(
    "--bytes",
    "size_bytes",
    type=parse_size,
    metavar="SIZE",
    default="256MiB",
    show_default=True,
    help="Moved each time; with --listen the most that a peer may ask for.",
)
@click.option("--repeat", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Timed transfers each.")
@click.option(
    "--timeout", type=click.FloatRange(1, 86_400), default=120.0, show_default=True, help="Seconds until it gives up."
)
@json_option
def command(
    *,
    listen: tuple[str, int] | None,
    connect: tuple[str, int] | None,
    backend: str,
    memory: str,
    devices: tuple[int, ...] | None,
    size_bytes: int,
    repeat: int,
    timeout: float,
    as_json: bool,
) -> None:
    """Move real bytes between two NIXL agents, check every one of them, and say how fast and over what they went.

    Reads and writes blocks as vLLM lays them out, between two processes of this host, or between two hosts
    with --listen and --connect. Exit status 0 if it is well, 1 if bytes were wrong, too slow or on TCP where
    RDMA should be, 2 if the probe could not be done.

    \b
    Example:
      kvops probe
      kvops probe --memory vram --devices 0,1
      kvops probe --listen 10.0.0.1:7777            on one host
      kvops probe --connect 10.0.0.1:7777           on the other
    """
    if listen and connect:
        raise KvopsError("--listen and --connect exclude each other", "give one of them on each host")
    from kvops.cli.probe_view import ProbeView, print_report  # noqa: PLC0415
    from kvops.doctor.probe.run import Settings  # noqa: PLC0415

    settings = Settings(
        backend=backend.upper(),
        memory="vram" if memory == "vram" else "dram",
        size_bytes=_whole_units(size_bytes),
        repeat=repeat,
        devices=devices or (),
        timeout_seconds=timeout,
    )
    with ProbeView() as view:
        report = _probe(settings, listen, connect, view)
    if as_json:
        import msgspec  # noqa: PLC0415

        click.echo(msgspec.json.encode(report).decode())
    else:
        print_report(report)
    if report.verdict.state == "FAIL":
        raise SystemExit(1)


def _probe(
    settings: Settings, listen: tuple[str, int] | None, connect: tuple[str, int] | None, view: ProbeView
) -> Report:
    from kvops.doctor.probe import run  # noqa: PLC0415

    if connect:
        return run.probe_connect(settings, *connect, view)
    if not listen:
        return run.probe_pair(settings, view)
    listener = run.open_listener(*listen)
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - asked for by the user
        host = socket.gethostname()
    click.echo(f"waiting for: kvops probe --connect {host}:{port}", err=True)
    return run.probe_listen(settings, listener, view)


def _whole_units(size_bytes: int) -> int:
    """Return the size rounded up to what all patterns can cover.

    Raises:
        KvopsError: it is more than a probe moves at once.
    """
    from kvops.doctor.probe.messages import MAX_BYTES  # noqa: PLC0415
    from kvops.doctor.probe.shape import UNIT_BYTES  # noqa: PLC0415

    units = -(-size_bytes // UNIT_BYTES)
    if units * UNIT_BYTES > MAX_BYTES:
        raise KvopsError(f"--bytes {size_bytes} is more than the {MAX_BYTES // 2**30} GiB that a probe moves at once")
    return units * UNIT_BYTES
