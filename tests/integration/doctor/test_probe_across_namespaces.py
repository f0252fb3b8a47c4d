"""The probe between two network namespaces: two hosts as far as the network goes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

PROBE = (sys.executable, "-m", "kvops.cli.main", "probe", "--bytes", "8MiB", "--repeat", "2", "--json")
PATIENCE_SECONDS = 240.0
P_ADDRESS, D_ADDRESS = "10.213.77.1", "10.213.77.2"

pytestmark = [pytest.mark.system("ip"), pytest.mark.timeout(2 * PATIENCE_SECONDS)]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """The names of two namespaces that see each other over one veth pair."""
    assert shutil.which("ip"), "this test needs iproute2"
    p, d = f"kvops-p-{os.getpid()}", f"kvops-d-{os.getpid()}"
    try:
        for name in (p, d):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", p, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", d)
        for name, address in ((p, P_ADDRESS), (d, D_ADDRESS)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield p, d
    finally:
        for name in (p, d):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def on(namespace: str, *arguments: str) -> subprocess.Popen[str]:
    # The two share a kernel, so UCX would go through its memory; between two hosts it has the network alone.
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, *PROBE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"UCX_TLS": "tcp"},
    )


def test_bytes_cross_from_one_host_to_the_other_over_tcp(two_hosts: tuple[str, str]) -> None:
    p, d = two_hosts
    address = f"{P_ADDRESS}:7777"
    listening = on(p, "--listen", address)
    assert listening.stderr is not None
    assert listening.stderr.readline().strip() == f"waiting for: kvops probe --connect {address}"
    connecting = on(d, "--connect", address)
    seen_by_d = json.loads(connecting.communicate(timeout=PATIENCE_SECONDS)[0])
    seen_by_p = json.loads(listening.communicate(timeout=PATIENCE_SECONDS)[0])

    assert (connecting.returncode, listening.returncode) == (0, 0)
    assert len(seen_by_d["runs"]) == 6
    assert all(run["wrong_bytes"] == 0 for run in seen_by_d["runs"])
    for seen in (seen_by_d, seen_by_p):
        assert seen["evidence"]["route"] == "tcp"
        assert seen["evidence"]["counters"]["net/eth0/rx_bytes"] > seen["moved_bytes"] / 3
        assert {"transport": "tcp", "device": "eth0"} in seen["evidence"]["rails"]


def test_the_default_address_is_not_reachable_from_the_other_host(two_hosts: tuple[str, str]) -> None:
    p, d = two_hosts
    listening = on(p, "--listen", "7777")
    assert listening.stderr is not None
    assert listening.stderr.readline().strip() == "waiting for: kvops probe --connect 127.0.0.1:7777"
    connecting = on(d, "--connect", f"{P_ADDRESS}:7777")
    _, error = connecting.communicate(timeout=PATIENCE_SECONDS)
    listening.kill()
    listening.communicate()
    assert connecting.returncode == 2
    assert error.startswith(f"Error: no probe answers at {P_ADDRESS}:7777: Connection refused; ")
