"""What must be noticed about the placement in the network."""

from __future__ import annotations

from doctor_cases import FAIL, PASS, UNKNOWN, WARN, Case, Scene, edit_objects, pair
from doctor_hosts import p5

GROUPS = "describe-security-groups"
INTERFACES = "describe-network-interfaces"


def edit(kind: str, *changes: str):
    return lambda scene: edit_objects(scene.host, kind, *changes)


def move_decode(scene: Scene) -> None:
    edit_objects(scene.peer, "describe-instances", "us-east-2b", "us-east-2a")


def give_one_interface_another_group(scene: Scene) -> None:
    argv = next(argv for argv in scene.host.commands if INTERFACES in argv)
    stdout, stderr, status = scene.host.commands[argv]
    scene.host.commands[argv] = (stdout.replace("sg-0a1b2c3d4e5f60718", "sg-default", 1), stderr, status)


def mismatched() -> Scene:
    scene = pair()
    scene.peer = p5()
    return scene


CASES = (
    Case("NW-01", FAIL, "inbound", edit(GROUPS, '"IpProtocol": "-1"', '"IpProtocol": "tcp"')),
    Case("NW-02", FAIL, "outbound", edit(GROUPS, '"IpPermissionsEgress": [{', '"Other": [{')),
    Case("NW-03", FAIL, "us-east-2a", move_decode),
    Case("NW-04", FAIL, "none of 16", edit(INTERFACES, "efa-only", "interface", '"efa"', '"interface"')),
    Case("NW-04", FAIL, "carries no IP", edit(INTERFACES, '"efa"', '"efa-only"')),
    Case("NW-05", FAIL, "sg-default", give_one_interface_another_group),
    Case("NW-06", WARN, "no placement group", edit("describe-instances", "pd-cluster", "")),
    Case("NW-07", FAIL, "10.0.1.17 5600", lambda s: s.host.command("nc -z -w 2 10.0.1.17 5600", status=1)),
    Case("NW-08", FAIL, "1 of 1", edit("filter-log-events", "ACCEPT", "REJECT")),
    Case(
        "NW-08",
        UNKNOWN,
        "no EFA flow",
        edit("filter-log-events", "0e:49:61:0f:7d:11", "10.0.0.1", "0e:92:af:43:7d:22", "10.0.0.2"),
    ),
    Case("NW-09", WARN, "p5.48xlarge (efa1)", lambda s: None, mismatched),
    Case("NW-10", WARN, "the type takes 32", edit("describe-instance-types", ": 16", ": 32")),
    Case("NW-03", PASS, "us-east-2b/subnet-0aa11bb22", lambda s: None),
)

GONE = {
    **{f"NW-{number:02}": ("aws",) for number in range(1, 11)},
    "NW-07": ("nc",),
    "NW-09": ("/sys/devices/virtual/dmi", "/sys/bus/pci"),
}
