"""The EFA devices and their kernel driver."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvops.doctor import conditions, manifest
from kvops.doctor.check import State, failed, in_group, passed, skipped, unknown, warned
from kvops.doctor.facts import UnavailableError
from kvops.doctor.host import Gap, Output, Why
from kvops.doctor.parsers import metrics, packages, proc, whole_number
from kvops.doctor.parsers.versions import at_least, dotted, version

if TYPE_CHECKING:
    from kvops.doctor.check import Finding
    from kvops.doctor.facts import Facts

check = in_group("efa")

KNOWN_GENERATIONS = ("efa0", "efa1", "efa2", "efa3")
DRIVER_MINIMUM = {"efa1": (1, 9), "efa2": (2, 1), "efa3": (2, 12)}
# rdma-core releases that changed IBVERBS_PABI_VERSION, the number in a provider's file name.
VERBS_ABIS = (34, 57, 59)
DEVICE_ERRORS = (
    "cmds_err",
    "no_completion_cmds",
    "reg_mr_err",
    "create_qp_err",
    "create_ah_err",
    "alloc_pd_err",
    "mmap_err",
)
PORT_TROUBLE = (
    "rx_drops",
    "retrans_pkts",
    "retrans_timeout_events",
    "unresponsive_remote_events",
    "impaired_remote_conn_events",
    "rdma_read_wr_err",
    "rdma_write_wr_err",
)


@check(
    "EFA-01",
    "As many EFA devices as the instance type takes",
    evidence="/sys/bus/pci/devices/*/{vendor,device}: 0x1d0f and 0xefa?",
    rule="FAIL if none, FAIL if fewer on P and Trn types, WARN if fewer on G types or more than published",
    fix="EFAs attach at launch or while stopped: add InterfaceType=efa or efa-only for each NetworkCardIndex",
    sources=("EC2-CREATE", "EC2-ACC", "A-AWS"),
    applies=(conditions.efa,),
    quick=True,
)
def device_count(facts: Facts) -> Finding:
    """Every missing EFA is a rail less, and on Neuron a device whose memory cannot be registered."""
    found = len(facts.efa_pci)
    if not found:
        return failed("no EFA device on the PCI bus", "no 1d0f:efa? under /sys/bus/pci/devices")
    if facts.profile is None:
        return skipped(f"{found} EFA devices; how many {facts.instance_type or 'this machine'} takes is not known")
    expected = facts.profile.efas
    evidence = f"{found} x 1d0f:{facts.efa_pci[0].device}"
    if found == expected:
        return passed(f"{found} EFA devices", evidence)
    message = f"{found} EFA devices, {facts.profile.name} takes {expected}"
    if found < expected and facts.profile.needs_every_efa:
        return failed(message, evidence)
    return warned(message, evidence)


@check(
    "EFA-02",
    "The EFA generation belongs to the instance type",
    evidence="PCI device id, else ibv_devinfo: vendor_part_id",
    rule="WARN on another generation than published, WARN on an id newer than efa3",
    fix="Update kvops and NIXL: both decide by the PCI id, and NIXL's hardware detection stops at efa3",
    sources=("DRV-RN", "NIXL-HWINFO", "NIXL-TOPO"),
    applies=(conditions.efa,),
    explained_by=("EFA-01",),
)
def generation(facts: Facts) -> Finding:
    """A generation that the software does not know is not counted as EFA by it."""
    found = facts.efa_generations
    if not found:
        return unknown("no EFA device to look at")
    newer = [name for name in found if name not in KNOWN_GENERATIONS]
    if newer:
        return warned(f"EFA generation {newer[0]} is newer than what kvops and NIXL know", f"1d0f:{newer[0]}")
    expected = facts.profile.efa_pci if facts.profile else None
    if expected and found != [expected]:
        return warned(f"EFA generation {found[0]}, expected {expected}", f"1d0f:{found[0]}")
    return passed(f"EFA generation {found[0]}", f"1d0f:{found[0]}")


@check(
    "EFA-03",
    "The efa driver is bound to every device",
    evidence="/sys/bus/pci/devices/<address>/driver",
    rule="FAIL if a device has no driver or another one",
    fix="modprobe efa; look at dkms status; reinstall the EFA driver for this kernel",
    sources=("DRV-MAIN",),
    applies=(conditions.efa,),
    explained_by=("EFA-04", "EFA-19", "EFA-01"),
    quick=True,
)
def driver_bound(facts: Facts) -> Finding:
    """A device without driver exists on the bus and nowhere else."""
    unbound = []
    for device in facts.efa_pci:
        link = facts.host.readlink(f"/sys/bus/pci/devices/{device.address}/driver")
        if isinstance(link, Gap):
            if link.why is not Why.ABSENT:
                return unknown(str(link))
            unbound.append(device.address)
        elif not link.endswith("/efa"):
            unbound.append(device.address)
    if not facts.efa_pci:
        return unknown("no EFA device to look at")
    if unbound:
        return failed(f"{len(unbound)} of {len(facts.efa_pci)} EFA devices have no efa driver", f"first: {unbound[0]}")
    return passed(f"efa is bound to all {len(facts.efa_pci)} devices")


@check(
    "EFA-04",
    "The kernel modules efa, ib_uverbs and ib_core are loaded",
    evidence="/sys/module/{efa,ib_uverbs,ib_core}",
    rule="FAIL if one is missing",
    fix="modprobe ib_uverbs efa, and list them in /etc/modules-load.d/efa.conf",
    sources=("DRV-CONF", "A-DLC"),
    applies=(conditions.efa,),
    explained_by=("EFA-19",),
)
def modules(facts: Facts) -> Finding:
    """Without ib_uverbs there is a driver, but no way for a program to reach it."""
    missing = [name for name in ("ib_core", "ib_uverbs", "efa") if name not in facts.modules]
    if missing:
        return failed(f"kernel modules not loaded: {', '.join(missing)}", "not in /sys/module")
    return passed("efa, ib_uverbs and ib_core are loaded")


@check(
    "EFA-05",
    "The EFA driver is new enough for the device",
    evidence="/sys/module/efa/version",
    rule=(
        "FAIL: efa1 before 1.9, efa2 before 2.1, efa3 before 2.12. WARN: before 2.4 (no RDMA write), before 2.13 "
        "(reports 100 Gb/s for every link). UNKNOWN if the module shows none. With NVIDIA's driver see GDR-05"
    ),
    fix="Install a current EFA installer bundle (driver 3.0.0g or later) and reboot",
    sources=("DRV-RN", "DYN-EFA"),
    applies=(conditions.efa,),
    explained_by=("EFA-04",),
)
def driver_version(facts: Facts) -> Finding:
    """Each generation needs a driver that knows it, and RDMA write came only with 2.4."""
    if facts.efa_driver is None:
        return unknown("the efa module shows no version: an in-tree driver, or not loaded", "/sys/module/efa/version")
    have = version(facts.efa_driver)
    evidence = f"/sys/module/efa/version: {facts.efa_driver}"
    if not have:
        return unknown("the efa module's version cannot be read", evidence)
    for device in sorted({device.device for device in facts.efa_pci}):
        if not at_least(have, DRIVER_MINIMUM.get(device, (0,))):
            return failed(
                f"efa driver {facts.efa_driver} is older than {dotted(DRIVER_MINIMUM[device])}, which {device} needs",
                evidence,
            )
    if not at_least(have, (2, 4)):
        return warned(f"efa driver {facts.efa_driver} has no RDMA write (2.4)", evidence)
    if not at_least(have, (2, 13)):
        return warned(f"efa driver {facts.efa_driver} reports 100 Gb/s for every link (2.13)", evidence)
    return passed(f"efa driver {facts.efa_driver}", evidence)


@check(
    "EFA-06",
    "Every EFA on the bus is an RDMA device",
    evidence="/sys/class/infiniband/*/device/vendor: 0x1d0f",
    rule="FAIL if there are fewer RDMA devices of vendor 0x1d0f than EFA devices on the bus",
    fix="Look for probe errors of efa in dmesg, then reload the driver",
    sources=("A-AWS", "A-NVS"),
    applies=(conditions.efa,),
    explained_by=("EFA-03", "EFA-04", "EFA-01"),
)
def rdma_devices(facts: Facts) -> Finding:
    """Names differ between distributions (rdmap85s0, efa_0) and other vendors' devices stand beside: count vendors."""
    on_bus, found = len(facts.efa_pci), len(facts.efa_rdma)
    names = ", ".join(device.name for device in facts.efa_rdma[:3]) or "none"
    if found < on_bus or not found:
        return failed(f"{found} of {on_bus} EFA devices are RDMA devices", f"/sys/class/infiniband: {names}")
    return passed(f"{found} EFA devices are RDMA devices", f"{names} ...")


@check(
    "EFA-07",
    "Every EFA has a verbs node that can be opened",
    evidence="/sys/class/infiniband_verbs/uverbs*/ibdev and ls -l /dev/infiniband",
    rule=(
        "FAIL if a node is missing, or only root may write it and the engines are not root; WARN if a container was "
        "given some of the nodes, or a group may write them. FAIL for some on Neuron, which needs them all"
    ),
    fix=(
        "In a container: docker --device /dev/infiniband/uverbsN for each; Kubernetes: request vpc.amazonaws.com/efa. "
        "On the host: modprobe ib_uverbs"
    ),
    sources=("aws-do-eks#63", "ray#62339"),
    applies=(conditions.efa,),
    explained_by=("EFA-04", "EFA-06"),
    quick=True,
)
def verbs_nodes(facts: Facts) -> Finding:
    """Containers see all devices in /sys, whether or not they may open one of them."""
    efas = {device.name for device in facts.efa_rdma}
    nodes = {}
    for node in facts.names("/sys/class/infiniband_verbs"):
        if node.startswith("uverbs"):
            nodes[facts.text(f"/sys/class/infiniband_verbs/{node}/ibdev").strip()] = node
    present = facts.names("/dev/infiniband")
    missing = sorted(name for name in efas if nodes.get(name) not in present)
    if not efas:
        return unknown("no EFA among the RDMA devices")
    if missing:
        evidence = f"{missing[0]}: /dev/infiniband/{nodes.get(missing[0], 'uverbs?')} does not exist"
        if len(missing) < len(efas) and facts.in_container and not facts.neuron_pci:
            return warned(f"this container was given {len(efas) - len(missing)} of {len(efas)} EFA devices", evidence)
        return failed(f"{len(missing)} of {len(efas)} EFA devices have no node in /dev/infiniband", evidence)
    return _writable(facts, [nodes[name] for name in sorted(efas)])


def _writable(facts: Facts, nodes: list[str]) -> Finding:
    """Return whether the engines' user, else our own, may write the verbs nodes."""
    listing = facts.host.run(manifest.LS_INFINIBAND)
    modes = proc.parse_modes(listing.stdout) if isinstance(listing, Output) else {}
    closed = [node for node in nodes if "w" not in modes.get(node, "crw-rw-rw-")[7:]]
    pids = [str(engine.pid) for engine in facts.engines if engine.pid is not None] or ["self"]
    if not closed or all(proc.parse_effective_uid(facts.process_status(pid)) == 0 for pid in pids):
        return passed(f"all {len(nodes)} EFA devices have a verbs node")
    answer = warned if modes[closed[0]][5] == "w" else failed
    return answer(f"{len(closed)} EFA nodes are not writable for everybody", f"{modes[closed[0]]} {closed[0]}")


@check(
    "EFA-08",
    "No RDMA devices that are not EFA, beyond those that belong to the type",
    evidence="/sys/class/infiniband/*/device/vendor other than 0x1d0f",
    rule="WARN if there are more than the instance type has; FAIL if fi_info -p efa answers -61 as well",
    fix="Expose only the EFA nodes to the container; do not mount /dev/infiniband from the host",
    sources=("aws-do-eks#63", "LF-PR11530"),
    applies=(conditions.efa,),
)
def foreign_devices(facts: Facts) -> Finding:
    """A Mellanox node that is visible and cannot be opened makes libfabric give up on EFA as well."""
    foreign = [device for device in facts.rdma_devices if not device.is_efa]
    expected = facts.profile.foreign_rdma if facts.profile else 0
    if len(foreign) <= expected:
        return passed(f"{len(foreign)} RDMA devices beside EFA, as expected of the type")
    message = f"{len(foreign)} RDMA devices are not EFA, expected {expected}"
    evidence = f"{foreign[0].name}: vendor 0x{foreign[0].vendor}"
    answer = facts.host.run(manifest.FI_INFO_EFA)
    if isinstance(answer, Output) and "-61" in answer.stderr:
        return failed(message + ", and libfabric finds no EFA", evidence)
    return warned(message, evidence)


@check(
    "EFA-09",
    "The port rate is the line rate of the type",
    evidence="/sys/class/infiniband/*/ports/1/rate",
    rule="WARN if lower: drivers before 2.13 report 100 Gb/s, whatever the link does",
    fix="Upgrade the EFA driver; until then NIXL reckons with the wrong rail speed, the link itself is not slow",
    sources=("DRV-VERBS", "DRV-RN"),
    applies=(conditions.efa,),
    explained_by=("EFA-05", "EFA-06"),
)
def port_rate(facts: Facts) -> Finding:
    """NIXL divides work over rails by the rate that the driver reports."""
    expected = facts.profile.efa_gbps if facts.profile else None
    if expected is None:
        return skipped("the line rate of this type is not published")
    for device in facts.efa_rdma:
        rate = facts.text(f"/sys/class/infiniband/{device.name}/ports/1/rate").strip()
        found = version(rate)
        if not found:
            return unknown(f"cannot read the rate of {device.name}", rate[:60])
        if found[0] < expected:
            return warned(f"{device.name} reports {found[0]} Gb/s, the type has {expected}", f"rate: {rate}")
    if not facts.efa_rdma:
        return unknown("no EFA among the RDMA devices")
    return passed(f"every EFA reports {expected} Gb/s")


@check(
    "EFA-10",
    "The port state is the constant that the driver reports",
    evidence="/sys/class/infiniband/*/ports/1/{state,phys_state}",
    rule="FAIL if it is anything but ACTIVE and LinkUp; ACTIVE itself proves nothing",
    fix="The driver reports a constant: another value means another driver, or a broken one. Reinstall it",
    sources=("DRV-VERBS", "A-NVS"),
    applies=(conditions.efa,),
    explained_by=("EFA-06",),
)
def port_state(facts: Facts) -> Finding:
    """An EFA whose peers are all unreachable still says ACTIVE, so this is never evidence of health."""
    for device in facts.efa_rdma:
        folder = f"/sys/class/infiniband/{device.name}/ports/1"
        state, physical = (facts.text(f"{folder}/{name}").strip() for name in ("state", "phys_state"))
        if "ACTIVE" not in state or "LinkUp" not in physical:
            return failed(f"{device.name} is not ACTIVE and LinkUp", f"state {state}, phys_state {physical}")
    if not facts.efa_rdma:
        return unknown("no EFA among the RDMA devices")
    return passed("ACTIVE, which the driver always says: no evidence of health")


@check(
    "EFA-11",
    "The PCIe link of each EFA has its full speed",
    evidence="/sys/bus/pci/devices/<address>/{current,max}_link_{speed,width}",
    rule=(
        "WARN below the published bandwidth of the type, below the device's own maximum where none is published; "
        "skipped where the guest shows no link"
    ),
    fix="Stop and start the instance to move it to another host",
    sources=("NIXL-TOPO",),
    applies=(conditions.efa,),
    explained_by=("EFA-01",),
)
def pcie_link(facts: Facts) -> Finding:
    """A link that trained down caps the rail below its network rate."""
    published = facts.profile.pcie_gbytes if facts.profile else None
    carried = 0.0
    for device in facts.efa_pci:
        speed, width = _link(facts, device.address, "current")
        found = _link_gbytes(speed, width)
        if found is None:
            return skipped(f"the guest shows no PCIe link ({device.address}: {speed}, width {width})")
        expected = published or _link_gbytes(*_link(facts, device.address, "max"))
        if expected is None:
            return skipped("neither the type nor the device says what its PCIe link can carry")
        if found < expected * 0.98:
            return warned(
                f"the PCIe link of {device.address} carries {found:.1f} GB/s, expected {expected:.4g}",
                f"current_link_speed {speed}, width {width}",
            )
        carried = expected
    return passed(f"every PCIe link carries {carried:.4g} GB/s")


def _link(facts: Facts, address: str, kind: str) -> tuple[str, str]:
    """Return speed and width of a device's ``current`` or ``max`` link, empty where none is shown."""
    folder = f"/sys/bus/pci/devices/{address}/{kind}_link"
    return facts.optional(f"{folder}_speed") or "", facts.optional(f"{folder}_width") or ""


def _link_gbytes(speed: str, width: str) -> float | None:
    """Return the GB/s of a link after line coding (128b/130b from 8 GT/s on); None where none is shown."""
    gigatransfers = re.match(r"(\d{1,4}(?:\.\d{1,4})?)\s*GT/s", speed)
    lanes = whole_number(width)
    return float(gigatransfers[1]) * lanes / 8 * 128 / 130 if gigatransfers and lanes else None


@check(
    "EFA-12",
    "No errors in the device's command counters",
    evidence="/sys/class/infiniband/*/hw_counters/{cmds_err,reg_mr_err,create_qp_err,...}",
    rule="WARN above 0, FAIL if one rises between two looks (--watch)",
    fix="reg_mr_err: memlock, huge pages or GPUDirect; create_qp_err, alloc_pd_err: too many users",
    sources=("DRV-VERBS", "perftest#113"),
    applies=(conditions.efa,),
    explained_by=("EFA-06", "HOST-03", "GDR-02", "NEU-08"),
)
def device_errors(facts: Facts) -> Finding:
    """A registration that the device refuses ends in a fallback or an abort of the transfer."""
    for device, counters in facts.all_counters.items():
        for name in DEVICE_ERRORS:
            count = counters.get(name, 0)
            before = facts.previous.all_counters.get(device, {}).get(name, count) if facts.previous else count
            if count > before:
                return failed(f"{name} of {device} rises", f"{name} {before} -> {count}")
    found = {name: facts.total(name) for name in DEVICE_ERRORS}
    bad = {name: count for name, count in found.items() if count}
    if bad:
        return warned("the devices have counted errors", ", ".join(f"{name} {count}" for name, count in bad.items()))
    if not any(facts.all_counters.values()):
        return unknown("no hardware counters were found")
    return passed("no device has counted an error")


@check(
    "EFA-13",
    "Retransmissions and lost peers do not rise",
    evidence="/sys/class/infiniband/*/ports/1/hw_counters/{rx_drops,retrans_pkts,unresponsive_remote_events,...}",
    rule="WARN if one rises between two looks; FAIL if unresponsive_remote_events rises while no bytes arrive",
    fix="Look at the security group (NW-01, NW-02), the subnet (NW-03) and whether the peer still runs",
    sources=("EC2-MON",),
    applies=(conditions.efa,),
    explained_by=("EFA-06", "NW-01", "NW-02", "NW-03", "NW-05"),
)
def port_trouble(facts: Facts) -> Finding:
    """A peer that does not answer is how EFA shows a security group that drops its traffic."""
    if not any(facts.all_counters.values()):
        return unknown("no hardware counters were found")
    totals = {name: facts.total(name) for name in PORT_TROUBLE}
    if facts.previous is None:
        counted = {name: count for name, count in totals.items() if count}
        if not counted:
            return passed("no port has counted trouble since boot")
        text = ", ".join(f"{name} {count}" for name, count in counted.items())
        return unknown("counted since boot; whether it rises takes a second look (--watch)", text)
    risen = {name: totals[name] - facts.previous.total(name) for name in PORT_TROUBLE}
    risen = {name: count for name, count in risen.items() if count > 0}
    text = ", ".join(f"{name} +{count}" for name, count in risen.items())
    if "unresponsive_remote_events" in risen and facts.total("rx_bytes") == facts.previous.total("rx_bytes"):
        return failed("peers do not answer, and nothing arrives", text)
    return warned("trouble is counted on the ports", text) if risen else passed("no trouble since the last look")


@check(
    "EFA-14",
    "KV bytes are counted by EFA and not by the Ethernet device",
    evidence="rdma_read_bytes, rdma_write_bytes and send_bytes against /sys/class/net/*/statistics, two looks",
    rule=(
        "FAIL if vLLM counts KV bytes between two looks and Ethernet grew, not EFA; WARN if Ethernet alone grew by "
        "more than 64 MiB, which a download does as well"
    ),
    fix="The transfer runs over TCP: look at NX-05, NX-06 and NX-10",
    sources=("EC2-MON", "nixl#1656"),
    applies=(conditions.efa, conditions.engine),
    explained_by=("LF-01", "NX-05", "NX-06", "NX-10"),
)
def kv_is_rdma(facts: Facts) -> Finding:
    """Bandwidth tests can be right while the engines talk TCP; the counters of the devices cannot be."""
    now = _moved_bytes(facts)
    if facts.previous is None:
        return unknown("takes a second look while KV moves (--watch)")
    over_efa, over_tcp = (after - before for after, before in zip(now, _moved_bytes(facts.previous), strict=True))
    evidence = f"EFA +{over_efa} bytes, Ethernet +{over_tcp} bytes"
    if over_efa < over_tcp and over_tcp > 64 << 20:
        moved = _kv_bytes(facts) - _kv_bytes(facts.previous)
        if over_efa < moved <= 2 * over_tcp:
            return failed("KV moves over Ethernet and not over EFA", f"{evidence}, KV +{moved:.0f} bytes")
        return warned("traffic grows on Ethernet and not on EFA: KV, or a download", evidence)
    if over_efa > over_tcp:
        return passed("traffic grows on EFA", evidence)
    return unknown("no transfer between the two looks", evidence)


def _kv_bytes(facts: Facts) -> float:
    """Return the bytes that the engines say NIXL has moved; 0 where no engine answers."""
    try:
        pages = [facts.metrics_page(engine) for engine in facts.kv_engines]
    except UnavailableError:
        return 0.0
    return sum(metrics.total(page, "vllm:nixl_bytes_transferred_sum") for page in pages)


def _moved_bytes(facts: Facts) -> tuple[int, int]:
    """Return the bytes that EFA and that Ethernet devices have moved."""
    names = ("rdma_read_bytes", "rdma_write_bytes", "send_bytes")
    return sum(facts.total(name) for name in names), _ethernet_bytes(facts)


def _ethernet_bytes(facts: Facts) -> int:
    total = 0
    for name in facts.names("/sys/class/net"):
        if name != "lo":
            texts = [facts.optional(f"/sys/class/net/{name}/statistics/{side}_bytes") for side in ("rx", "tx")]
            total += sum(whole_number(text or "") or 0 for text in texts)
    return total


@check(
    "EFA-15",
    "The driver counts RDMA writes",
    evidence="/sys/class/infiniband/*/ports/1/hw_counters/rdma_write_*",
    rule="WARN if there are none: a driver before 2.5",
    fix="Upgrade the EFA driver",
    sources=("DRV-RN",),
    applies=(conditions.efa,),
    explained_by=("EFA-05", "EFA-06"),
)
def write_counters(facts: Facts) -> Finding:
    """Without these counters a push transfer leaves no trace on the device."""
    if not facts.efa_rdma:
        return unknown("no EFA among the RDMA devices")
    name = facts.efa_rdma[0].name
    counters = facts.counters(name)
    if not counters:
        return unknown(f"{name} shows no hardware counters")
    if not any(counter.startswith("rdma_write_") for counter in counters):
        return warned(
            "the driver has no counters for RDMA writes", f"{name}: {len(counters)} counters, no rdma_write_*"
        )
    return passed("RDMA writes are counted")


@check(
    "EFA-16",
    "A current EFA installer bundle is installed",
    evidence="/opt/amazon/efa_installed_packages, line 1",
    rule="WARN if absent or before 1.29.1; FAIL for 1.48.0 on Ubuntu 24.04 (needs ibverbs-providers 59)",
    fix="Install a current EFA installer bundle; in an image with --skip-kmod",
    sources=("EC2-CHG", "dynamo#9727", "awsome#203"),
    applies=(conditions.efa,),
)
def installer(facts: Facts) -> Finding:
    """The bundle is the one set of driver, rdma-core, libfabric and plugins that is tested together."""
    facts.require_shared_files()
    text = facts.optional("/opt/amazon/efa_installed_packages")
    if text is None:
        return warned("no EFA installer bundle: the distribution's own packages", "efa_installed_packages is absent")
    found = packages.parse_installer_version(text)
    if not found:
        return unknown("efa_installed_packages names no version", text[:60])
    evidence = f"# EFA installer version: {found}"
    release = facts.optional("/etc/os-release") if version(found)[:3] == (1, 48, 0) else ""
    if release and "Ubuntu" in release and 'VERSION_ID="24.04"' in release:
        return failed("EFA installer 1.48.0 does not work on Ubuntu 24.04", evidence)
    if not at_least(version(found), (1, 29, 1)):
        return warned(f"EFA installer {found} is older than 1.29.1", evidence)
    return passed(f"EFA installer {found}", evidence)


@check(
    "EFA-17",
    "libibverbs has an EFA provider of its own ABI",
    evidence="libibverbs/libefa-rdmav*.so in the library folders, dpkg-query or rpm for ibverbs-providers",
    rule="FAIL if there is none, or its suffix differs from libibverbs, and fi_info finds no EFA either",
    fix="Install libibverbs and ibverbs-providers from one bundle, inside the image too",
    sources=("modelexpress#259",),
    applies=(conditions.efa,),
    quick=True,
)
def verbs_provider(facts: Facts) -> Finding:
    """With the wrong provider no EFA exists in user space, and NIXL goes to TCP without a word."""
    found = _compare_abi(facts)
    if found.state is State.FAIL and _libfabric_opens_efa(facts):
        return passed("libfabric opens EFA, so that its provider is somewhere else", "fi_info -p efa")
    return found


def _libfabric_opens_efa(facts: Facts) -> bool:
    try:
        return any(entry.provider.startswith("efa") for entry in facts.efa_endpoints)
    except UnavailableError:
        return False


def _compare_abi(facts: Facts) -> Finding:
    if not facts.verbs_providers:
        return failed("libibverbs has no EFA provider", "no libefa-rdmav*.so in the libibverbs folders")
    suffixes = {int(re.findall(r"rdmav(\d{1,4})\.", path)[0]) for path in facts.verbs_providers}
    name = facts.verbs_providers[0]
    try:
        wanted = facts.rdma_core[0]
    except UnavailableError:
        return passed("libibverbs has an EFA provider; its ABI was not compared", name)
    abi = max((number for number in VERBS_ABIS if number <= wanted), default=0)
    # A package above 100 is MOFED's, numbered by year; one beyond the last known ABI may have a newer one.
    fits = wanted > 100 or not abi or abi in suffixes or (abi == VERBS_ABIS[-1] and max(suffixes) > abi)
    if not fits:
        return failed(f"the EFA provider has ABI {max(suffixes)}, libibverbs of rdma-core {wanted} wants {abi}", name)
    return passed("libibverbs has an EFA provider of its own ABI", name)


@check(
    "EFA-18",
    "No MOFED or DOCA-OFED over rdma-core",
    evidence="ofed_info -s and /etc/infiniband/openib.conf",
    rule="WARN if present",
    fix="Reinstall the EFA driver after MOFED, or remove MOFED",
    sources=("amzn-drivers#308",),
    applies=(conditions.efa,),
)
def mofed(facts: Facts) -> Finding:
    """MOFED replaces ib_core and libibverbs with builds that EFA's driver was not made for."""
    if facts.installed(manifest.OFED_INFO):
        text = facts.output(manifest.OFED_INFO).stdout.strip()
        if text:
            return warned("MOFED is installed over rdma-core", text[:80])
    if facts.has("/etc/infiniband/openib.conf"):
        return warned("MOFED has left its configuration", "/etc/infiniband/openib.conf")
    return passed("no MOFED")


@check(
    "EFA-19",
    "The efa module is built for the running kernel",
    evidence="modinfo efa: vermagic; dkms status; /proc/version",
    rule="FAIL if modinfo finds none or another kernel's while the module is not loaded",
    fix="dkms autoinstall, then modprobe efa or reboot",
    sources=("DRV-CONF",),
    applies=(conditions.efa,),
)
def module_build(facts: Facts) -> Finding:
    """After a kernel update the module exists in source and not for the kernel that runs."""
    loaded = "efa" in facts.modules
    answer = facts.output(manifest.MODINFO_EFA)
    states = facts.host.run(manifest.DKMS)
    dkms = packages.parse_dkms(states.stdout) if isinstance(states, Output) else []
    lacking = [f"{name}: {state}" for name, state in dkms if name.startswith("efa") and state != "installed"]
    vermagic = packages.parse_modinfo(answer.stdout).get("vermagic", "").split(" ")[0]
    if loaded and vermagic in {"", facts.kernel_release}:
        return passed("the efa module is loaded", f"vermagic {vermagic}" if vermagic else "")
    if loaded:
        return warned(f"efa is loaded, and its file is of kernel {vermagic}", f"running {facts.kernel_release}")
    if vermagic == facts.kernel_release:
        return passed("the efa module fits the running kernel", f"vermagic {vermagic}")
    evidence = lacking[0] if lacking else f"vermagic {vermagic or 'none'}, running {facts.kernel_release}"
    return failed("no efa module for the running kernel", evidence)


@check(
    "EFA-20",
    "The number of EFA devices does not change between two looks",
    evidence="EFA-01 at two times",
    rule=(
        "WARN if it grows: devices appear late after boot (seen on p5en). Within five minutes of boot a live look that "
        "misses some is repeated, up to three times, five seconds apart"
    ),
    fix="Start engines only when the count is stable: three looks, five seconds apart",
    sources=("A-AWS",),
    applies=(conditions.efa,),
)
def late_devices(facts: Facts) -> Finding:
    """An engine that starts too early after boot opens fewer rails than the machine has."""
    now = len(facts.efa_pci)
    if facts.previous is None:
        return skipped("takes a second look: --watch, or a machine that has just booted")
    before = len(facts.previous.efa_pci)
    if before != now:
        return warned(f"the number of EFA devices went from {before} to {now}")
    return passed(f"{now} EFA devices at both looks")


@check(
    "EFA-21",
    "The EFA modules are loaded at boot",
    evidence="/etc/modules-load.d/efa.conf",
    rule="informational: PASS either way",
    fix="printf 'ib_core\\nib_uverbs\\nefa\\n' > /etc/modules-load.d/efa.conf",
    sources=("DRV-CONF", "eks-ami#2737"),
    applies=(conditions.efa,),
)
def boot_modules(facts: Facts) -> Finding:
    """A host that works now and not after its next reboot."""
    names = facts.names("/etc/modules-load.d")
    found = [name for name in names if name.startswith("efa")]
    if not found:
        return passed("note: nothing loads efa at boot but its own detection", "no /etc/modules-load.d/efa*.conf")
    return passed("efa is loaded at boot", ", ".join(found))


CHECKS = (
    device_count,
    generation,
    driver_bound,
    modules,
    driver_version,
    rdma_devices,
    verbs_nodes,
    foreign_devices,
    port_rate,
    port_state,
    pcie_link,
    device_errors,
    port_trouble,
    kv_is_rdma,
    write_counters,
    installer,
    verbs_provider,
    mofed,
    module_build,
    late_devices,
    boot_modules,
)
