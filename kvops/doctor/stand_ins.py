"""What slim images lack: ``nc -z`` and ``curl`` of a loopback address, answered as those programs answer."""

from __future__ import annotations

import http.client
import re
import socket
from typing import TYPE_CHECKING

from kvops.doctor import manifest
from kvops.doctor.host import MAX_FILE_BYTES, Output

if TYPE_CHECKING:
    from kvops.doctor.host import Argv

SECONDS = 3.0
REFUSED, UNREACHABLE = 1, 7


def answer(argv: Argv) -> Output | None:
    """Return what the program would have printed; None for a command that nothing stands in for."""
    if argv[:-2] == manifest.reachable_command("", 0)[:-2] and argv[-1].isdecimal():
        return _connect(argv[-2], int(argv[-1]))
    page = re.fullmatch(r"http://127\.0\.0\.1:(\d{1,5})(/\S*)", argv[-1])
    if page and argv[:-1] == manifest.metrics_command("")[:-1]:
        return _fetch(int(page[1]), page[2])
    return None


def _connect(host: str, port: int) -> Output:
    try:
        with socket.create_connection((host, port), timeout=SECONDS):
            return Output(0, "", "")
    except (OSError, OverflowError, UnicodeError) as error:
        return Output(REFUSED, "", f"connect to {host} port {port} failed: {error}")


def _fetch(port: int, path: str) -> Output:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("GET", path)
        return Output(0, connection.getresponse().read(MAX_FILE_BYTES).decode("utf-8", "replace"), "")
    except (OSError, OverflowError, http.client.HTTPException) as error:
        return Output(UNREACHABLE, "", f"Failed to connect to 127.0.0.1 port {port}: {error}")
    finally:
        connection.close()
