"""GPUDirect RDMA: whether EFA can reach the memory of NVIDIA GPUs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvops.doctor import conditions, manifest
from kvops.doctor.check import State, failed, in_group, passed, skipped, unknown, warned
from kvops.doctor.engines import is_fabric_manager
from kvops.doctor.facts import UnavailableError
from kvops.doctor.host import Gap, Output
from kvops.doctor.parsers import logs, nvidia
from kvops.doctor.parsers.versions import Version, at_least, version
from kvops.doctor.sources import HOUSE_RULE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvops.doctor.check import Finding
    from kvops.doctor.facts import Facts

check = in_group("gpudirect")

# Kernels that took the symbol from proprietary modules which EFA's peer memory needs: mainline 6.6 and the first
# stable releases that have the change (amazon-eks-ami#1494).
OPEN_MODULE_KERNELS: dict[Version, Version] = {
    (4, 14): (4, 14, 326),
    (5, 4): (5, 4, 257),
    (5, 10): (5, 10, 195),
    (5, 15): (5, 15, 131),
    (6, 1): (6, 1, 52),
}
RELATION_ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS")


@check(
    "GDR-01",
    "The instance type supports GPUDirect RDMA",
    evidence="instance type",
    rule="WARN on types without it",
    fix="Choose another type (p4d and later, g7e.12xlarge and larger), or let NIXL use UCX through host memory",
    sources=("OFI-PLAT", "aws-ofi-nccl#547", "NIXL-README"),
    applies=(conditions.efa, conditions.nvidia),
)
def supported(facts: Facts) -> Finding:
    """GPUs of the G family advertise GPUDirect, and the instance does not carry it."""
    if facts.profile is None or facts.profile.gpudirect is None:
        return skipped("not published for this type")
    if not facts.profile.gpudirect:
        return warned(
            f"{facts.profile.name} has no GPUDirect RDMA: KV goes through host memory, and NIXL's LIBFABRIC needs it",
            f"product_name: {facts.profile.name}",
        )
    return passed(f"{facts.profile.name} supports GPUDirect RDMA")


@check(
    "GDR-02",
    "Every EFA has a peer-memory provider, or the dmabuf chain is complete",
    evidence="/sys/class/infiniband/*/device/p2p (older drivers: device/gdr)",
    rule="PASS for NVIDIA on every device; else as GDR-07",
    fix="modprobe efa_nv_peermem, or install the EFA driver after the NVIDIA driver",
    sources=("DRV-SYSFS", "DRV-P2P", "A-DLC"),
    applies=(conditions.gpudirect,),
    explained_by=("GDR-06", "GDR-04", "EFA-06"),
    quick=True,
)
def peer_memory(facts: Facts) -> Finding:
    """Without peer memory and without dmabuf, registering GPU memory with EFA fails."""
    if not facts.efa_rdma:
        return unknown("no EFA among the RDMA devices")
    providers = {device.name: _provider(facts, device.name) for device in facts.efa_rdma}
    without = [name for name, provider in providers.items() if not provider.startswith("NVIDIA")]
    if not without:
        return passed(f"{len(providers)} EFA devices have a peer-memory provider", f"p2p: {min(providers.values())}")
    shown = f"{without[0]}/device/p2p: {providers[without[0]] or 'empty or absent'}"
    chain = _chain(facts)
    broken = [text for text, good in chain.items() if good is False]
    if broken:
        return failed(f"{len(without)} EFA devices have no peer memory, and dmabuf lacks {broken[0]}", shown)
    open_ends = [text for text, good in chain.items() if good is None]
    if open_ends:
        return unknown(f"no peer memory; whether dmabuf works hangs on {open_ends[0]}", shown)
    return passed("no peer memory; dmabuf takes its place", shown)


def _provider(facts: Facts, name: str) -> str:
    folder = f"/sys/class/infiniband/{name}/device"
    provider = facts.optional(f"{folder}/p2p")
    if provider is None and facts.optional(f"{folder}/gdr") == "1":
        return "NVIDIA (device/gdr)"
    return provider or ""


@check(
    "GDR-03",
    "efa_nv_peermem is loaded",
    evidence="/sys/module/efa_nv_peermem",
    rule="WARN where an engine uses UCX; informational elsewhere",
    fix="modprobe efa_nv_peermem, and name it in /etc/modules-load.d",
    sources=("UCX-EFAMD", "ucx#10966", "eks-ami#2466"),
    applies=(conditions.gpudirect,),
    explained_by=("GDR-06",),
)
def efa_peermem(facts: Facts) -> Finding:
    """UCX looks for this very module before it offers GPU memory on EFA."""
    if "efa_nv_peermem" in facts.modules:
        return passed("efa_nv_peermem is loaded", f"version {facts.optional('/sys/module/efa_nv_peermem/version')}")
    if any("UCX" in engine.backends for engine in facts.kv_engines):
        return warned("efa_nv_peermem is not loaded, and an engine uses UCX", "not in /sys/module")
    return passed("note: efa_nv_peermem is not loaded; libfabric can use dmabuf", "not in /sys/module")


@check(
    "GDR-04",
    "The NVIDIA kernel module is the open one",
    evidence="/proc/driver/nvidia/version, line 1",
    rule="FAIL for the proprietary module on kernels that took its symbol away, else WARN",
    fix="Install nvidia-*-open, and EFA installer 1.29.0 or later",
    sources=("eks-ami#1494", "pcluster#6015", "aws-ofi-nccl#803"),
    applies=(conditions.gpudirect,),
)
def open_module(facts: Facts) -> Finding:
    """Newer kernels do not let a proprietary module export to EFA's, and dmabuf exists in the open one only."""
    driver = facts.nvidia_driver
    if driver is None:
        return failed("no NVIDIA driver is loaded", "/proc/driver/nvidia/version is absent")
    if driver.is_open:
        return passed(f"open kernel module {driver.version}", "NVIDIA UNIX Open Kernel Module")
    since = OPEN_MODULE_KERNELS.get(facts.kernel[:2])
    evidence = f"NVRM version: NVIDIA UNIX Kernel Module {driver.version}, kernel {facts.kernel_release}"
    if (since and at_least(facts.kernel, since)) or at_least(facts.kernel, (6, 6)):
        return failed("the proprietary NVIDIA module cannot serve EFA on this kernel", evidence)
    return warned("the NVIDIA module is the proprietary one", evidence)


@check(
    "GDR-05",
    "The EFA driver fits the NVIDIA driver",
    evidence="/proc/driver/nvidia/version and /sys/module/efa/version",
    rule="FAIL for EFA before 2.17.3 with NVIDIA 580 or later",
    fix="Upgrade the EFA driver to 2.17.3 or later",
    sources=("DRV-RN",),
    applies=(conditions.gpudirect,),
)
def driver_pair(facts: Facts) -> Finding:
    """NVIDIA 580 changed the interface that EFA's peer memory calls."""
    driver = facts.nvidia_driver
    if driver is None or facts.efa_driver is None:
        return unknown("one of the two drivers shows no version")
    evidence = f"NVIDIA {driver.version}, efa {facts.efa_driver}"
    if at_least(version(driver.version), (580,)) and not at_least(version(facts.efa_driver), (2, 17, 3)):
        return failed(f"efa {facts.efa_driver} does not fit NVIDIA {driver.version} (2.17.3)", evidence)
    return passed("the two drivers fit", evidence)


@check(
    "GDR-06",
    "EFA's peer memory found NVIDIA's symbols",
    evidence="dmesg: efa_nv_peermem: no symbol",
    rule="FAIL if the kernel log has it",
    fix="Rebuild the DKMS modules after the NVIDIA driver changed, and reboot",
    sources=("eks-ami#2672",),
    applies=(conditions.gpudirect,),
)
def symbols(facts: Facts) -> Finding:
    """A module built for another NVIDIA driver loads and does nothing."""
    lines = logs.matching(facts.kernel_log, r"efa_nv_peermem: (?:no symbol|disagrees about version)")
    if lines:
        return failed("efa_nv_peermem was built for another NVIDIA driver", lines[-1][:160])
    return passed("no complaint about symbols in the kernel log")


@check(
    "GDR-07",
    "The dmabuf chain is complete, or peer memory is there",
    evidence="kernel, NVIDIA driver (515 came with CUDA 11.7), rdma-core, libfabric, CONFIG_PCI_P2PDMA",
    rule="FAIL if a link of dmabuf is missing and GDR-02 found no peer memory",
    fix="Mend the missing link, or load efa_nv_peermem",
    sources=("PERFTEST-README", "LF-NEWS", "NV-GPUOP"),
    applies=(conditions.gpudirect,),
    explained_by=("GDR-02", "GDR-04", "HOST-02", "LF-04", "LF-10"),
    quick=True,
)
def dmabuf_chain(facts: Facts) -> Finding:
    """Dmabuf needs kernel, driver, rdma-core and libfabric together; one old link breaks it."""
    chain = _chain(facts)
    broken = [text for text, good in chain.items() if good is False]
    open_ends = [text for text, good in chain.items() if good is None]
    if not broken and not open_ends:
        return passed("every link of dmabuf is there")
    if not broken:
        return unknown(f"not all links of dmabuf can be seen: {', '.join(open_ends)}")
    names = [device.name for device in facts.efa_rdma]
    if names and all(_provider(facts, name).startswith("NVIDIA") for name in names):
        return passed(f"dmabuf lacks {broken[0]}; peer memory takes its place")
    return failed(f"dmabuf lacks {', '.join(broken)}, and there is no peer memory", broken[0])


def _chain(facts: Facts) -> dict[str, bool | None]:
    """Return the links of dmabuf: True where good, False where missing, None where it cannot be seen."""
    links: dict[str, Callable[[], bool]] = {
        "kernel 5.12": lambda: at_least(facts.kernel, (5, 12)),
        "the open NVIDIA driver 515 (CUDA 11.7)": lambda: _is_open_since_515(facts),
        "rdma-core 34": lambda: at_least(facts.rdma_core, (34,)),
        "libfabric 2.4 (or FI_HMEM_CUDA_USE_DMABUF=1)": lambda: _libfabric_uses_dmabuf(facts),
        "CONFIG_PCI_P2PDMA": lambda: facts.kernel_options.get("CONFIG_PCI_P2PDMA", "n") != "n",
    }
    return {text: _seen(link) for text, link in links.items()}


def _seen(link: Callable[[], bool]) -> bool | None:
    try:
        return link()
    except UnavailableError:
        return None


def _libfabric_uses_dmabuf(facts: Facts) -> bool:
    if at_least(facts.libfabric_version, (2, 4)):
        return True
    return any(env.get("FI_HMEM_CUDA_USE_DMABUF") == "1" for env in facts.environments.values())


def _is_open_since_515(facts: Facts) -> bool:
    driver = facts.nvidia_driver
    return driver is not None and driver.is_open and at_least(version(driver.version), (515,))


@check(
    "GDR-08",
    "aws-ofi-nccl may use dmabuf on this EFA generation",
    evidence="dpkg-query, rpm or efa_installed_packages: the version of aws-ofi-nccl",
    rule="WARN for 1.14 to 1.19.1 where dmabuf is the only path",
    fix="Upgrade aws-ofi-nccl to 1.19.2, or load efa_nv_peermem",
    sources=("gvisor#13882", "OFI-PR861"),
    applies=(conditions.gpudirect,),
)
def plugin_dmabuf(facts: Facts) -> Finding:
    """These versions refuse dmabuf on the first three EFA generations."""
    found = _plugin_version(facts)
    if not found:
        return skipped("no aws-ofi-nccl package")
    evidence = f"aws-ofi-nccl {'.'.join(map(str, found))}"
    old = at_least(found, (1, 14)) and not at_least(found, (1, 19, 2))
    if old and "efa_nv_peermem" not in facts.modules and any(d.device != "efa3" for d in facts.efa_pci):
        return warned(f"{evidence} refuses dmabuf on this EFA, and there is no peer memory", evidence)
    return passed(evidence, evidence)


def _plugin_version(facts: Facts) -> Version:
    for name, number in facts.os_packages.items():
        if "ofi-nccl" in name or "nccl-ofi" in name:
            return version(number)
    bundle = re.search(
        r"(?:ofi-nccl|nccl-ofi)[-_ ]v?(\d+(?:\.\d+)+)", facts.optional("/opt/amazon/efa_installed_packages") or ""
    )
    return version(bundle[1]) if bundle else ()


@check(
    "GDR-09",
    "nvidia_peermem is not what EFA uses",
    evidence="/sys/module/nvidia_peermem",
    rule="informational: PASS either way",
    sources=("DYN-EFA",),
    applies=(conditions.gpudirect,),
)
def nvidia_peermem(facts: Facts) -> Finding:
    """It serves Mellanox devices; guides for InfiniBand ask for it, EFA does not."""
    loaded = "nvidia_peermem" in facts.modules
    return passed(f"nvidia_peermem is {'loaded' if loaded else 'not loaded'}; EFA does not need it")


@check(
    "GDR-10",
    "gdrcopy works",
    evidence="/dev/gdrdrv, /sys/module/gdrdrv, gdrcopy_sanity in a capture, dmesg",
    rule="WARN if the module is loaded without its device, or does not fit the NVIDIA module",
    fix="Load it with insmod.sh or its udev package; build it for the open NVIDIA module",
    sources=("gdrcopy#278", "gdrcopy#234", "gdrcopy#334"),
    applies=(conditions.gpudirect,),
)
def gdrcopy(facts: Facts) -> Finding:
    """Small messages copy through gdrcopy; without it their latency is higher."""
    if "gdrdrv" not in facts.modules:
        return passed("note: gdrcopy is not loaded; small messages have more latency")
    if "gdrdrv" not in facts.names("/dev"):
        return warned("gdrdrv is loaded and has no device", "/dev/gdrdrv does not exist")
    sanity = facts.host.run(manifest.GDRCOPY_SANITY)
    if isinstance(sanity, Output) and re.search(r"Failed:\s*[1-9]|&&&& FAILED", sanity.stdout):
        return warned("gdrcopy_sanity fails", sanity.stdout.strip().splitlines()[-1][:120])
    lines = logs.matching(facts.kernel_log, r"gdrdrv.*built for proprietary NVIDIA driver")
    if lines and facts.nvidia_driver is not None and facts.nvidia_driver.is_open:
        return warned("gdrdrv was built for the proprietary NVIDIA module", lines[-1][:160])
    return passed("gdrdrv has its device", f"version {facts.optional('/sys/module/gdrdrv/version')}")


@check(
    "GDR-11",
    "As many GPUs as the instance type has",
    evidence="/proc/driver/nvidia/gpus, else nvidia-smi -L",
    rule="FAIL if fewer; PASS in a container that was given some of the GPUs on the bus",
    fix="Look for Xid in dmesg; replace the instance",
    sources=("A-AWS",),
    applies=(conditions.nvidia, conditions.known_type),
)
def gpu_count(facts: Facts) -> Finding:
    """A GPU that fell off the bus takes its rails with it."""
    found = facts.host.listdir("/proc/driver/nvidia/gpus")
    gpus = len(facts.parsed(manifest.NVIDIA_GPUS, nvidia.parse_gpu_list) if isinstance(found, Gap) else found)
    expected = facts.profile.gpus if facts.profile else gpus
    if 0 < gpus < expected == len(facts.gpu_pci) and facts.in_container:
        return passed(f"note: this container was given {gpus} of {expected} GPUs")
    if gpus < expected:
        return failed(f"{gpus} of {expected} GPUs", f"{gpus} entries in /proc/driver/nvidia/gpus")
    return passed(f"{gpus} GPUs")


@check(
    "GDR-12",
    "Every GPU has an EFA near it",
    evidence="nvidia-smi topo -m, else the bridges in the link targets of /sys/bus/pci/devices",
    rule="WARN if the nearest NIC of a GPU is NODE or SYS away, or none is under its host bridge; PHB is right on p4d",
    fix="Do not let UCX_NET_DEVICES or CUDA_VISIBLE_DEVICES tie a GPU to a remote NIC",
    sources=("NIXL-TOPO", "OFI-TOPO"),
    applies=(conditions.gpudirect,),
)
def locality(facts: Facts) -> Finding:
    """Traffic to a NIC across the socket shares the link between the sockets."""
    if isinstance(facts.host.run(manifest.NVIDIA_TOPOLOGY), Gap):
        return _locality_by_bus(facts)
    topology = facts.parsed(manifest.NVIDIA_TOPOLOGY, nvidia.parse_topology)
    for gpu in topology.gpus:
        relations = {value for value in topology.nics_of(gpu).values() if value in RELATION_ORDER}
        if not relations:
            return unknown(f"nvidia-smi shows no NIC for {gpu}")
        nearest = min(relations, key=RELATION_ORDER.index)
        if nearest in {"NODE", "SYS"}:
            return warned(f"the nearest NIC of {gpu} is {nearest} away", f"{gpu}: {nearest}")
    if not topology.gpus:
        return unknown("nvidia-smi shows no GPU")
    return passed("every GPU has a NIC under its own bridge")


def _locality_by_bus(facts: Facts) -> Finding:
    """Judge by sysfs, as in a container without nvidia-smi."""
    near = {facts.host_bridge(device.address) for device in facts.efa_pci}
    for gpu in facts.gpu_pci:
        bridge = facts.host_bridge(gpu.address)
        if bridge not in near:
            return warned(f"no EFA is under the host bridge of the GPU {gpu.address}", f"{gpu.address}: {bridge}")
    return passed(f"every GPU has an EFA under its own host bridge ({len(near)} bridges)")


@check(
    "GDR-13",
    "PyTorch does not use expandable segments",
    evidence="environment of the engines: PYTORCH_CUDA_ALLOC_CONF, PYTORCH_ALLOC_CONF",
    rule="FAIL where an engine uses LIBFABRIC, WARN elsewhere",
    fix="Unset it for prefill and decode engines",
    sources=("libfabric#12853", "ray#62339"),
    applies=(conditions.gpudirect,),
)
def expandable_segments(facts: Facts) -> Finding:
    """Memory of the CUDA VMM interface fails to register with EFA, or its transfers fail."""
    on_libfabric = any("LIBFABRIC" in engine.backends for engine in facts.kv_engines)
    for owner, env in facts.environments.items():
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if re.search(r"expandable_segments:\s*true", env.get(name, ""), re.IGNORECASE):
                answer = failed if on_libfabric else warned
                return answer(f"{owner} uses expandable segments, which EFA cannot register", f"{name}={env[name]}")
    return passed("no expandable segments")


@check(
    "GDR-14",
    "The logs show GPU memory registered with EFA",
    evidence="dmesg and the engines' log",
    rule="FAIL if libfabric or aws-ofi-nccl says that it could not",
    fix="See GDR-02 to GDR-07",
    sources=("DRV-P2P", "LF-HMEM", "OFI-SRC", "libfabric#11256"),
    applies=(conditions.gpudirect,),
    explained_by=("GDR-02", "GDR-07", "GDR-04", "GDR-13"),
)
def registration_log(facts: Facts) -> Finding:
    """What the libraries wrote when they tried is better than any inference."""
    bad = r"Failed to register CUDA buffer with the EFA device|GDR disabled on GDR-supported instance type"
    good = r"Acquired peer memory using P2P|via NET/.*Libfabric/.*GDRDMA"
    kernel = _text_or_empty(lambda: facts.kernel_log)
    engines = _text_or_empty(lambda: facts.engine_log)
    lines = logs.matching(engines, bad)
    if lines:
        return failed("GPU memory could not be registered with EFA", lines[0][:160])
    proof = logs.matching(kernel + "\n" + engines, good)
    if proof:
        return passed("GPU memory was registered with EFA", proof[0][:160])
    return unknown("neither the kernel log nor an engine's log speaks of it")


def _text_or_empty(read: Callable[[], str]) -> str:
    try:
        return read()
    except UnavailableError:
        return ""


@check(
    "GDR-15",
    "The fabric manager runs",
    evidence="systemctl is-active nvidia-fabricmanager",
    rule=(
        "FAIL if it is not active on types with NVSwitch and no nv-fabricmanager runs; UNKNOWN in a container, which "
        "does not see the host's services"
    ),
    fix="Install and start nvidia-fabricmanager of the driver's own version",
    sources=(HOUSE_RULE,),
    applies=(conditions.nvidia, conditions.known_type),
)
def fabric_manager(facts: Facts) -> Finding:
    """CUDA does not initialise on NVSwitch machines without it."""
    if facts.profile is not None and not facts.profile.nvswitch:
        return skipped(f"{facts.profile.name} has no NVSwitch")
    if any(map(is_fabric_manager, facts.processes.values())):
        return passed("nv-fabricmanager runs")
    state = facts.output(manifest.FABRIC_MANAGER).stdout.strip()
    if not state:
        return unknown("systemctl printed nothing: no systemd here")
    if state == "active":
        return passed("nvidia-fabricmanager is active")
    if facts.in_container:
        return unknown("a container does not see the host's services", f"systemctl is-active: {state[:40]}")
    return failed(f"nvidia-fabricmanager is {state[:40]}", f"systemctl is-active: {state[:40]}")


@check(
    "GDR-16",
    "CUDA 13 relies on dmabuf",
    evidence="/proc/driver/nvidia/version and Python packages",
    rule="informational: PASS with a note where CUDA 13 relies on peer memory",
    fix="Plan for dmabuf: NVIDIA's peer-memory interface is deprecated from CUDA 13 on",
    sources=("NV-GDR13",),
    applies=(conditions.gpudirect,),
)
def cuda_13(facts: Facts) -> Finding:
    """The interface under efa_nv_peermem is deprecated from CUDA 13 on."""
    driver = facts.nvidia_driver
    if driver is None:
        return unknown("no NVIDIA driver is loaded")
    if at_least(version(driver.version), (580,)) and dmabuf_chain.find(facts).state is not State.PASS:
        return passed("note: CUDA 13 with peer memory only, which NVIDIA has deprecated", f"driver {driver.version}")
    return passed("dmabuf is there, or CUDA is older than 13", f"driver {driver.version}")


CHECKS = (
    supported,
    peer_memory,
    efa_peermem,
    open_module,
    driver_pair,
    symbols,
    dmabuf_chain,
    plugin_dmabuf,
    nvidia_peermem,
    gdrcopy,
    gpu_count,
    locality,
    expandable_segments,
    registration_log,
    fabric_manager,
    cuda_13,
)
