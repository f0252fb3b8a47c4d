"""What must be noticed about the EFA devices and their driver."""

from __future__ import annotations

from doctor_cases import FAIL, PASS, UNKNOWN, WARN, Case, Scene, alone, watched
from doctor_hosts import add_pci, add_rdma, p5, p6_b200

PCI = "/sys/bus/pci/devices"
FIRST = "/sys/class/infiniband/rdmap85s0"
COUNTERS = FIRST + "/ports/1/hw_counters"
INSTALLED = "/opt/amazon/efa_installed_packages"


def drop_pci(scene: Scene, count: int = 1) -> None:
    """Take EFA devices off the bus."""
    host = scene.host
    efas = [a for a in host.listings[PCI] if "efa" in host.files[f"{PCI}/{a}/device"]]
    for address in efas[len(efas) - count :]:
        host.listings[PCI].remove(address)


def use_first_generation(scene: Scene) -> None:
    for path, text in scene.host.files.items():
        if "efa2" in text and path.startswith(PCI):
            scene.host.files[path] = text.replace("efa2", "efa0")


def make_g6e(scene: Scene) -> None:
    scene.host.file("/sys/devices/virtual/dmi/id/product_name", "g6e.48xlarge\n")
    drop_pci(scene, 14)


def add_mellanox(scene: Scene) -> None:
    add_pci(scene.host, "0000:10:00.0", "15b3", "1021", "0207", "mlx5_core", 0)
    add_rdma(scene.host, "mlx5_0", "0000:10:00.0", "15b3", "400 Gb/sec (4X NDR)", None)


def add_mellanox_that_breaks_libfabric(scene: Scene) -> None:
    add_mellanox(scene)
    scene.host.command("fi_info -p efa", "", "fi_getinfo: -61 (No data available)\n", 61)


def use_driver(version: str):
    return lambda scene: scene.host.file("/sys/module/efa/version", version + "\n")


def use_mixed_verbs(scene: Scene) -> None:
    scene.host.listing("/usr/lib64/libibverbs", "libefa-rdmav34.so", "libmlx5-rdmav59.so")


def grow(counter: str, by: int):
    """Let a counter rise since the previous look."""
    path = f"{COUNTERS}/{counter}"
    return lambda scene: scene.host.file(path, int(scene.host.files[path]) + by)


def lose_peer(scene: Scene) -> None:
    grow("unresponsive_remote_events", 9)(scene)


def move_over_ethernet(scene: Scene) -> None:
    scene.host.file(f"{COUNTERS}/rdma_read_bytes", scene.previous.files[f"{COUNTERS}/rdma_read_bytes"])
    scene.host.file("/sys/class/net/eth0/statistics/rx_bytes", 1 << 31)


def move_kv_over_ethernet(scene: Scene) -> None:
    move_over_ethernet(scene)
    page = "curl -sS --max-time 3 http://127.0.0.1:8100/metrics"
    scene.previous.command(page, "vllm:nixl_bytes_transferred_sum 0.0\n")
    scene.host.command(page, f"vllm:nixl_bytes_transferred_sum {1 << 30}.0\n")


def find_no_efa(scene: Scene) -> None:
    scene.host.command("fi_info -p efa", "", "fi_getinfo: -61 (No data available)\n", 61)


def lose_provider(scene: Scene) -> None:
    scene.host.listing("/usr/lib64/libibverbs")
    find_no_efa(scene)


def allow(mode: str, uid: int):
    """Give the verbs nodes a mode, and the engine a user."""

    def edit(scene: Scene) -> None:
        scene.host.replace("ls -l /dev/infiniband", "crw-rw-rw-", mode)
        scene.host.file("/proc/4242/status", f"Name:\tpython\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")

    return edit


def give_half_to_a_container(scene: Scene) -> None:
    scene.host.listing("/dev/infiniband", *(f"uverbs{number}" for number in range(8))).file("/.dockerenv", "")


def drop_write_counters(scene: Scene) -> None:
    names = scene.host.listings["/sys/class/infiniband/rdmap110s0/ports/1/hw_counters"]
    names[:] = [name for name in names if not name.startswith("rdma_write_")]


def unload_for_other_kernel(scene: Scene) -> None:
    scene.host.listings["/sys/module"].remove("efa")
    scene.host.command("modinfo efa", "", "modinfo: ERROR: Module efa not found.\n", 1)
    scene.host.command("dkms status", "efa/2.13.0: added\n")


def use_ubuntu_with_1_48(scene: Scene) -> None:
    scene.host.file(INSTALLED, "# EFA installer version: 1.48.0\n")
    scene.host.file("/etc/os-release", 'NAME="Ubuntu"\nVERSION_ID="24.04"\n')


def show_devices_by_verbs_only(scene: Scene) -> None:
    """What a person pastes: ibv_devinfo and rdma, and nothing of sysfs."""
    scene.host.without(PCI, "/sys/class/infiniband")
    block = (
        "hca_id:\t{}\n\ttransport:\t\tunspecified (4)\n\tvendor_id:\t\t0x1d0f\n\tvendor_part_id:\t\t{}\n"
        "\thw_ver:\t\t\t0xEFA2\n\t\tport:\t1\n\t\t\tstate:\t\tPORT_ACTIVE (4)\n"
    )
    scene.host.command("ibv_devinfo -v", block.format("rdmap85s0", 61346) + block.format("rdmap86s0", 61344))
    scene.host.command("rdma -p statistic show", "link rdmap85s0/1\n    rx_bytes 5\n    retrans_pkts 7\n")


def shrink_link_of_an_unpublished_type(scene: Scene) -> None:
    scene.host.file("/sys/devices/virtual/dmi/id/product_name", "p5e.48xlarge\n")
    for address in scene.host.listings[PCI]:
        scene.host.file(f"{PCI}/{address}/max_link_speed", "16.0 GT/s PCIe\n")
        scene.host.file(f"{PCI}/{address}/max_link_width", "16\n")
    scene.host.file(f"{PCI}/0000:56:00.0/current_link_width", "8\n")


CASES = (
    Case("EFA-01", FAIL, "15 EFA devices, p5en.48xlarge takes 16", drop_pci),
    Case("EFA-01", FAIL, "no EFA device", lambda s: drop_pci(s, 16)),
    Case("EFA-01", WARN, "2 EFA devices, g6e.48xlarge takes 4", make_g6e),
    Case("EFA-02", WARN, "newer", lambda s: s.host.file(f"{PCI}/0000:55:00.0/device", "0xefa4\n")),
    Case("EFA-02", WARN, "efa0", use_first_generation),
    Case("EFA-03", FAIL, "1 of 16", lambda s: s.host.absent(f"{PCI}/0000:55:00.0/driver")),
    Case("EFA-03", FAIL, "0000:55:00.0", lambda s: s.host.link(f"{PCI}/0000:55:00.0/driver", "../../vfio-pci")),
    Case("EFA-04", FAIL, "ib_uverbs", lambda s: s.host.listings["/sys/module"].remove("ib_uverbs")),
    Case("EFA-05", FAIL, "older than 2.1", use_driver("1.16.0")),
    Case("EFA-05", WARN, "no RDMA write", use_driver("2.3.0")),
    Case("EFA-05", WARN, "100 Gb/s", use_driver("2.12.1g")),
    Case("EFA-05", UNKNOWN, "in-tree", lambda s: s.host.absent("/sys/module/efa/version")),
    Case("EFA-06", FAIL, "15 of 16", lambda s: s.host.listings["/sys/class/infiniband"].remove("rdmap163s0")),
    Case("EFA-07", FAIL, "16 of 16", lambda s: s.host.listing("/dev/infiniband")),
    Case("EFA-07", FAIL, "not writable", allow("crw-------", uid=1000)),
    Case("EFA-07", WARN, "not writable", allow("crw-rw----", uid=1000)),
    Case("EFA-07", PASS, "have a verbs node", allow("crw-------", uid=0)),
    Case("EFA-07", WARN, "given 8 of 16", give_half_to_a_container),
    Case("EFA-07", FAIL, "8 of 16", lambda s: s.host.listing("/dev/infiniband", *(f"uverbs{n}" for n in range(8)))),
    Case("EFA-08", WARN, "mlx5_0", add_mellanox),
    Case("EFA-08", FAIL, "libfabric finds no EFA", add_mellanox_that_breaks_libfabric),
    Case("EFA-08", PASS, "2 RDMA devices", lambda s: None, lambda: Scene(p6_b200())),
    Case("EFA-09", WARN, "reports 100 Gb/s", lambda s: s.host.file(f"{FIRST}/ports/1/rate", "100 Gb/sec (4X EDR)\n")),
    Case("EFA-10", FAIL, "1: DOWN", lambda s: s.host.file(f"{FIRST}/ports/1/state", "1: DOWN\n")),
    Case("EFA-11", WARN, "15.8 GB/s", lambda s: s.host.file(f"{PCI}/0000:55:00.0/current_link_width", "8\n")),
    Case("EFA-11", WARN, "expected 31.5", shrink_link_of_an_unpublished_type),
    Case("EFA-02", WARN, "1d0f:efa0", show_devices_by_verbs_only),
    Case("EFA-13", UNKNOWN, "retrans_pkts 7", show_devices_by_verbs_only),
    Case("EFA-12", WARN, "reg_mr_err 12", lambda s: s.host.file(f"{FIRST}/hw_counters/reg_mr_err", "12\n")),
    Case("EFA-12", FAIL, "0 -> 12", lambda s: s.host.file(f"{FIRST}/hw_counters/reg_mr_err", "12\n"), watched),
    Case("EFA-13", UNKNOWN, "since boot", lambda s: s.host.file(f"{COUNTERS}/retrans_pkts", "7\n")),
    Case("EFA-13", WARN, "retrans_pkts +7", grow("retrans_pkts", 7), watched),
    Case("EFA-13", FAIL, "nothing arrives", lose_peer, watched),
    Case("EFA-14", WARN, "or a download", move_over_ethernet),
    Case("EFA-14", FAIL, "KV moves over Ethernet", move_kv_over_ethernet),
    Case("EFA-14", UNKNOWN, "second look", lambda s: None, alone),
    Case("EFA-15", WARN, "no counters", drop_write_counters),
    Case("EFA-16", WARN, "distribution", lambda s: s.host.absent(INSTALLED)),
    Case("EFA-16", WARN, "older than 1.29.1", lambda s: s.host.file(INSTALLED, "# EFA installer version: 1.28.0\n")),
    Case("EFA-16", FAIL, "Ubuntu 24.04", use_ubuntu_with_1_48),
    Case("EFA-17", FAIL, "ABI 34", lambda s: (use_mixed_verbs(s), find_no_efa(s))),
    Case("EFA-17", FAIL, "no EFA provider", lose_provider),
    Case("EFA-17", PASS, "somewhere else", lambda s: s.host.listing("/usr/lib64/libibverbs")),
    Case("EFA-18", WARN, "MLNX_OFED", lambda s: s.host.command("ofed_info -s", "MLNX_OFED_LINUX-24.10-0.7.0.0:\n")),
    Case("EFA-18", WARN, "configuration", lambda s: s.host.listing("/etc/infiniband", "openib.conf")),
    Case("EFA-19", FAIL, "efa/2.13.0: added", unload_for_other_kernel),
    Case("EFA-19", WARN, "of kernel 6.1.1", lambda s: s.host.command("modinfo efa", "vermagic:  6.1.1 SMP\n")),
    Case("EFA-20", WARN, "from 15 to 16", lambda s: drop_pci(Scene(s.previous))),
    Case("EFA-21", PASS, "note", lambda s: s.host.listing("/etc/modules-load.d")),
    Case("EFA-01", PASS, "32 EFA devices", lambda s: None, lambda: Scene(p5())),
)

GONE = {
    "EFA-01": (PCI,),
    "EFA-02": (PCI,),
    "EFA-03": (f"{PCI}/0000:55:00.0/driver",),
    "EFA-04": ("/sys/module",),
    "EFA-05": ("/sys/module/efa",),
    "EFA-06": ("/sys/class/infiniband",),
    "EFA-07": ("/dev/infiniband",),
    "EFA-08": ("/sys/class/infiniband",),
    "EFA-09": (f"{FIRST}/ports",),
    "EFA-10": (f"{FIRST}/ports",),
    "EFA-11": (f"{PCI}/0000:55:00.0/current",),
    "EFA-12": ("/sys/class/infiniband",),
    "EFA-13": (f"{FIRST}/hw_counters",),
    "EFA-14": ("/sys/class/net",),
    "EFA-15": ("/sys/class/infiniband/rdmap110s0/ports/1/hw_counters",),
    "EFA-16": (INSTALLED,),
    "EFA-17": ("/usr/lib64/libibverbs",),
    "EFA-18": ("/etc/infiniband",),
    "EFA-19": ("modinfo",),
    "EFA-20": (PCI,),
    "EFA-21": ("/etc/modules-load.d",),
}
