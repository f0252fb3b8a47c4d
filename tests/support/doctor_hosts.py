"""Whole hosts as snapshots, built from the documented outputs of their tools."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field

from kvops.doctor.snapshot import SnapshotHost

SITE = "/opt/venv/lib/python3.12/site-packages"
SERVER_PID = 4242
WORKER_PID = 4311
LOG = "/var/log/vllm/decode.log"
KERNEL = "6.1.119-129.201.amzn2023.x86_64"
PORT_COUNTERS = {
    "tx_bytes": 991_000,
    "rx_bytes": 882_000,
    "rx_drops": 0,
    "send_bytes": 4096,
    "rdma_read_bytes": 77_309_411_328,
    "rdma_read_wr_err": 0,
    "rdma_write_bytes": 0,
    "rdma_write_wr_err": 0,
    "retrans_pkts": 0,
    "retrans_timeout_events": 0,
    "unresponsive_remote_events": 0,
    "impaired_remote_conn_events": 0,
}
DEVICE_COUNTERS = ("cmds_err", "no_completion_cmds", "reg_mr_err", "create_qp_err", "create_ah_err", "alloc_pd_err")


@dataclass
class Fixture:
    """A snapshot under construction; edits return it so that they chain."""

    files: dict[str, str] = field(default_factory=dict)
    listings: dict[str, list[str]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    commands: dict[tuple[str, ...], tuple[str, str, int]] = field(default_factory=dict)
    not_captured: list[dict[str, object]] = field(default_factory=list)
    python_paths: list[str] = field(default_factory=lambda: [SITE])

    def file(self, path: str, text: str | int) -> Fixture:
        """Write a file, and put it into its folder's listing where there is one."""
        self.files[path] = f"{text}"
        folder, _, name = path.rpartition("/")
        if folder in self.listings and name not in self.listings[folder]:
            self.listings[folder].append(name)
        return self

    def listing(self, path: str, *names: str) -> Fixture:
        self.listings[path] = list(names)
        return self

    def link(self, path: str, target: str) -> Fixture:
        self.links[path] = target
        return self

    def command(self, argv: str, stdout: str = "", stderr: str = "", status: int = 0) -> Fixture:
        self.commands[tuple(argv.split())] = (stdout, stderr, status)
        return self

    def absent(self, *paths: str) -> Fixture:
        """Say that paths or commands are known not to exist."""
        for path in paths:
            for store in (self.files, self.listings, self.links):
                store.pop(path, None)
            self.commands.pop(tuple(path.split()), None)
            self.not_captured.append({"path": path, "why": "absent"})
        return self

    def without(self, *prefixes: str) -> Fixture:
        """Take evidence away, as if it had not been captured: paths and commands that start so."""
        for store in (self.files, self.listings, self.links):
            for path in [path for path in store if path.startswith(prefixes)]:
                del store[path]
        for argv in [argv for argv in self.commands if " ".join(argv).startswith(prefixes)]:
            del self.commands[argv]
        self.not_captured = [g for g in self.not_captured if not str(g.get("path", "")).startswith(prefixes)]
        return self

    def replace(self, path: str, old: str, new: str) -> Fixture:
        """Change a text inside a file or, where the path is a command line, inside its output."""
        argv = tuple(path.split())
        if argv in self.commands:
            stdout, stderr, status = self.commands[argv]
            assert old in stdout, (path, old)
            self.commands[argv] = (stdout.replace(old, new), stderr, status)
        else:
            assert old in self.files[path], (path, old)
            self.files[path] = self.files[path].replace(old, new)
        return self

    def env(self, **variables: str) -> Fixture:
        """Set variables of the engine, or unset one with None."""
        path = f"/proc/{SERVER_PID}/environ"
        pairs = dict(entry.split("=", 1) for entry in self.files[path].split("\0") if entry)
        pairs.update(variables)
        return self.file(path, "\0".join(f"{name}={value}" for name, value in pairs.items() if value is not None))

    def log(self, text: str) -> Fixture:
        return self.file(LOG, text)

    def copy(self) -> Fixture:
        return copy.deepcopy(self)

    def members(self) -> dict[str, bytes]:
        members = {f"root{path}": text.encode() for path, text in self.files.items()}
        members |= {f"root{path}/.listing": "\n".join(names).encode() for path, names in self.listings.items()}
        members |= {f"root{path}.link": target.encode() for path, target in self.links.items()}
        index = []
        for number, (argv, (stdout, stderr, status)) in enumerate(self.commands.items()):
            names = f"{number:02}.out", f"{number:02}.err"
            index.append({"argv": list(argv), "exit": status, "stdout": names[0], "stderr": names[1]})
            members[f"commands/{names[0]}"], members[f"commands/{names[1]}"] = stdout.encode(), stderr.encode()
        members["commands/index.json"] = json.dumps(index).encode()
        meta = {"kvops": "0.1.0", "python_paths": self.python_paths, "not_captured": self.not_captured}
        members["meta.json"] = json.dumps(meta).encode()
        return members

    def host(self) -> SnapshotHost:
        return SnapshotHost(self.members())


def base(instance_type: str) -> Fixture:
    """An AL2023 host with the EFA stack, without devices."""
    host = Fixture()
    host.listing("/sys/bus/pci/devices").listing("/sys/class/infiniband").listing("/sys/class/infiniband_verbs")
    host.listing("/dev", "null", "infiniband").listing("/dev/infiniband").listing(
        "/proc", "self", "sys", "driver", "cmdline", "version", "meminfo"
    )
    host.listing("/sys/module", "ib_core", "ib_uverbs", "efa").listing("/sys/class/net", "eth0", "lo")
    host.listing("/sys/kernel/iommu_groups").listing("/etc/security/limits.d", "01_efa.conf")
    host.listing("/etc/modules-load.d", "efa.conf").listing("/etc/infiniband")
    host.listing("/usr/lib64/libibverbs", "libefa-rdmav59.so", "libmlx5-rdmav59.so")
    host.absent("/usr/lib/x86_64-linux-gnu/libibverbs", "/usr/lib/aarch64-linux-gnu/libibverbs")
    host.file("/sys/devices/virtual/dmi/id/product_name", instance_type + "\n")
    host.file("/proc/version", f"Linux version {KERNEL} (mockbuild@ip-10-0-0-7) (gcc 11.4.1) #1 SMP\n")
    host.file("/proc/cmdline", "BOOT_IMAGE=/boot/vmlinuz root=UUID=0 ro\n")
    host.file(
        "/proc/meminfo",
        "MemTotal: 2097152000 kB\nHugePages_Total: 21121\nHugePages_Free: 21121\nHugepagesize:    2048 kB\n",
    )
    host.file("/proc/self/limits", limits("unlimited")).file("/proc/1/limits", limits("unlimited"))
    host.file("/proc/self/environ", "PATH=/usr/bin")
    host.file(f"/boot/config-{KERNEL}", "CONFIG_PCI_P2PDMA=y\nCONFIG_INFINIBAND_USER_ACCESS=m\n")
    host.file("/etc/os-release", 'NAME="Amazon Linux"\nVERSION_ID="2023"\n')
    host.file("/sys/module/efa/version", "3.0.0g\n")
    host.file("/opt/amazon/efa_installed_packages", "# EFA installer version: 1.50.0\nefa-3.0.0-1.amzn2023.noarch\n")
    host.file("/sys/class/net/eth0/statistics/rx_bytes", 1000).file("/sys/class/net/eth0/statistics/tx_bytes", 1000)
    host.command("getconf PAGESIZE", "4096\n").command("dmesg", "[    9.1] Elastic Fabric Adapter (EFA) v3.0.0g\n")
    host.command("modinfo efa", f"filename: /lib/efa.ko\nversion: 3.0.0g\nvermagic:       {KERNEL} SMP\n")
    host.command("dkms status", f"efa/3.0.0, {KERNEL}, x86_64: installed\n")
    host.absent("ofed_info -s", "kubectl get nodes -o json")
    host.command("fi_info --version", "fi_info: 2.6.0amzn1.0\nlibfabric: 2.6.0amzn1.0\nlibfabric api: 2.6\n")
    host.command(
        "fi_info -e",
        "# FI_EFA_IFACE: String\n# FI_EFA_ENABLE_SHM_TRANSFER: Boolean (0/1)\n"
        "# FI_EFA_USE_DEVICE_RDMA: Boolean\n# FI_EFA_USE_HUGE_PAGE: Boolean\n# FI_EFA_FORK_SAFE: Boolean\n",
    )
    host.command(
        "ldconfig -p",
        "1512 libs found in cache\n"
        "\tlibfabric.so.1 (libc6,x86-64) => /opt/amazon/efa/lib64/libfabric.so.1\n"
        "\tlibefa.so.1 (libc6,x86-64) => /lib64/libefa.so.1\n",
    )
    host.command(
        "lspci -vvv",
        "00:01.0 PCI bridge: Amazon.com, Inc. Device 0200\n\tCapabilities: [100 v1] Access "
        "Control Services\n\t\tACSCtl:\tSrcValid- TransBlk- ReqRedir- CmpltRedir-\n",
    )
    packages = {
        "rdma-core": "59.amzn0-1",
        "libibverbs": "59.amzn0-1",
        "libfabric-aws": "2.6.0amzn1.0-1",
        "libnccl-ofi": "1.19.2-1",
    }
    host.commands["rpm", "-qa", "--qf", "%{NAME}\t%{VERSION}-%{RELEASE}\n"] = (rpm(packages), "", 0)
    host.absent("dpkg-query -W")
    return host


def rpm(packages: dict[str, str]) -> str:
    return "".join(f"{name}\t{version}\n" for name, version in packages.items())


def limits(memlock: str | int) -> str:
    return (
        "Limit                     Soft Limit           Hard Limit           Units\n"
        "Max stack size            8388608              unlimited            bytes\n"
        f"Max locked memory         {memlock:<20} {memlock:<20} bytes\n"
    )


def add_pci(host: Fixture, address: str, vendor: str, device: str, pci_class: str, driver: str, numa: int) -> None:
    folder = f"/sys/bus/pci/devices/{address}"
    host.listings["/sys/bus/pci/devices"].append(address)
    host.file(folder + "/vendor", f"0x{vendor}\n").file(folder + "/device", f"0x{device}\n")
    host.file(folder + "/class", f"0x{pci_class}00\n").file(folder + "/numa_node", f"{numa}\n")
    host.link(folder + "/driver", f"../../../bus/pci/drivers/{driver}").absent(folder + "/iommu_group/type")


def add_rdma(host: Fixture, name: str, address: str, vendor: str, rate: str, p2p: str | None) -> None:
    folder = f"/sys/class/infiniband/{name}"
    number = len(host.listings["/sys/class/infiniband"])
    host.listings["/sys/class/infiniband"].append(name)
    host.listings["/sys/class/infiniband_verbs"].append(f"uverbs{number}")
    host.listings["/dev/infiniband"].append(f"uverbs{number}")
    host.file(f"/sys/class/infiniband_verbs/uverbs{number}/ibdev", name + "\n")
    host.link(folder + "/device", f"../../../{address}").file(folder + "/device/vendor", f"0x{vendor}\n")
    if p2p is None:
        host.absent(folder + "/device/p2p", folder + "/device/gdr")
    else:
        host.file(folder + "/device/p2p", p2p + "\n")
    host.file(folder + "/ports/1/state", "4: ACTIVE\n").file(folder + "/ports/1/phys_state", "5: LinkUp\n")
    host.file(folder + "/ports/1/rate", rate + "\n")
    host.listing(folder + "/hw_counters").listing(folder + "/ports/1/hw_counters")
    for counter in DEVICE_COUNTERS:
        host.file(f"{folder}/hw_counters/{counter}", "0\n")
    for counter, value in PORT_COUNTERS.items():
        host.file(f"{folder}/ports/1/hw_counters/{counter}", f"{value}\n")


def rdma_name(address: str) -> str:
    """The name that systemd gives: bus and slot of the PCI address in decimal."""
    _, bus, rest = address.split(":")
    return f"rdmap{int(bus, 16)}s{int(rest.split('.')[0], 16)}"


def add_efas(host: Fixture, addresses: list[str], device: str, rate: str, p2p: str | None, link: str = "") -> None:
    entries, nodes = "", "total 0\n"
    for number, address in enumerate(addresses):
        name = rdma_name(address)
        add_pci(host, address, "1d0f", device, "0200", "efa", int(number >= len(addresses) / 2))
        add_rdma(host, name, address, "1d0f", rate, p2p)
        nodes += f"crw-rw-rw- 1 root root 231, {192 + number} Nov  1 10:00 uverbs{number}\n"
        speed, _, width = link.partition(" x")
        folder = f"/sys/bus/pci/devices/{address}"
        host.file(folder + "/current_link_speed", f"{speed or 'Unknown'}\n")
        host.file(folder + "/current_link_width", f"{width or 0}\n")
        for fabric, suffix, kind in (("efa-direct", "rdm", "RDM"), ("efa", "rdm", "RDM"), ("efa", "dgrm", "DGRAM")):
            entries += (
                f"provider: efa\n    fabric: {fabric}\n    domain: {name}-{suffix}\n    version: 206.0\n"
                f"    type: FI_EP_{kind}\n    protocol: FI_PROTO_EFA\n"
            )
    host.command("fi_info -p efa", entries).command("fi_info -p efa -c FI_HMEM", entries)
    host.command("ls -l /dev/infiniband", nodes)


def add_gpus(host: Fixture, addresses: list[str], nearest: str) -> None:
    """NVIDIA GPUs with the open driver; ``nearest`` is their relation to every NIC in topo -m."""
    for number, address in enumerate(addresses):
        add_pci(host, address, "10de", "2335", "0302", "nvidia", int(number >= len(addresses) / 2))
    host.listing("/proc/driver/nvidia/gpus", *addresses)
    host.file(
        "/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  "
        "Release Build  (dvs-builder)\nGCC version:  gcc version 11.4.1\n",
    )
    host.listings["/sys/module"] += ["nvidia", "efa_nv_peermem", "gdrdrv"]
    host.listings["/dev"] += ["gdrdrv", *(f"nvidia{number}" for number in range(len(addresses)))]
    host.file("/sys/module/efa_nv_peermem/version", "1.2.2\n").file("/sys/module/gdrdrv/version", "2.5\n")
    host.command("systemctl is-active nvidia-fabricmanager", "active\n")
    gpus = [f"GPU{number}" for number in range(len(addresses))]
    rows = "".join(
        f"{gpu}\t" + "\t".join(" X " if gpu == other else "NV18" for other in gpus) + f"\t{nearest}\t0-95\t0\tN/A\n"
        for gpu in gpus
    )
    host.command(
        "nvidia-smi topo -m",
        "\x1b[4m\t" + "\t".join(gpus) + "\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA "
        f"ID\x1b[0m\n{rows}\nLegend:\n\n  X    = Self\n\nNIC Legend:\n\n  NIC0: rdmap85s0\n",
    )
    host.replace("dmesg", "v3.0.0g\n", "v3.0.0g\n[   12.0] efa: Acquired peer memory using P2P\n")


def add_engine(
    host: Fixture, config: dict[str, object] | None = None, accelerator: str = "CUDA for 8 NVIDIA GPU(s)"
) -> None:
    """One vLLM engine that uses NIXL over LIBFABRIC, its log and its packages."""
    kv = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cuda",
        "kv_connector_extra_config": {"backends": ["LIBFABRIC"]},
    } | (config or {})
    argv = (
        "/opt/venv/bin/python",
        "/opt/venv/bin/vllm",
        "serve",
        "Qwen/Qwen3-32B",
        "--port",
        "8100",
        "--tensor-parallel-size",
        "8",
        "--kv-transfer-config",
        json.dumps(kv),
    )
    host.listings["/proc"] += [str(SERVER_PID), str(WORKER_PID)]
    host.file(f"/proc/{SERVER_PID}/cmdline", "\0".join(argv) + "\0")
    host.file(f"/proc/{SERVER_PID}/environ", "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.1.17\0VLLM_NIXL_SIDE_CHANNEL_PORT=5600")
    host.file(f"/proc/{SERVER_PID}/limits", limits("unlimited"))
    host.file(f"/proc/{WORKER_PID}/cmdline", "VLLM::EngineCore\0")
    plugin = f"{SITE}/.nixl_cu12.mesonpy.libs/plugins/libplugin_LIBFABRIC.so"
    host.file(f"/proc/{SERVER_PID}/maps", f"7f0000-7f0001 r-xp 00000000 103:01 11 {SITE}/torch/lib/libtorch.so\n")
    host.file(
        f"/proc/{WORKER_PID}/maps",
        f"7f0000-7f0001 r-xp 00000000 103:01 12 {plugin}\n"
        "7f0002-7f0003 r-xp 00000000 103:01 13 /opt/amazon/efa/lib64/libfabric.so.1.30.0\n",
    )
    host.link(f"/proc/{SERVER_PID}/fd/1", LOG).link(f"/proc/{SERVER_PID}/fd/2", LOG)
    host.listing(
        SITE,
        "vllm-0.32.0.dist-info",
        "nixl-1.5.1.dist-info",
        "nixl_cu12-1.5.1.dist-info",
        "torch-2.9.0+cu128.dist-info",
        ".nixl_cu12.mesonpy.libs",
        "nixl_cu12.libs",
    )
    host.listing(f"{SITE}/.nixl_cu12.mesonpy.libs/plugins", "libplugin_LIBFABRIC.so", "libplugin_UCX.so")
    host.listing(f"{SITE}/nixl_cu12.libs/ucx", "libuct_ib.so.0.0.0", "libuct_ib_efa.so.0.0.0")
    host.command(
        f"ldd {plugin}",
        "\tlibfabric.so.1 => /opt/amazon/efa/lib64/libfabric.so.1 (0x00007f)\n"
        "\tlibhwloc.so.15 => /lib64/libhwloc.so.15 (0x00007f)\n",
    )
    efas = len([name for name in host.listings["/sys/class/infiniband"] if name.startswith("rdmap")])
    host.log(
        f"I1101 10:00:00 libfabric_common.cpp:88] Discovered {efas} EFA devices\n"
        f"I1101 10:00:00 libfabric_topology.cpp:60] System runtime: {accelerator}\n"
        f"I1101 10:00:00 libfabric_topology.cpp:77] Topology: 2 NUMA nodes, {efas} NICs, 8 NVIDIA GPUs\n"
        f"I1101 10:00:01 libfabric_rail_manager.cpp:44] Created {efas} rails using provider=efa\n"
        f"I1101 10:00:01 nixl_agent.cpp:200] Backend LIBFABRIC was instantiated\n"
    )
    host.command(
        "curl -sS --max-time 3 http://127.0.0.1:8100/metrics",
        'vllm:request_success_total{engine="0"} 12.0\n'
        'vllm:nixl_xfer_time_seconds_count{engine="0"} 12.0\nvllm:nixl_num_failed_transfers_total 0.0\n',
    )
    host.command("nc -z -w 2 10.0.1.17 5600").command(
        "df -Pk /dev/shm",
        "Filesystem 1024-blocks Used Available Capacity Mounted on\ntmpfs 1048576000 0 1048576000 0% /dev/shm\n",
    )


def add_cloud(host: Fixture, instance_type: str, efas: int) -> None:
    """What AWS says of a well placed instance."""
    group = "sg-0a1b2c3d4e5f60718"
    own_traffic = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group, "UserId": "111122223333"}]}]
    interfaces = [
        {
            "InterfaceType": "efa" if card == 0 else "efa-only",
            "Groups": [{"GroupId": group}],
            "Attachment": {"NetworkCardIndex": card, "DeviceIndex": int(card > 0)},
        }
        for card in range(efas)
    ]
    instance = {
        "InstanceId": "i-0123456789abcdef0",
        "InstanceType": instance_type,
        "SubnetId": "subnet-0aa11bb22",
        "Placement": {"AvailabilityZone": "us-east-2b", "GroupName": "pd-cluster"},
    }
    answers = {
        "ec2 describe-instances": {"Reservations": [{"Instances": [instance]}]},
        "ec2 describe-security-groups": {
            "SecurityGroups": [{"GroupId": group, "IpPermissions": own_traffic, "IpPermissionsEgress": own_traffic}]
        },
        "ec2 describe-network-interfaces": {"NetworkInterfaces": interfaces},
        "ec2 describe-instance-types": {
            "InstanceTypes": [{"NetworkInfo": {"EfaInfo": {"MaximumEfaInterfaces": efas}}}]
        },
        "logs filter-log-events": {
            "events": [
                {
                    "message": "2 - eni-1 0e:49:61:0f:7d:11 0e:92:af:43:7d:22 - - - 9001 5689 1521232534 1524512343 ACCEPT OK"
                }
            ]
        },
    }
    for words, answer in answers.items():
        host.command(f"aws {words} --output json", json.dumps(answer))


def on_bus(*buses: int) -> list[str]:
    return [f"0000:{bus:02x}:00.0" for bus in buses]


def p5en() -> Fixture:
    host = base("p5en.48xlarge")
    buses = [first + offset for first in (0x55, 0x6E, 0x87, 0xA0) for offset in range(4)]
    add_efas(host, on_bus(*buses), "efa2", "200 Gb/sec (4X HDR)", "NVIDIA", "16.0 GT/s PCIe x16")
    add_gpus(host, on_bus(*(first + offset for first in (0x59, 0x72, 0x8B, 0xA4) for offset in range(2))), "PIX")
    add_engine(host)
    add_cloud(host, "p5en.48xlarge", 16)
    return host


def p5() -> Fixture:
    host = base("p5.48xlarge")
    firsts = (0x4F, 0x60, 0x71, 0x82, 0x93, 0xA4, 0xB5, 0xC6)
    buses = [first + offset for first in firsts for offset in range(4)]
    add_efas(host, on_bus(*buses), "efa1", "100 Gb/sec (4X EDR)", "NVIDIA", "8.0 GT/s PCIe x16")
    add_gpus(host, on_bus(*(first + 4 for first in firsts)), "PIX")
    add_engine(host)
    add_cloud(host, "p5.48xlarge", 32)
    return host


def p4d() -> Fixture:
    host = base("p4d.24xlarge")
    buses = ("10", "20", "90", "a0")
    add_efas(host, [f"0000:{bus}:1b.0" for bus in buses], "efa0", "100 Gb/sec (4X EDR)", "NVIDIA")
    add_gpus(host, [f"0000:{bus}:{slot}.0" for bus in buses for slot in ("1c", "1d")], "PHB")
    add_engine(host)
    add_cloud(host, "p4d.24xlarge", 4)
    return host


def p6_b200() -> Fixture:
    host = base("p6-b200.48xlarge")
    efas = on_bus(0x4F, 0x50, 0x60, 0x61, 0x71, 0x72, 0x84, 0x85)
    add_efas(host, efas, "efa3", "400 Gb/sec (8X HDR)", "NVIDIA", "32.0 GT/s PCIe x16")
    for number, bus in enumerate((0x73, 0x74)):
        add_pci(host, f"0000:{bus:02x}:00.0", "15b3", "1021", "0207", "mlx5_core", 0)
        add_rdma(host, f"mlx5_{number}", f"0000:{bus:02x}:00.0", "15b3", "400 Gb/sec (4X NDR)", None)
    add_gpus(host, on_bus(0x51, 0x52, 0x62, 0x63, 0x75, 0x76, 0x86, 0x87), "PIX")
    add_engine(host)
    add_cloud(host, "p6-b200.48xlarge", 8)
    return host


def add_neurons(host: Fixture, addresses: list[str], device: str, core_size: int) -> None:
    entries = []
    folder = "/sys/devices/virtual/neuron_device"
    host.listing(folder, *(f"neuron{number}" for number in range(len(addresses))))
    for number, address in enumerate(addresses):
        add_pci(host, address, "1d0f", device, "0880", "neuron", int(number >= len(addresses) / 2))
        stats = f"{folder}/neuron{number}/stats/hardware"
        host.file(stats + "/mem_ecc_uncorrected", "0\n").file(stats + "/sram_ecc_uncorrected", "0\n")
        host.file(stats + "/health_status/unhealthy_components", "\n")
        near = [(number + step) % len(addresses) for step in (1, -1, 4, -4)]
        entries.append(
            {
                "neuron_device": number,
                "bdf": address[5:],
                "nc_count": 8 // core_size,
                "memory_size": 103_079_215_104,
                "connected_to": near,
                "logical_neuroncore_config": core_size,
                "neuron_processes": [{"pid": WORKER_PID, "command": "VLLM::EngineCore"}],
            }
        )
    host.listings["/sys/module"].append("neuron")
    host.listings["/dev"] += [f"neuron{number}" for number in range(len(addresses))]
    host.file("/sys/module/neuron/version", "2.30.2.0\n").command("modinfo neuron", "version:        2.30.2.0\n")
    host.command("neuron-ls -j", json.dumps(entries))
    packages = {
        "rdma-core": "59.amzn0-1",
        "libfabric-aws": "2.6.0amzn1.0-1",
        "aws-neuronx-dkms": "2.30.2.0-1",
        "aws-neuronx-runtime-lib": "2.31.24.0-1",
        "aws-neuronx-collectives": "2.31.24.0-1",
    }
    host.commands["rpm", "-qa", "--qf", "%{NAME}\t%{VERSION}-%{RELEASE}\n"] = (rpm(packages), "", 0)
    host.replace("ldconfig -p", "\tlibefa", "\tlibnrt.so.1 (libc6,x86-64) => /opt/aws/neuron/lib/libnrt.so.1\n\tlibefa")


def add_neuron_engine(host: Fixture) -> None:
    add_engine(host, accelerator="NEURON for 16 AWS Trainium device(s)")
    host.log(host.files[LOG] + "libfabric:4311:core:core:neuron_hmem_init() number of neuron cores: 128\n")


def trn1() -> Fixture:
    host = base("trn1.32xlarge")
    buses = ("10", "20", "90", "a0")
    efas = [f"0000:{bus}:{slot}.0" for bus in buses for slot in ("19", "1a")]
    add_efas(host, efas, "efa1", "100 Gb/sec (4X EDR)", "NEURON")
    neurons = [f"0000:{bus}:{slot}.0" for bus in buses for slot in ("1b", "1c", "1d", "1e")]
    add_neurons(host, neurons, "7164", core_size=1)
    add_neuron_engine(host)
    add_cloud(host, "trn1.32xlarge", 8)
    return host


def trn2() -> Fixture:
    host = base("trn2.48xlarge")
    switches = (0x10, 0x28, 0x40, 0x58, 0x90, 0xA8, 0xC0, 0xD8)
    efas = on_bus(*(first + offset for first in switches for offset in range(2)))
    add_efas(host, efas, "efa2", "200 Gb/sec (4X HDR)", "NEURON")
    neurons = on_bus(*(first + 4 + offset for first in switches for offset in range(2)))
    add_neurons(host, neurons, "7364", core_size=2)
    add_neuron_engine(host)
    add_cloud(host, "trn2.48xlarge", 16)
    return host


HEALTHY = {"p5en": p5en, "p5": p5, "p4d": p4d, "p6-b200": p6_b200, "trn1": trn1, "trn2": trn2}
