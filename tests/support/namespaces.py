"""A cluster of network namespaces: hosts with addresses of their own on one bridge."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence


def ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


class Cluster:
    """Hosts named ``<prefix>0`` and on, at 10.213.<net>.1 and on, and how to reach them."""

    def __init__(self, hosts: int, net: int) -> None:
        self.bridge = f"kvb{os.getpid() % 100000}-{net}"
        self.names = [f"kvops{os.getpid()}-{net}-{index}" for index in range(hosts)]
        self.addresses = [f"10.213.{net}.{index + 1}" for index in range(hosts)]
        # The switch lives in a namespace too: the machine's own network stays as it is.
        self.switch = f"kvops{os.getpid()}-{net}-switch"

    def build(self) -> None:
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", self.bridge, "type", "bridge")
        ip("-n", self.switch, "link", "set", self.bridge, "up")
        for index, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{index}", "netns", self.switch)
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", self.switch, "link", "set", f"p{index}", "master", self.bridge)
            ip("-n", self.switch, "link", "set", f"p{index}", "up")

    def remove(self) -> None:
        for name in (*self.names, self.switch):
            ip("netns", "delete", name, check=False)

    def on(self, host: int, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[host], *argv]

    def cut_between(self, one: int, other: int) -> None:
        """Let frames between two hosts go nowhere, silently; both still reach all others."""
        for here, there in ((one, other), (other, one)):
            nobody = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
            ip("-n", self.names[here], "neigh", "replace", self.addresses[there], *nobody)

    def mend_between(self, one: int, other: int) -> None:
        for here, there in ((one, other), (other, one)):
            ip("-n", self.names[here], "neigh", "del", self.addresses[there], "dev", "eth0")

    def received_bytes(self, host: int) -> int:
        """Return what came in over the host's link."""
        return int(run_on(self, host, ["cat", "/sys/class/net/eth0/statistics/rx_bytes"]).stdout)

    def pids(self, host: int) -> list[str]:
        return subprocess.run(
            ["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=True
        ).stdout.split()


@contextlib.contextmanager
def cluster(hosts: int, net: int) -> Iterator[Cluster]:
    made = Cluster(hosts, net)
    try:
        made.build()
        yield made
    finally:
        made.remove()


def run_on(made: Cluster, host: int, argv: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        made.on(host, *argv), capture_output=True, text=True, check=False, timeout=60, **options  # type: ignore[call-overload]
    )  # fmt: skip
