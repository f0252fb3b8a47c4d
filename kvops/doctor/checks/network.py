"""Network placement: security groups, subnet, interfaces. Reads what ``aws ec2 describe-*`` answered."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kvops.doctor import conditions, manifest
from kvops.doctor.check import failed, in_group, passed, skipped, unknown, warned
from kvops.doctor.facts import UnavailableError
from kvops.doctor.parsers.cloud import dig, rows

if TYPE_CHECKING:
    from kvops.doctor.check import Finding
    from kvops.doctor.facts import Facts

check = in_group("network")

EFA_TYPES = ("efa", "efa-only")
MAC = r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}|<mac-\d+>"


def _instances(facts: Facts) -> list[dict[str, Any]]:
    """Return the instances of both sides as AWS describes them."""
    sides = [facts, facts.peer] if facts.peer else [facts]
    found = [
        instance
        for side in sides
        for reservation in rows(side.aws("describe-instances"), "Reservations")
        for instance in rows(reservation, "Instances")
    ]
    if not found:
        raise UnavailableError("aws describe-instances: it names no instance")
    return found


def _interfaces(facts: Facts) -> list[dict[str, Any]]:
    """Return the network interfaces, from their own call or as part of the instances."""
    try:
        return rows(facts.aws("describe-network-interfaces"), "NetworkInterfaces")
    except UnavailableError:
        return [interface for instance in _instances(facts) for interface in rows(instance, "NetworkInterfaces")]


def _efa_interfaces(facts: Facts) -> list[dict[str, Any]]:
    return [interface for interface in _interfaces(facts) if interface.get("InterfaceType") in EFA_TYPES]


def _group_ids(holder: dict[str, Any]) -> frozenset[str]:
    return frozenset(str(group.get("GroupId")) for group in rows(holder, "Groups"))


def _refers_to_itself(facts: Facts, direction: str) -> Finding:
    """Return whether a security group lets all traffic through to and from its own members."""
    groups = rows(facts.aws("describe-security-groups"), "SecurityGroups")
    ids = {str(group.get("GroupId")) for group in groups}
    if not groups:
        return unknown("aws describe-security-groups names no group")
    for group in groups:
        for permission in rows(group, direction):
            peers = {str(pair.get("GroupId")) for pair in rows(permission, "UserIdGroupPairs")}
            if str(permission.get("IpProtocol")) == "-1" and peers & ids:
                return passed("the security group lets all traffic of its own members through", min(peers & ids))
    rules = sum(len(rows(group, direction)) for group in groups)
    side = "inbound" if direction == "IpPermissions" else "outbound"
    return failed(
        f"no security group has an {side} rule for all traffic with itself",
        f"{min(ids)}: {rules} {side} rules, none with IpProtocol -1 and the group itself",
    )


@check(
    "NW-01",
    "The security group admits all traffic from itself",
    evidence="aws ec2 describe-security-groups: IpPermissions with IpProtocol -1 and the group's own id",
    rule="FAIL if there is no such rule; rules for TCP or for addresses do not match EFA",
    fix="Add an inbound rule to the group: all traffic, source the group itself",
    sources=("EC2-CREATE", "NIXL-AWSEFA"),
    applies=(conditions.efa,),
    quick=True,
)
def inbound(facts: Facts) -> Finding:
    """EFA is not IP: only a rule for all traffic that names the group lets it in."""
    return _refers_to_itself(facts, "IpPermissions")


@check(
    "NW-02",
    "The security group lets all traffic out to itself",
    evidence="aws ec2 describe-security-groups: IpPermissionsEgress with IpProtocol -1 and the group's own id",
    rule="FAIL if there is no such rule; 0.0.0.0/0 does not match EFA",
    fix="Add an outbound rule to the group: all traffic, destination the group itself",
    sources=("EC2-CREATE", "NIXL-AWSEFA"),
    applies=(conditions.efa,),
    quick=True,
)
def outbound(facts: Facts) -> Finding:
    """The default rule to 0.0.0.0/0 is about addresses, and EFA has none."""
    return _refers_to_itself(facts, "IpPermissionsEgress")


@check(
    "NW-03",
    "Prefill and decode are in one zone and subnet",
    evidence="aws ec2 describe-instances: Placement.AvailabilityZone, SubnetId",
    rule="FAIL if they differ",
    fix="Relaunch one of them in the other's subnet",
    sources=("EC2-CREATE", "PCLUSTER-EFA", "LF-HELP"),
    applies=(conditions.efa, conditions.two_hosts),
)
def subnet(facts: Facts) -> Finding:
    """EFA's packets do not leave a subnet."""
    places = {(str(dig(i, "Placement", "AvailabilityZone")), str(i.get("SubnetId"))) for i in _instances(facts)}
    if len(places) > 1:
        return failed("prefill and decode are in different zones or subnets", ", ".join(map("/".join, sorted(places))))
    return passed("one zone and subnet", "/".join(min(places)))


@check(
    "NW-04",
    "Every network card has an EFA interface",
    evidence="aws ec2 describe-network-interfaces: InterfaceType",
    rule="FAIL if no interface is efa or efa-only, or the primary one is efa-only",
    fix="Relaunch with InterfaceType=efa-only on each card beside the primary interface",
    sources=("EC2-ACC",),
    applies=(conditions.efa,),
    explained_by=("EFA-01",),
)
def interface_types(facts: Facts) -> Finding:
    """An ordinary interface on a card is an ENA: it has no EFA."""
    interfaces = _interfaces(facts)
    if not interfaces:
        return unknown("AWS names no network interface")
    efas = [interface for interface in interfaces if interface.get("InterfaceType") in EFA_TYPES]
    if not efas:
        return failed(f"none of {len(interfaces)} network interfaces is an EFA", "InterfaceType: interface")
    primary = [i for i in efas if _is_primary(i) and i.get("InterfaceType") == "efa-only"]
    if primary:
        return failed("the primary interface is efa-only, which carries no IP", "InterfaceType: efa-only on card 0")
    return passed(f"{len(efas)} EFA interfaces")


def _is_primary(interface: dict[str, Any]) -> bool:
    attachment = interface.get("Attachment")
    return dig(attachment, "DeviceIndex") == 0 and dig(attachment, "NetworkCardIndex") in (0, None)


@check(
    "NW-05",
    "All EFA interfaces carry one set of security groups",
    evidence="aws ec2 describe-network-interfaces: Groups",
    rule="FAIL if they differ",
    fix="Give every EFA interface the same security group",
    sources=("EC2-CREATE",),
    applies=(conditions.efa,),
)
def same_groups(facts: Facts) -> Finding:
    """The rails of an interface with another group hang while the rest works."""
    efas = _efa_interfaces(facts)
    sets = {_group_ids(interface) for interface in efas}
    if not efas:
        return unknown("AWS names no EFA interface")
    if len(sets) > 1:
        return failed("EFA interfaces carry different security groups", " / ".join(sorted(map(_joined, sets)))[:160])
    return passed(f"{len(efas)} EFA interfaces carry {_joined(next(iter(sets)))}")


def _joined(ids: frozenset[str]) -> str:
    return ", ".join(sorted(ids))


@check(
    "NW-06",
    "The instances are in a cluster placement group",
    evidence="aws ec2 describe-instances: Placement.GroupName",
    rule="WARN if none is set, or they differ",
    fix="Launch into a placement group of strategy cluster, or a capacity block",
    sources=("PCS-PG", "EC2-BW"),
    applies=(conditions.efa,),
)
def placement(facts: Facts) -> Finding:
    """Latency is lower inside one, and a single TCP flow reaches 10 instead of 5 Gbit/s."""
    names = {str(dig(instance, "Placement", "GroupName") or "") for instance in _instances(facts)}
    if names == {""}:
        return warned("no placement group", "Placement.GroupName is not set")
    if len(names) > 1:
        return warned("the instances are in different placement groups", ", ".join(sorted(names)))
    return passed(f"placement group {min(names)}")


@check(
    "NW-07",
    "The side channel of prefill accepts connections",
    evidence="nc -z <side-channel host> <port>",
    rule="FAIL if it refuses or does not answer",
    fix="Open TCP from the base port to base + DP - 1 in the security group; see VL-01",
    sources=("VLLM-NIXL",),
    applies=(conditions.nixl_engine,),
    explained_by=("VL-01", "VL-02"),
)
def side_channel(facts: Facts) -> Finding:
    """Decode asks there for prefill's NIXL metadata before its first read."""
    if facts.planned:
        return skipped("the engines are not started yet")
    asking = facts.peer or facts
    for engine in facts.kv_engines:
        command = manifest.reachable_command(engine.side_channel_host, engine.side_channel_port)
        answer = asking.output(command)
        if answer.exit and re.search(r"(?i)usage|invalid option|unrecognized option", answer.stderr):
            return unknown("this nc does not know -z", answer.stderr.strip()[:120])
        if answer.exit and not facts.loaded_plugins:
            return unknown(f"{engine.name} has loaded no NIXL backend yet, as while it starts")
        if answer.exit:
            return failed(f"{engine.name}: {' '.join(command[-2:])} does not accept connections", answer.stderr[:120])
    return passed("the side channels accept connections")


@check(
    "NW-08",
    "The flow logs accept EFA's traffic",
    evidence="aws logs filter-log-events: rows whose addresses are MAC addresses",
    rule="FAIL on REJECT",
    fix="Mend the security groups: NW-01, NW-02",
    sources=("EC2-MON",),
    applies=(conditions.efa,),
    explained_by=("NW-01", "NW-02"),
)
def flow_logs(facts: Facts) -> Finding:
    """EFA's flows are the rows that have MAC addresses where others have IP addresses."""
    messages = [str(event.get("message", "")) for event in rows(facts.aws("filter-log-events"), "events")]
    own = [message for message in messages if re.search(MAC, message)]
    rejected = [message for message in own if "REJECT" in message]
    if rejected:
        return failed(f"{len(rejected)} of {len(own)} EFA flows were rejected", rejected[0][:160])
    return passed(f"{len(own)} EFA flows accepted") if own else unknown("the flow logs have no EFA flow")


@check(
    "NW-09",
    "Prefill and decode are of one instance type and EFA generation",
    evidence="product_name and PCI ids of both",
    rule="WARN if they differ",
    fix="Use one instance type for both",
    sources=("LF-HELP", "NIXL-LF"),
    applies=(conditions.efa, conditions.two_hosts),
)
def same_type(facts: Facts) -> Finding:
    """The side with fewer rails sets the speed, and features of the generations differ."""
    assert facts.peer is not None  # noqa: S101 - the condition two_hosts
    types = [facts.instance_type, facts.peer.instance_type]
    generations = [sorted({device.device for device in side.efa_pci}) for side in (facts, facts.peer)]
    if types[0] != types[1] or generations[0] != generations[1]:
        shown = " and ".join(f"{t} ({', '.join(g)})" for t, g in zip(types, generations, strict=True))
        return warned("prefill and decode are different machines", shown)
    return passed(f"both are {types[0]}")


@check(
    "NW-10",
    "As many EFAs are attached as AWS allows for the type",
    evidence="aws ec2 describe-instance-types: NetworkInfo.EfaInfo.MaximumEfaInterfaces",
    rule="WARN if fewer are attached",
    fix="Relaunch with one EFA interface per network card",
    sources=("EC2-API",),
    applies=(conditions.efa,),
    explained_by=("EFA-01",),
)
def maximum(facts: Facts) -> Finding:
    """What AWS says beats kvops' own table."""
    answer = facts.aws("describe-instance-types")
    allowed = dig(answer, "InstanceTypes", 0, "NetworkInfo", "EfaInfo", "MaximumEfaInterfaces")
    if not isinstance(allowed, int):
        return unknown("AWS names no MaximumEfaInterfaces")
    attached = len(facts.efa_pci)
    if attached < allowed:
        return warned(f"{attached} EFAs are attached, the type takes {allowed}", f"MaximumEfaInterfaces: {allowed}")
    return passed(f"{attached} EFAs are attached", f"MaximumEfaInterfaces: {allowed}")


CHECKS = (
    inbound,
    outbound,
    subnet,
    interface_types,
    same_groups,
    placement,
    side_channel,
    flow_logs,
    same_type,
    maximum,
)
