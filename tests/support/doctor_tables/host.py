"""What must be noticed on the machine itself."""

from __future__ import annotations

from doctor_cases import FAIL, PASS, UNKNOWN, WARN, Case, Scene, colocated
from doctor_hosts import KERNEL, limits

ENGINE_LIMITS = "/proc/4242/limits"


def use_old_kernel(scene: Scene) -> None:
    scene.host.file("/proc/version", "Linux version 5.10.226-214.880.amzn2.x86_64 (mockbuild@build)\n")


def use_old_kernel_without_peer_memory(scene: Scene) -> None:
    use_old_kernel(scene)
    for device in scene.host.listings["/sys/class/infiniband"]:
        scene.host.file(f"/sys/class/infiniband/{device}/device/p2p", "\n")


def translate(scene: Scene) -> None:
    scene.host.listing("/sys/kernel/iommu_groups", "1").file("/proc/cmdline", "root=x intel_iommu=on")
    scene.host.file("/sys/bus/pci/devices/0000:55:00.0/iommu_group/type", "DMA-FQ\n")


def limit_with_capability(scene: Scene) -> None:
    scene.host.file(ENGINE_LIMITS, limits(65536)).file("/proc/4242/status", "CapEff:\t00000000a80465fb\n")


def use_metal(scene: Scene) -> None:
    scene.host.file("/sys/devices/virtual/dmi/id/product_name", "p9.metal\n")
    scene.host.replace("lspci -vvv", "ReqRedir- CmpltRedir-", "ReqRedir+ CmpltRedir+")


def use_64k_pages(scene: Scene) -> None:
    scene.host.command("getconf PAGESIZE", "65536\n")
    scene.host.command("fi_info --version", "fi_info: 2.4.0amzn3.0\nlibfabric: 2.4.0amzn3.0\nlibfabric api: 2.4\n")


def turn_p2pdma_off(scene: Scene) -> None:
    scene.host.replace(f"/boot/config-{KERNEL}", "P2PDMA=y", "X=y")


def turn_p2pdma_off_without_peer_memory(scene: Scene) -> None:
    turn_p2pdma_off(scene)
    scene.host.listings["/sys/module"].remove("efa_nv_peermem")


CASES = (
    Case("HOST-01", WARN, "'KVM'", lambda s: s.host.file("/sys/devices/virtual/dmi/id/product_name", "KVM\n")),
    Case("HOST-01", WARN, "does not say", lambda s: s.host.absent("/sys/devices/virtual/dmi/id/product_name")),
    Case("HOST-02", WARN, "peer-memory provider", use_old_kernel),
    Case("HOST-02", FAIL, "cannot register dmabuf", use_old_kernel_without_peer_memory),
    Case("HOST-03", FAIL, "8388608", lambda s: s.host.file(ENGINE_LIMITS, limits(8388608))),
    Case("HOST-03", PASS, "CAP_IPC_LOCK", limit_with_capability),
    Case("HOST-03", WARN, "64 GiB", lambda s: s.host.file(ENGINE_LIMITS, limits(64 << 30))),
    Case("HOST-04", PASS, "without it", lambda s: s.host.listing("/etc/security/limits.d")),
    Case(
        "HOST-04",
        WARN,
        "absent",
        lambda s: s.host.listing("/etc/security/limits.d").file(ENGINE_LIMITS, limits(65536)),
    ),
    Case("HOST-05", WARN, "no huge pages", lambda s: s.host.replace("/proc/meminfo", "Total: 21121", "Total: 0")),
    Case(
        "HOST-05",
        WARN,
        "12 huge pages are free",
        lambda s: s.host.replace("/proc/meminfo", "Free: 21121", "Free: 12").without("/proc/4").listing("/proc"),
    ),
    Case("HOST-05", PASS, "does not use", lambda s: s.host.replace("/proc/meminfo", "2048 kB", "1048576 kB")),
    Case("HOST-06", FAIL, "aborts", lambda s: s.host.env(FI_EFA_USE_HUGE_PAGE="1", FI_EFA_FORK_SAFE="1")),
    Case("HOST-07", WARN, "64 MiB", lambda s: s.host.replace("df -Pk /dev/shm", "1048576000", "65536"), colocated),
    Case("HOST-08", WARN, "ptrace_scope = 1", lambda s: s.host.file("/proc/sys/kernel/yama/ptrace_scope", "1\n")),
    Case("HOST-09", WARN, "intel_iommu=on", translate),
    Case("HOST-10", WARN, "redirect", use_metal),
    Case(
        "HOST-10",
        PASS,
        "a guest leaves alone",
        lambda s: s.host.replace("lspci -vvv", "ReqRedir- CmpltRedir-", "ReqRedir+ CmpltRedir+"),
    ),
    Case("HOST-10", UNKNOWN, "needs root", lambda s: s.host.command("lspci -vvv", "00:01.0 Bridge: Amazon\n")),
    Case("HOST-11", WARN, "-1", lambda s: s.host.file("/sys/bus/pci/devices/0000:59:00.0/numa_node", "-1\n")),
    Case("HOST-12", PASS, "stands in", turn_p2pdma_off),
    Case("HOST-12", WARN, "lacks CONFIG_PCI_P2PDMA", turn_p2pdma_off_without_peer_memory),
    Case("HOST-13", FAIL, "64 KiB pages with libfabric 2.4.0", use_64k_pages),
    Case(
        "HOST-14",
        FAIL,
        "complaints",
        lambda s: s.host.command(
            "dmesg", "infiniband efa_0: Failed to process command ALLOC_PD (opcode 14) comp_status 1 err -12\n"
        ),
    ),
    Case(
        "HOST-14", WARN, "a program", lambda s: s.host.command("dmesg", "NVRM: Xid (PCI:0000:59:00): 31, MMU Fault\n")
    ),
    Case("HOST-14", FAIL, "Xid", lambda s: s.host.command("dmesg", "NVRM: Xid (PCI:0000:59:00): 79, GPU has fallen\n")),
    Case(
        "HOST-14",
        PASS,
        "harmless",
        lambda s: s.host.command(
            "dmesg", "efa_0: Failed to process command DEREG_MR (opcode 8) comp_status 1 err -22\n"
        ),
    ),
)

GONE = {
    "HOST-01": ("/sys/devices/virtual/dmi",),
    "HOST-02": ("/proc/version", "uname"),
    "HOST-03": (ENGINE_LIMITS,),
    "HOST-04": ("/etc/security",),
    "HOST-05": ("/proc/meminfo",),
    "HOST-06": ("/proc/4242/environ",),
    "HOST-07": ("df",),
    "HOST-08": ("/proc/sys/kernel/yama",),
    "HOST-09": ("/sys/kernel/iommu_groups",),
    "HOST-10": ("lspci",),
    "HOST-11": ("/sys/bus/pci/devices/0000:59:00.0/numa_node",),
    "HOST-12": ("/boot", "/proc/config.gz"),
    "HOST-13": ("getconf",),
    "HOST-14": ("dmesg",),
}
