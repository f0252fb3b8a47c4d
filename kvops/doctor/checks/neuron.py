"""Neuron Direct RDMA: devices, driver, runtime, and whether EFA can reach their memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvops.doctor import conditions, manifest
from kvops.doctor.check import failed, in_group, passed, skipped, unknown, warned
from kvops.doctor.facts import UnavailableError
from kvops.doctor.host import Gap, Output
from kvops.doctor.parsers import logs, packages
from kvops.doctor.parsers.versions import at_least, dotted, version

if TYPE_CHECKING:
    from kvops.doctor.check import Finding
    from kvops.doctor.facts import Facts

check = in_group("neuron")

DEVICE_FOLDER = "/sys/devices/virtual/neuron_device"


def _expected(facts: Facts) -> int:
    """Return how many devices the type has; those on the bus where the type is not known."""
    return facts.profile.neurons if facts.profile else len(facts.neuron_pci)


@check(
    "NEU-01",
    "The neuron driver is loaded, in the version that is installed",
    evidence="/sys/module/neuron/version, modinfo neuron",
    rule="FAIL if it is not loaded, WARN if the installed module is another version",
    fix="modprobe neuron; after an update stop its users, rmmod neuron, modprobe neuron",
    sources=("NEU-TS",),
    applies=(conditions.neuron,),
)
def driver(facts: Facts) -> Finding:
    """A reload that failed leaves the old driver in place beside the new runtime."""
    if "neuron" not in facts.modules:
        return failed("the neuron driver is not loaded", "not in /sys/module")
    loaded = facts.optional("/sys/module/neuron/version") or ""
    answer = facts.host.run(manifest.MODINFO_NEURON)
    installed = packages.parse_modinfo(answer.stdout).get("version", "") if isinstance(answer, Output) else ""
    if installed and loaded and version(installed) != version(loaded):
        return warned(f"neuron {loaded} is loaded, {installed} is installed", f"/sys/module/neuron/version: {loaded}")
    return passed(f"neuron driver {loaded or 'of unknown version'}", f"/sys/module/neuron/version: {loaded}")


@check(
    "NEU-02",
    "There is a device node for every Neuron device",
    evidence="/dev/neuron*",
    rule="FAIL if there are fewer than the type has",
    fix="In a container: --device=/dev/neuronN for each; Kubernetes: request aws.amazon.com/neuron",
    sources=("NEU-DOCKER",),
    applies=(conditions.neuron,),
    explained_by=("NEU-01", "NEU-03"),
)
def device_nodes(facts: Facts) -> Finding:
    """EFA's mapping is by device; a subset in a container breaks it."""
    nodes = [name for name in facts.names("/dev") if re.fullmatch(r"neuron\d+", name)]
    if len(nodes) < _expected(facts):
        return failed(
            f"{len(nodes)} of {_expected(facts)} device nodes", f"/dev: {', '.join(nodes[:3]) or 'no neuron*'}"
        )
    return passed(f"{len(nodes)} device nodes")


@check(
    "NEU-03",
    "As many Neuron devices as the type has",
    evidence="/sys/bus/pci/devices: vendor 0x1d0f, device 7164 (trn1), 7264 (inf2), 7364 (trn2), 7564/7565 (trn3)",
    rule="FAIL if there are fewer",
    fix="Reboot; replace the instance",
    sources=("NIXL-TOPOCPP",),
    applies=(conditions.neuron,),
)
def device_count(facts: Facts) -> Finding:
    """A device that fell off the bus takes its EFA with it."""
    found, expected = len(facts.neuron_pci), _expected(facts)
    shown = f"{found} x 1d0f:{facts.neuron_pci[0].device}" if found else "none on the PCI bus"
    if found < expected:
        return failed(f"{found} of {expected} Neuron devices", shown)
    return passed(f"{found} Neuron devices", shown)


@check(
    "NEU-04",
    "neuron-ls shows every device, connected to its neighbours",
    evidence="neuron-ls -j, else neuron-ls",
    rule="FAIL if devices are missing or unconnected",
    fix="Replace the instance if it stays so after a reboot",
    sources=("NEU-LS",),
    applies=(conditions.neuron,),
    explained_by=("NEU-01", "NEU-02", "NEU-03"),
)
def listed(facts: Facts) -> Finding:
    """Collectives between devices need their links."""
    devices, expected = facts.neuron_devices, _expected(facts)
    if len(devices) < expected:
        return failed(f"neuron-ls shows {len(devices)} of {expected} devices", f"{len(devices)} entries")
    alone = [device.index for device in devices if not device.connected_to]
    if alone and expected > 1:
        return failed(f"device {alone[0]} is connected to none", f"neuron_device {alone[0]}: connected_to []")
    return passed(f"neuron-ls shows {len(devices)} connected devices")


@check(
    "NEU-05",
    "Prefill and decode use one logical core size",
    evidence="neuron-ls of both: logical-neuroncore-config",
    rule="FAIL if they differ",
    fix="Set NEURON_LOGICAL_NC_CONFIG and NEURON_RT_VIRTUAL_CORE_SIZE alike on both sides",
    sources=("NEU-LS",),
    applies=(conditions.neuron, conditions.two_hosts),
)
def logical_cores(facts: Facts) -> Finding:
    """The number of ranks, and with it who holds which heads, follows from it."""
    assert facts.peer is not None  # noqa: S101 - the condition two_hosts
    ours, theirs = ({d.logical_core_size for d in side.neuron_devices} for side in (facts, facts.peer))
    if None in ours | theirs or not ours or not theirs:
        return unknown("neuron-ls does not name the logical core size")
    if ours != theirs:
        return failed("prefill and decode differ in logical core size", f"{sorted(map(str, ours | theirs))}")
    return passed(f"logical core size {min(map(str, ours))} on both sides")


@check(
    "NEU-06",
    "Every EFA card is attached",
    evidence="/sys/bus/pci/devices: 0x1d0f:efa?",
    rule="FAIL if there are fewer than the type takes",
    fix="Launch with all EFA cards: one network interface per NetworkCardIndex",
    sources=("NEU-TS", "nixl#1994"),
    applies=(conditions.neuron_direct, conditions.known_type),
    explained_by=("EFA-01",),
)
def efa_count(facts: Facts) -> Finding:
    """With one EFA only, registering the memory of other devices fails with EINVAL."""
    found, expected = len(facts.efa_pci), facts.profile.efas if facts.profile else 0
    if found < expected:
        return failed(f"{found} of {expected} EFAs: the others' Neuron devices cannot be registered", f"{found} EFA")
    return passed(f"{found} EFAs")


@check(
    "NEU-07",
    "Every Neuron device has an EFA near it",
    evidence="the engines' log: nrt_get_attached_efa_bdf, Accelerator-PCI; the package aws-neuronx-runtime-lib",
    rule="FAIL on mapping warnings or libnrt before 2.31",
    fix="Install aws-neuronx-runtime-lib 2.31 or later",
    sources=("NEU-RN", "nixl#1994", "LF-PR12251"),
    applies=(conditions.neuron_direct,),
    explained_by=("NEU-06",),
)
def mapping(facts: Facts) -> Finding:
    """NIXL asks libnrt which EFA belongs to which device."""
    runtime = version(facts.os_packages.get("aws-neuronx-runtime-lib", ""))
    if runtime and not at_least(runtime, (2, 31)):
        return failed(f"libnrt {dotted(runtime)} cannot tell which EFA is near (2.31)", "aws-neuronx-runtime-lib")
    try:
        text = facts.engine_log
    except UnavailableError:
        text = ""
    bad = logs.matching(text, r"nrt_get_attached_efa_bdf.*(?:fail|error)|not found in accelerator-EFA mapping")
    if bad:
        return failed("a Neuron device has no EFA", bad[0][:160])
    if not runtime:
        return unknown("the version of libnrt cannot be seen")
    return passed(f"libnrt {dotted(runtime)} maps devices to EFAs", f"aws-neuronx-runtime-lib {dotted(runtime)}")


@check(
    "NEU-08",
    "EFA can reach Neuron memory",
    evidence="/sys/class/infiniband/*/device/p2p: NEURON; else dmabuf (FI_HMEM_NEURON_USE_DMABUF)",
    rule="FAIL if a device has no NEURON provider and dmabuf is switched off; UNKNOWN if only dmabuf is left",
    fix="Install current aws-neuronx-dkms and EFA driver 1.16 or later",
    sources=("DRV-P2P", "NEU-DRVSHARED", "FIEFA"),
    applies=(conditions.neuron_direct,),
    explained_by=("NEU-01", "EFA-06"),
    quick=True,
)
def peer_memory(facts: Facts) -> Finding:
    """Without it libfabric cannot register the KV cache of a Neuron device."""
    if not facts.efa_rdma:
        return unknown("no EFA among the RDMA devices")
    providers = {d.name: facts.optional(f"/sys/class/infiniband/{d.name}/device/p2p") or "" for d in facts.efa_rdma}
    without = [name for name, provider in providers.items() if "NEURON" not in provider]
    if not without:
        return passed(f"{len(providers)} EFA devices reach Neuron memory", "p2p: NEURON")
    shown = f"{without[0]}/device/p2p: {providers[without[0]] or 'empty or absent'}"
    off = [owner for owner, env in facts.environments.items() if env.get("FI_HMEM_NEURON_USE_DMABUF") == "0"]
    if off or "neuron" not in facts.modules:
        return failed(f"{len(without)} EFA devices cannot reach Neuron memory", shown)
    return unknown("no peer memory; dmabuf may take its place", shown)


@check(
    "NEU-09",
    "libfabric finds libnrt",
    evidence="ldconfig -p: libnrt.so.1; LD_LIBRARY_PATH of the engines",
    rule="FAIL if it is in neither",
    fix="echo /opt/aws/neuron/lib > /etc/ld.so.conf.d/neuron.conf && ldconfig",
    sources=("Mooncake#3888",),
    applies=(conditions.neuron_direct,),
    quick=True,
)
def runtime_library(facts: Facts) -> Finding:
    """Without libnrt on its path libfabric leaves FI_HMEM_NEURON out without a word."""
    found = facts.libraries("libnrt.so")
    if found:
        return passed("libnrt is in the loader's cache", found[0])
    named = [o for o, env in facts.environments.items() if "/opt/aws/neuron/lib" in env.get("LD_LIBRARY_PATH", "")]
    if named:
        return passed("libnrt is on LD_LIBRARY_PATH", named[0])
    return failed("the loader does not find libnrt.so.1", "not in ldconfig -p, not on LD_LIBRARY_PATH")


@check(
    "NEU-10",
    "libfabric initialised its Neuron interface",
    evidence="the engines' log",
    rule="FAIL if it says that transfers with FI_HMEM_NEURON will fail",
    fix="Unset FI_HMEM_DISABLE_P2P; initialise the Neuron runtime before libfabric, or upgrade libfabric",
    sources=("LF-NEURON", "NIXLBENCH"),
    applies=(conditions.neuron_direct, conditions.engine),
    explained_by=("NEU-09", "LF-07", "NEU-08"),
)
def hmem_interface(facts: Facts) -> Finding:
    """Libfabric says in its log what it could not do, and goes on without."""
    bad = r"transfers using FI_HMEM_NEURON will fail|requires p2p, unset FI_HMEM_DISABLE_P2P|Failed to dlopen libnrt"
    lines = logs.matching(facts.engine_log, bad)
    if lines:
        return failed("libfabric has no Neuron interface", lines[0][:160])
    proof = logs.matching(facts.engine_log, r"number of neuron cores: \d+")
    return passed("libfabric sees Neuron cores", proof[0][:160]) if proof else unknown("the log does not speak of it")


@check(
    "NEU-11",
    "Neuron's driver, runtime, collectives and tools are of one release",
    evidence="dpkg-query or rpm: aws-neuronx-*; the engines' log",
    rule="FAIL if the log says that they do not fit, WARN if a package is missing",
    fix="Install all aws-neuronx packages of one SDK release",
    sources=("NEU-TS",),
    applies=(conditions.neuron,),
    explained_by=("NEU-01",),
)
def release(facts: Facts) -> Finding:
    """The runtime refuses a driver that is older than it was built for."""
    pattern = r"This runtime requires Neuron Driver|libnccom\.so: cannot open|Unable to determine Neuron Driver"
    try:
        lines = logs.matching(facts.engine_log, pattern)
    except UnavailableError:
        lines = []
    if lines:
        return failed("Neuron's parts do not fit together", lines[0][:160])
    wanted = ("aws-neuronx-dkms", "aws-neuronx-runtime-lib", "aws-neuronx-collectives")
    missing = [name for name in wanted if name not in facts.os_packages]
    if missing:
        return warned(f"not installed as a package: {', '.join(missing)}", "dpkg-query, rpm")
    return passed("Neuron's packages are installed", f"aws-neuronx-runtime-lib {facts.os_packages[wanted[1]]}")


@check(
    "NEU-12",
    "Neuron's collectives found the OFI plugin",
    evidence="the engines' log",
    rule="FAIL if they say that they did not",
    fix="Mend EFA (EFA-01, LF-01), and install the plugin of the EFA bundle",
    sources=("NEU-TS",),
    applies=(conditions.neuron_direct, conditions.engine),
    explained_by=("EFA-01", "LF-01"),
)
def collectives(facts: Facts) -> Finding:
    """Tensor parallelism over several instances runs through it."""
    lines = logs.matching(facts.engine_log, r"OFI plugin initNet\(\) failed|Ofi plugin is not installed or EFA")
    if lines:
        return failed("Neuron's collectives have no EFA", lines[0][:160])
    return passed("no complaint of the OFI plugin in the log")


@check(
    "NEU-13",
    "Libfabric's variables fit Neuron",
    evidence="environment of the engines: FI_PROVIDER, FI_EFA_USE_DEVICE_RDMA, FI_EFA_FORK_SAFE",
    rule="WARN where one contradicts: FI_PROVIDER other than efa, device RDMA off, fork safety on a new kernel",
    fix="FI_PROVIDER=efa FI_EFA_USE_DEVICE_RDMA=1; FI_EFA_FORK_SAFE=1 only on Amazon Linux 2",
    sources=("NEU-TRN1",),
    applies=(conditions.neuron_direct,),
    explained_by=("LF-07",),
)
def variables(facts: Facts) -> Finding:
    """Neuron's guides set these three, each for a reason that does not hold everywhere."""
    for owner, env in facts.environments.items():
        if env.get("FI_PROVIDER", "efa") != "efa":
            return warned(f"{owner} chooses another provider", f"FI_PROVIDER={env['FI_PROVIDER']}")
        if env.get("FI_EFA_USE_DEVICE_RDMA", "1") != "1":
            return warned(f"{owner} turns device RDMA off", f"FI_EFA_USE_DEVICE_RDMA={env['FI_EFA_USE_DEVICE_RDMA']}")
        if env.get("FI_EFA_FORK_SAFE") == "1" and at_least(facts.kernel, (5, 13)):
            return warned(f"{owner} asks for fork safety, which this kernel has", "FI_EFA_FORK_SAFE=1")
    return passed("no variable contradicts")


@check(
    "NEU-14",
    "Only the engines own Neuron cores",
    evidence="neuron-ls -j: neuron_processes; NEURON_RT_VISIBLE_CORES of the engines",
    rule="FAIL if another process owns cores, or two engines name the same cores",
    fix="Stop the other process, or give each engine its own NEURON_RT_VISIBLE_CORES",
    sources=("NEU-LS",),
    applies=(conditions.neuron,),
    explained_by=("NEU-01",),
)
def ownership(facts: Facts) -> Finding:
    """A core has one owner; the second process does not start."""
    claimed: dict[str, str] = {}
    for engine in facts.engines:
        cores = engine.env.get("NEURON_RT_VISIBLE_CORES", "")
        for core in _cores(cores):
            if claimed.setdefault(core, engine.name) != engine.name:
                return failed(f"{engine.name} and {claimed[core]} both take core {core}", f"{cores}")
    ours = {engine.pid for engine in facts.engines} | set(facts.worker_pids)
    for device in facts.neuron_devices:
        strangers = [(pid, command) for pid, command in device.processes if pid not in ours and "vllm" not in command]
        if strangers:
            pid, text = strangers[0]
            return failed(f"process {pid} owns cores of device {device.index}", f"{pid} {text[:80]}")
    return passed("no other process owns Neuron cores")


def _cores(text: str) -> set[str]:
    """Return the cores that ``0-3,8`` names; ranges are bounded."""
    cores: set[str] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal() and len(part) < 12:
            cores.update(str(core) for core in range(int(first), min(int(last or first), int(first) + 1024) + 1))
    return cores


@check(
    "NEU-15",
    "No Neuron component reports itself unhealthy",
    evidence=f"{DEVICE_FOLDER}/neuron*/stats/hardware/health_status/unhealthy_components",
    rule="FAIL if one is named",
    fix="Replace the instance",
    sources=("NEU-RN",),
    applies=(conditions.neuron,),
)
def health(facts: Facts) -> Finding:
    """From driver 2.30.2 on a device names what of it is broken: link_efa, hbm, link_host."""
    devices = facts.names(DEVICE_FOLDER)
    seen = 0
    for device in devices:
        text = facts.optional(f"{DEVICE_FOLDER}/{device}/stats/hardware/health_status/unhealthy_components")
        seen += text is not None
        if text:
            return failed(f"{device} is unhealthy: {text[:60]}", f"unhealthy_components: {text[:60]}")
    if not seen:
        return skipped("this driver does not report health")
    return passed(f"{seen} devices report no unhealthy component")


@check(
    "NEU-16",
    "No uncorrected memory errors",
    evidence=f"{DEVICE_FOLDER}/neuron*/stats/hardware/*_ecc_uncorrected; dmesg: NEURON_HW_ERR",
    rule="FAIL above 0, or if the kernel log says TERMINATE_INSTANCE",
    fix="Terminate the instance",
    sources=("NEU-TS", "NEU-RN"),
    applies=(conditions.neuron,),
)
def memory_errors(facts: Facts) -> Finding:
    """KV in broken memory is wrong KV."""
    kernel = facts.host.run(manifest.DMESG)
    lines = logs.matching("" if isinstance(kernel, Gap) else kernel.stdout, r"NEURON_HW_ERR=.*TERMINATE_INSTANCE")
    if lines:
        return failed("the driver asks to terminate the instance", lines[-1][:160])
    seen = 0
    for device in facts.names(DEVICE_FOLDER):
        for name in ("mem_ecc_uncorrected", "sram_ecc_uncorrected"):
            text = facts.optional(f"{DEVICE_FOLDER}/{device}/stats/hardware/{name}")
            seen += text is not None
            if text and text != "0":
                return failed(f"{device} has uncorrected memory errors", f"{name}: {text[:20]}")
    return passed("no uncorrected memory error") if seen else unknown("the driver shows no error counters")


@check(
    "NEU-17",
    "EFA affinity is not skipped",
    evidence="environment of the engines: NEURON_SKIP_EFA_AFFINITY",
    rule="WARN if it is set on a host with EFA",
    fix="Unset it; it is meant for tests on one node without EFA",
    sources=("VLLM-NEURON",),
    applies=(conditions.neuron_direct,),
)
def affinity(facts: Facts) -> Finding:
    """It lets vLLM start without EFA, and then KV does not use it."""
    for owner, env in facts.environments.items():
        if env.get("NEURON_SKIP_EFA_AFFINITY", "0") not in {"0", ""}:
            return warned(f"{owner} starts without EFA", f"NEURON_SKIP_EFA_AFFINITY={env['NEURON_SKIP_EFA_AFFINITY']}")
    return passed("EFA affinity is not skipped")


@check(
    "NEU-18",
    "The instance type supports Neuron direct RDMA",
    evidence="instance type",
    rule="WARN on types without EFA or that NIXL does not support",
    fix="Use trn1.32xlarge, trn1n.32xlarge, trn2.48xlarge or trn2u.48xlarge",
    sources=("nixl#1994",),
    applies=(conditions.neuron, conditions.known_type),
)
def supported(facts: Facts) -> Finding:
    """The small sizes have Neuron devices, and no way to move KV from them by RDMA."""
    profile = facts.profile
    if profile is not None and (not profile.efas or profile.gpudirect is False):
        return warned(f"NIXL does not move KV by Neuron direct RDMA on {profile.name}", f"product_name: {profile.name}")
    return passed("the type supports Neuron direct RDMA")


CHECKS = (
    driver,
    device_nodes,
    device_count,
    listed,
    logical_cores,
    efa_count,
    mapping,
    peer_memory,
    runtime_library,
    hmem_interface,
    release,
    collectives,
    variables,
    ownership,
    health,
    memory_errors,
    affinity,
    supported,
)
