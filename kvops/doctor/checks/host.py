"""The machine: kernel, limits, memory, IOMMU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvops.doctor import conditions, manifest
from kvops.doctor.check import State, failed, in_group, passed, skipped, unknown, warned
from kvops.doctor.parsers import logs, pci, proc
from kvops.doctor.parsers.versions import at_least
from kvops.doctor.sources import HOUSE_RULE

if TYPE_CHECKING:
    from kvops.doctor.check import Finding
    from kvops.doctor.facts import Facts

check = in_group("host")

GIB = 1 << 30
HUGE_PAGE_BYTES_PER_ENDPOINT = 110_000_000
# Double-bit ECC, page retirement, NVLink, off the bus, uncontained ECC, GSP: the GPU needs a reset or a replacement.
HARDWARE_XIDS = "48|64|74|79|95|119|120|140"
FORK_SAFE_VARIABLES = ("FI_EFA_FORK_SAFE", "RDMAV_FORK_SAFE", "IBV_FORK_SAFE")


@check(
    "HOST-01",
    "The instance type is known",
    evidence="/sys/devices/virtual/dmi/id/product_name",
    rule="WARN if it is not in kvops' table: what to expect of it is then not checked",
    fix="Pass --instance-type, or run on the EC2 host itself",
    sources=("OFI-PLAT",),
)
def instance_type(facts: Facts) -> Finding:
    """How many EFAs and accelerators there should be follows from the type alone."""
    name = facts.instance_type
    if facts.profile is None:
        return warned(
            f"instance type {name!r} is not in the table" if name else "the machine does not say its instance type",
            f"product_name: {name or 'absent'}",
        )
    return passed(f"instance type {name}", f"product_name: {name}")


@check(
    "HOST-02",
    "The kernel can register dmabuf memory",
    evidence="/proc/version, else uname -a",
    rule="PASS from 5.12; older: WARN with a peer-memory provider, else FAIL",
    fix="Use an image with kernel 5.12 or later: Amazon Linux 2023, Ubuntu 22.04",
    sources=("DYN-EFA", "NV-GPUOP", "gvisor#13882"),
    applies=(conditions.efa, conditions.accelerator),
)
def dmabuf_kernel(facts: Facts) -> Finding:
    """Before 5.12 accelerator memory reaches the NIC only through a peer-memory module."""
    release = facts.kernel_release
    if at_least(facts.kernel, (5, 12)):
        return passed(f"kernel {release}", release)
    providers = [facts.optional(f"/sys/class/infiniband/{device.name}/device/p2p") for device in facts.efa_rdma]
    message = f"kernel {release} cannot register dmabuf memory (5.12)"
    if any(providers):
        return warned(message + "; a peer-memory provider stands in", release)
    return failed(message, release)


@check(
    "HOST-03",
    "The server may lock as much memory as it wants",
    evidence="/proc/<pid>/limits of the engines, else /proc/self/limits: Max locked memory",
    rule="FAIL below 16 GiB, WARN if finite; PASS for a process with CAP_IPC_LOCK, which the limit does not bind",
    fix=(
        "/etc/security/limits.d: '* - memlock unlimited'; systemd: LimitMEMLOCK=infinity; "
        "docker: --ulimit memlock=-1:-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK"
    ),
    sources=("LF-OVERVIEW", "A-AWS", "awsome#647"),
    applies=(conditions.rdma,),
    quick=True,
)
def memlock(facts: Facts) -> Finding:
    """Registered memory is locked memory: with a limit the registration of the KV cache fails."""
    pids = [str(engine.pid) for engine in facts.engines if engine.pid is not None] or ["self"]
    limits = {pid: proc.parse_memlock_bytes(facts.text(f"/proc/{pid}/limits")) for pid in pids}
    bound = [pid for pid in pids if not proc.may_lock_any_memory(facts.process_status(pid))]
    if not bound and proc.UNLIMITED not in limits.values():
        return passed("CAP_IPC_LOCK lifts the limit of locked memory", f"/proc/{pids[0]}/status: CapEff")
    finite = {pid: limits[pid] for pid in bound if limits[pid] != proc.UNLIMITED}
    if not finite:
        return passed("locked memory is unlimited", f"/proc/{pids[0]}/limits")
    pid, size = min(finite.items(), key=lambda item: item[1])
    evidence = f"/proc/{pid}/limits: Max locked memory {size} bytes"
    if size < 16 * GIB:
        return failed(f"only {size} bytes of memory may be locked", evidence)
    return warned(f"locked memory is limited to {size / GIB:.0f} GiB", evidence)


@check(
    "HOST-04",
    "The EFA installer's limits file is there",
    evidence="/etc/security/limits.d/01_efa.conf",
    rule="WARN if absent while locked memory is limited, else informational",
    fix="Run the EFA installer again without --skip-limit-conf",
    sources=("EC2-CHG",),
    applies=(conditions.efa,),
    explained_by=("HOST-03",),
)
def limits_file(facts: Facts) -> Finding:
    """It is what lifts the limit for logins; services and containers need their own setting."""
    if any("efa" in name for name in facts.names("/etc/security/limits.d")):
        return passed("the installer's limits file is there")
    if memlock.find(facts).state is State.PASS:
        return passed("no limits file of the installer; locked memory is unlimited without it")
    return warned("the installer's limits file is absent", "/etc/security/limits.d has no *efa*.conf")


@check(
    "HOST-05",
    "There are free huge pages for EFA",
    evidence="/proc/meminfo: HugePages_Total, HugePages_Free, Hugepagesize",
    rule="WARN if there are none, or fewer free than 110 MB for each EFA",
    fix="sysctl -w vm.nr_hugepages=N and persist it in /etc/sysctl.d; in Kubernetes see K8S-03",
    sources=("FIEFA", "bottlerocket-core-kit#141"),
    applies=(conditions.efa,),
)
def huge_pages(facts: Facts) -> Finding:
    """Libfabric takes about 110 MB of huge pages per endpoint, and NIXL opens one per rail."""
    memory = proc.parse_meminfo(facts.text("/proc/meminfo"))
    total, free, size_kib = (memory.get(name, 0) for name in ("HugePages_Total", "HugePages_Free", "Hugepagesize"))
    evidence = f"HugePages_Total {total}, HugePages_Free {free}, Hugepagesize {size_kib} kB"
    if not total:
        return warned("no huge pages are reserved", evidence)
    if size_kib > 16 * 1024:
        return passed(f"huge pages of {size_kib} kB, which libfabric does not use", evidence)
    needed = HUGE_PAGE_BYTES_PER_ENDPOINT * max(len(facts.efa_pci), 1)
    if free * size_kib * 1024 < needed and not facts.running_engines:
        return warned(f"{free} huge pages are free, {needed // (size_kib * 1024) + 1} are needed", evidence)
    return passed(f"{free} huge pages are free", evidence)


@check(
    "HOST-06",
    "Huge pages and fork safety are not both asked for",
    evidence="environment: FI_EFA_USE_HUGE_PAGE with FI_EFA_FORK_SAFE, RDMAV_FORK_SAFE or IBV_FORK_SAFE",
    rule="FAIL if both are set: libfabric aborts",
    fix="Unset one of the two; from kernel 5.13 and rdma-core 38 on fork is always safe",
    sources=("FIEFA", "LF-ENV", "OFI-SRC"),
    applies=(conditions.efa,),
)
def huge_pages_and_fork(facts: Facts) -> Finding:
    """The fork-safe mode of libibverbs cannot work with huge pages."""
    for owner, env in facts.environments.items():
        fork = [name for name in FORK_SAFE_VARIABLES if env.get(name, "0") not in {"0", ""}]
        if env.get("FI_EFA_USE_HUGE_PAGE", "0") not in {"0", ""} and fork:
            return failed(
                f"{owner} sets FI_EFA_USE_HUGE_PAGE and {fork[0]}: libfabric aborts",
                f"FI_EFA_USE_HUGE_PAGE={env['FI_EFA_USE_HUGE_PAGE']} {fork[0]}={env[fork[0]]}",
            )
    return passed("huge pages and fork safety are not both asked for")


@check(
    "HOST-07",
    "Shared memory is large enough for engines that share the host",
    evidence="df -Pk /dev/shm",
    rule="WARN below 1 GiB where several engines or ranks share the host",
    fix="docker --shm-size=16g or --ipc=host; Kubernetes: an emptyDir with medium Memory on /dev/shm",
    sources=(HOUSE_RULE,),
    applies=(conditions.engine,),
)
def shared_memory(facts: Facts) -> Finding:
    """Ranks and co-located engines talk through shared memory; a container has 64 MB of it by default."""
    if len(facts.engines) < 2 and all(engine.tensor_parallel < 2 for engine in facts.engines):
        return skipped("one engine with one rank")
    size = facts.parsed(manifest.DF_SHM, proc.parse_df_size_bytes)
    evidence = f"shared memory: {size // (1 << 20)} MiB"
    return warned("shared memory is smaller than 1 GiB", evidence) if size < GIB else passed(evidence, evidence)


@check(
    "HOST-08",
    "Processes may read each other's memory",
    evidence="/proc/sys/kernel/yama/ptrace_scope",
    rule="WARN above 0 where prefill and decode share the host",
    fix="sysctl -w kernel.yama.ptrace_scope=0 (persist in /etc/sysctl.d), or FI_EFA_ENABLE_SHM_TRANSFER=0",
    sources=("PCLUSTER-EFA", "ucx#3545"),
    applies=(conditions.one_host,),
)
def ptrace_scope(facts: Facts) -> Finding:
    """Transfers within a host use process_vm_readv, which yama forbids between strangers."""
    scope = facts.optional("/proc/sys/kernel/yama/ptrace_scope")
    if scope is None:
        return passed("yama is not in this kernel")
    if scope != "0":
        return warned("processes may not read each other's memory", f"kernel.yama.ptrace_scope = {scope}")
    return passed("ptrace_scope is 0")


@check(
    "HOST-09",
    "No IOMMU translates the traffic between EFA and accelerators",
    evidence="/sys/kernel/iommu_groups, /sys/bus/pci/devices/<address>/iommu_group/type, /proc/cmdline",
    rule="PASS without groups or with type identity, WARN for DMA and DMA-FQ",
    fix="Boot with iommu=pt",
    sources=("nvogkm#1152",),
    applies=(conditions.efa, conditions.accelerator),
)
def iommu(facts: Facts) -> Finding:
    """Peer-to-peer traffic needs passthrough: a translating IOMMU sends it up to the root and down again."""
    if not facts.names("/sys/kernel/iommu_groups"):
        return passed("no IOMMU groups, as in a Nitro guest")
    for device in (*facts.efa_pci, *facts.gpu_pci):
        kind = facts.optional(f"/sys/bus/pci/devices/{device.address}/iommu_group/type")
        if kind and kind.startswith("DMA"):
            return warned(
                f"the IOMMU translates {device.address}",
                f"iommu_group/type: {kind}; {_iommu_words(facts)}".rstrip("; "),
            )
    return passed("IOMMU groups are of type identity")


def _iommu_words(facts: Facts) -> str:
    return " ".join(word for word in (facts.optional("/proc/cmdline") or "").split() if "iommu" in word)


@check(
    "HOST-10",
    "No access control redirects peer-to-peer traffic",
    evidence="lspci -vvv (as root): ACSCtl with ReqRedir+ or CmpltRedir+",
    rule="WARN on bare metal; informational in a guest, which cannot and must not change it",
    fix="On bare metal: turn off ACS redirection on the bridges between GPU and EFA",
    sources=("NCCL-TS", "NV-VM"),
    applies=(conditions.efa, conditions.accelerator),
)
def access_control(facts: Facts) -> Finding:
    """ACS redirection sends peer-to-peer traffic through the root complex."""
    text = facts.output(manifest.LSPCI_VERBOSE).stdout
    if not pci.shows_acs(text):
        return unknown("lspci shows no capabilities: it needs root")
    bridges = pci.parse_redirecting_bridges(text)
    if bridges and ".metal" in facts.instance_type:
        return warned(f"{len(bridges)} bridges redirect peer-to-peer traffic", f"first: {bridges[0]}")
    if bridges:
        return passed("bridges redirect, which a guest leaves alone", f"first: {bridges[0]}")
    return passed("no bridge redirects")


@check(
    "HOST-11",
    "Every EFA and accelerator has a NUMA node",
    evidence="/sys/bus/pci/devices/<address>/numa_node",
    rule="WARN on -1: NIXL and NCCL then guess which NIC is near",
    fix="Give the container the full /sys; look for numa=off on the kernel command line",
    sources=("NIXL-TOPO",),
    applies=(conditions.efa, conditions.accelerator),
)
def numa_nodes(facts: Facts) -> Finding:
    """Which rail serves which accelerator is decided by locality."""
    devices = (*facts.efa_pci, *facts.gpu_pci, *facts.neuron_pci)
    for device in devices:
        node = facts.optional(f"/sys/bus/pci/devices/{device.address}/numa_node")
        if node is None or node == "-1":
            return warned(f"{device.address} has no NUMA node", f"numa_node: {node or 'absent'}")
    return passed(f"{len(devices)} devices have a NUMA node")


@check(
    "HOST-12",
    "The kernel is built with peer-to-peer DMA",
    evidence="/boot/config-<release> or /proc/config.gz: CONFIG_PCI_P2PDMA, CONFIG_INFINIBAND_USER_ACCESS",
    rule="WARN if one is off and no peer-memory provider is there",
    fix="Use a kernel with CONFIG_PCI_P2PDMA=y",
    sources=("talos-pkgs#1356", "EFA-KCONFIG"),
    applies=(conditions.gpudirect,),
)
def kernel_options(facts: Facts) -> Finding:
    """Dmabuf between devices needs it; distributions of their own making leave it out."""
    options = facts.kernel_options
    off = [n for n in ("CONFIG_PCI_P2PDMA", "CONFIG_INFINIBAND_USER_ACCESS") if options.get(n, "n") == "n"]
    if not options:
        return unknown("the kernel configuration names no option")
    if not off:
        return passed("CONFIG_PCI_P2PDMA and CONFIG_INFINIBAND_USER_ACCESS are on")
    if "efa_nv_peermem" in facts.modules:
        return passed(f"{off[0]} is off; efa_nv_peermem stands in")
    return warned(f"the kernel lacks {', '.join(off)}", f"{off[0]} is not set")


@check(
    "HOST-13",
    "The page size is one that libfabric handles",
    evidence="getconf PAGESIZE, fi_info --version",
    rule="FAIL for 64 KiB pages with libfabric before 2.5.1",
    fix="Upgrade the EFA installer to one with libfabric 2.5.1 or later",
    sources=("libfabric#12019",),
    applies=(conditions.efa,),
)
def page_size(facts: Facts) -> Finding:
    """Registering CUDA memory fails with EFAULT on 64 KiB pages before 2.5.1."""
    size = facts.page_size
    if size == 65536 and not at_least(facts.libfabric_version, (2, 5, 1)):
        return failed(f"64 KiB pages with libfabric {facts.libfabric}", f"PAGESIZE {size}")
    return passed(f"pages of {size} bytes", f"PAGESIZE {size}")


@check(
    "HOST-14",
    "The kernel log has no complaints of the drivers",
    evidence="dmesg",
    rule=(
        "FAIL for efa commands that fail (ALLOC_PD, REG_MR, CREATE_QP) and an NVRM Xid of broken hardware; WARN for "
        "another Xid, which a program alone can cause; DEREG_MR -22 is harmless"
    ),
    fix="Reload or upgrade the efa driver; reboot; replace the instance",
    sources=("aws-ofi-nccl#22", "NEU-TS", "NV-XID"),
    applies=(conditions.efa,),
)
def kernel_log(facts: Facts) -> Finding:
    """The device says no in the kernel log, whatever the program then prints."""
    faults = rf"Failed to process command (?:ALLOC_PD|REG_MR|CREATE_QP)|NVRM: Xid \(.*?\): (?:{HARDWARE_XIDS}),"
    lines = logs.matching(facts.kernel_log, faults)
    if lines:
        return failed(f"the kernel log has {len(lines)} complaints of the drivers", lines[-1][:160])
    lines = logs.matching(facts.kernel_log, r"NVRM: Xid")
    if lines:
        return warned(f"the kernel log has {len(lines)} Xid that a program may have caused", lines[-1][:160])
    if logs.matching(facts.kernel_log, r"Failed to process command DEREG_MR .* err -22"):
        return passed("only DEREG_MR err -22, harmless after a Neuron process has ended")
    return passed("no complaints in the kernel log")


CHECKS = (
    instance_type,
    dmabuf_kernel,
    memlock,
    limits_file,
    huge_pages,
    huge_pages_and_fork,
    shared_memory,
    ptrace_scope,
    iommu,
    access_control,
    numa_nodes,
    kernel_options,
    page_size,
    kernel_log,
)
