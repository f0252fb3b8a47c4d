"""What the doctor reads of a machine: the paths that a capture takes, and the commands that checks look at."""

from __future__ import annotations

FI_INFO_VERSION = ("fi_info", "--version")
FI_INFO_EFA = ("fi_info", "-p", "efa")
FI_INFO_HMEM = ("fi_info", "-p", "efa", "-c", "FI_HMEM")
FI_INFO_VARIABLES = ("fi_info", "-e")
IBV_DEVINFO = ("ibv_devinfo", "-v")
RDMA_STATISTIC = ("rdma", "-p", "statistic", "show")
LSPCI = ("lspci", "-D", "-nn")
LSPCI_VERBOSE = ("lspci", "-vvv")
UNAME = ("uname", "-a")
PAGE_SIZE = ("getconf", "PAGESIZE")
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, nothing is written there
DF_SHM = ("df", "-Pk", SHARED_MEMORY)
LS_INFINIBAND = ("ls", "-l", "/dev/infiniband")
DMESG = ("dmesg",)
LDCONFIG = ("ldconfig", "-p")
DPKG = ("dpkg-query", "-W")
RPM = ("rpm", "-qa", "--qf", "%{NAME}\t%{VERSION}-%{RELEASE}\n")
MODINFO_EFA = ("modinfo", "efa")
MODINFO_NEURON = ("modinfo", "neuron")
DKMS = ("dkms", "status")
OFED_INFO = ("ofed_info", "-s")
NVIDIA_TOPOLOGY = ("nvidia-smi", "topo", "-m")
NVIDIA_GPUS = ("nvidia-smi", "-L")
FABRIC_MANAGER = ("systemctl", "is-active", "nvidia-fabricmanager")
GDRCOPY_SANITY = ("gdrcopy_sanity",)
UCX_DEVICES = ("ucx_info", "-d")
UCX_VERSION = ("ucx_info", "-v")
NEURON_LS = ("neuron-ls", "-j")
NEURON_LS_TABLE = ("neuron-ls",)
KUBECTL_NODES = ("kubectl", "get", "nodes", "-o", "json")
KUBECTL_PODS = ("kubectl", "get", "pods", "-A", "-o", "json")
KUBECTL_DAEMONSETS = ("kubectl", "get", "daemonsets", "-A", "-o", "json")
KUBECTL_WARNINGS = ("kubectl", "get", "events", "-A", "--field-selector=type=Warning", "-o", "json")
KUBECTL_DEVICE_CLASSES = ("kubectl", "get", "deviceclasses", "-o", "json")

SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES", "VLLM_HOST_IFNAME")

# gdrcopy_sanity allocates GPU memory: it is read from a snapshot that has it, and never run.
COMMANDS = (
    FI_INFO_VERSION,
    FI_INFO_EFA,
    FI_INFO_HMEM,
    FI_INFO_VARIABLES,
    IBV_DEVINFO,
    RDMA_STATISTIC,
    LSPCI,
    LSPCI_VERBOSE,
    UNAME,
    PAGE_SIZE,
    DF_SHM,
    LS_INFINIBAND,
    DMESG,
    LDCONFIG,
    DPKG,
    RPM,
    MODINFO_EFA,
    MODINFO_NEURON,
    DKMS,
    OFED_INFO,
    NVIDIA_TOPOLOGY,
    NVIDIA_GPUS,
    FABRIC_MANAGER,
    UCX_DEVICES,
    UCX_VERSION,
    NEURON_LS,
    NEURON_LS_TABLE,
    KUBECTL_NODES,
    KUBECTL_PODS,
    KUBECTL_DAEMONSETS,
    KUBECTL_WARNINGS,
    KUBECTL_DEVICE_CLASSES,
)

# No check looks at these: they are captured for the person who reads the bundle.
FOR_PEOPLE = (
    ("fi_info", "-p", "efa", "-v"),
    ("ibv_devices",),
    ("lspci", "-tv"),
    ("nvidia-smi", "-q"),
    ("rdma", "link"),
)

# A pattern with a trailing slash takes the listing, "->" the link target; "*" matches one segment.
PATHS = (
    "/sys/devices/virtual/dmi/id/product_name",
    "/sys/devices/virtual/dmi/id/sys_vendor",
    "/etc/os-release",
    "/proc/cmdline",
    "/proc/version",
    "/proc/modules",
    "/proc/meminfo",
    "/proc/self/limits",
    "/proc/self/environ",
    "/proc/1/limits",
    "/proc/driver/nvidia/version",
    "/proc/driver/nvidia/gpus/",
    "/proc/sys/kernel/yama/ptrace_scope",
    "/proc/sys/vm/nr_hugepages",
    "/sys/kernel/mm/hugepages/*/nr_hugepages",
    "/sys/kernel/mm/hugepages/*/free_hugepages",
    "/sys/kernel/mm/memory_peers/*/version",
    "/sys/devices/system/node/online",
    "/sys/kernel/iommu_groups/",
    "/proc/config.gz",
    "/sys/bus/pci/devices/*/vendor",
    "/sys/bus/pci/devices/*/device",
    "/sys/bus/pci/devices/*/class",
    "/sys/bus/pci/devices/*/numa_node",
    "/sys/bus/pci/devices/*/current_link_speed",
    "/sys/bus/pci/devices/*/current_link_width",
    "/sys/bus/pci/devices/*/max_link_speed",
    "/sys/bus/pci/devices/*/max_link_width",
    "/sys/bus/pci/devices/*/iommu_group/type",
    "/sys/bus/pci/devices/*/driver->",
    "/sys/bus/pci/devices/*->",
    "/sys/class/infiniband/*/device->",
    "/sys/class/infiniband/*/device/vendor",
    "/sys/class/infiniband/*/device/p2p",
    "/sys/class/infiniband/*/device/gdr",
    "/sys/class/infiniband/*/ports/1/state",
    "/sys/class/infiniband/*/ports/1/phys_state",
    "/sys/class/infiniband/*/ports/1/rate",
    "/sys/class/infiniband/*/ports/1/link_layer",
    "/sys/class/infiniband/*/node_type",
    "/sys/class/infiniband/*/fw_ver",
    "/sys/class/infiniband/*/ports/1/hw_counters/*",
    "/sys/class/infiniband/*/hw_counters/*",
    "/sys/class/infiniband_verbs/*/ibdev",
    "/sys/class/net/*/statistics/rx_bytes",
    "/sys/class/net/*/statistics/tx_bytes",
    "/sys/module/",
    "/sys/module/efa/version",
    "/sys/module/ib_core/version",
    "/sys/module/ib_uverbs/version",
    "/sys/module/nvidia/version",
    "/sys/module/nvidia_peermem/version",
    "/sys/module/nv_peer_mem/version",
    "/sys/module/efa_nv_peermem/version",
    "/sys/module/gdrdrv/version",
    "/sys/module/neuron/version",
    "/sys/devices/virtual/neuron_device/*/core_count",
    "/sys/devices/virtual/neuron_device/*/connected_devices",
    "/sys/devices/virtual/neuron_device/*/stats/hardware/mem_ecc_uncorrected",
    "/sys/devices/virtual/neuron_device/*/stats/hardware/sram_ecc_uncorrected",
    "/sys/devices/virtual/neuron_device/*/stats/hardware/health_status/unhealthy_components",
    "/opt/amazon/efa_installed_packages",
    "/opt/nvidia/",
    "/etc/security/limits.d/",
    "/etc/security/limits.d/01_efa.conf",
    "/etc/modules-load.d/",
    "/etc/modules-load.d/efa.conf",
    "/etc/infiniband/",
    "/etc/libibverbs.d/",
    "/etc/libibverbs.d/efa.driver",
    "/usr/lib/x86_64-linux-gnu/libibverbs/",
    "/usr/lib/aarch64-linux-gnu/libibverbs/",
    "/usr/lib64/libibverbs/",
    "/dev/",
    "/dev/infiniband/",
)


def metrics_command(tail: str) -> tuple[str, ...]:
    """Return the command that reads an engine's metrics; the tail is ``:<port>/metrics``."""
    return ("curl", "-sS", "--max-time", "3", f"http://127.0.0.1{tail}")


def reachable_command(host: str, port: int) -> tuple[str, ...]:
    """Return the command that tells whether a TCP port accepts connections."""
    return ("nc", "-z", "-w", "2", host, str(port))
