"""What must be noticed about GPUDirect RDMA."""

from __future__ import annotations

from doctor_cases import FAIL, PASS, UNKNOWN, WARN, Case, Scene, set_config
from doctor_hosts import KERNEL, LOG, rpm

RPM = ("rpm", "-qa", "--qf", "%{NAME}\t%{VERSION}-%{RELEASE}\n")
VERSION = "/proc/driver/nvidia/version"
BOOT = f"/boot/config-{KERNEL}"


def be(name: str):
    return lambda scene: scene.host.file("/sys/devices/virtual/dmi/id/product_name", name + "\n")


def empty_peer_memory(scene: Scene) -> None:
    for device in scene.host.listings["/sys/class/infiniband"]:
        scene.host.file(f"/sys/class/infiniband/{device}/device/p2p", "\n")


def break_dmabuf_and_peer_memory(scene: Scene) -> None:
    empty_peer_memory(scene)
    scene.host.replace(BOOT, "CONFIG_PCI_P2PDMA=y", "# CONFIG_PCI_P2PDMA is not set")


def hide_dmabuf_and_peer_memory(scene: Scene) -> None:
    empty_peer_memory(scene)
    scene.host.without(BOOT, "/proc/config.gz")


def use_old_sysfs(scene: Scene) -> None:
    for device in scene.host.listings["/sys/class/infiniband"]:
        folder = f"/sys/class/infiniband/{device}/device"
        scene.host.absent(folder + "/p2p").file(folder + "/gdr", "1\n")


def unload(module: str):
    return lambda scene: scene.host.listings["/sys/module"].remove(module)


def unload_under_ucx(scene: Scene) -> None:
    unload("efa_nv_peermem")(scene)
    set_config(scene.host, backends=["UCX"])


def use_proprietary_driver(scene: Scene) -> None:
    scene.host.file(VERSION, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\n")


def use_proprietary_driver_on_old_kernel(scene: Scene) -> None:
    use_proprietary_driver(scene)
    scene.host.file("/proc/version", "Linux version 5.15.100-1.el8.x86_64 (gcc)\n")


def use_old_plugin(scene: Scene) -> None:
    unload("efa_nv_peermem")(scene)
    scene.host.commands[RPM] = (rpm({"aws-ofi-nccl": "1.16.2-1"}), "", 0)


def build_gdrcopy_for_other_driver(scene: Scene) -> None:
    scene.host.command("dmesg", "gdrdrv: this module was built for proprietary NVIDIA driver\n")


def put_gpus_across(scene: Scene) -> None:
    scene.host.replace("nvidia-smi topo -m", "PIX\t0-95", "SYS\t0-95")


def break_dmabuf_without_peer_memory_log(scene: Scene) -> None:
    scene.host.log(
        "libfabric:99:efa:mr: Failed to register CUDA buffer with the EFA device, FI_HMEM transfers that "
        "require peer to peer support will fail.\n"
    )


def silence_logs(scene: Scene) -> None:
    scene.host.command("dmesg", "")


def give_two_gpus_to_a_container(scene: Scene) -> None:
    gpus = scene.host.listings["/proc/driver/nvidia/gpus"]
    scene.host.listing("/proc/driver/nvidia/gpus", *gpus[:2]).file("/.dockerenv", "")


def stop_fabric_manager_outside_a_container(scene: Scene) -> None:
    scene.host.command("systemctl is-active nvidia-fabricmanager", "inactive\n", status=3).file("/.dockerenv", "")


def run_fabric_manager_without_systemd(scene: Scene) -> None:
    scene.host.command("systemctl is-active nvidia-fabricmanager", "inactive\n", status=3)
    scene.host.listings["/proc"].append("77")
    scene.host.file("/proc/77/cmdline", "/usr/bin/nv-fabricmanager\0-c\0/etc/fm.cfg\0")


def expand_segments_under_ucx(scene: Scene) -> None:
    set_config(scene.host, backends=["UCX"])
    scene.host.env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")


def show_bridges_only(scene: Scene, first_gpu_bus: int = 0x50) -> None:
    """Take nvidia-smi away, as a container may, and let sysfs show what stands under which host bridge."""
    scene.host.absent("nvidia-smi topo -m")
    for address in scene.host.listings["/sys/bus/pci/devices"]:
        bus = int(address.split(":")[1], 16)
        bridge = first_gpu_bus if bus == 0x59 else bus & 0xF0
        scene.host.link(
            f"/sys/bus/pci/devices/{address}",
            f"../../../devices/pci0000:{bridge:02x}/0000:{bridge:02x}:01.0/{address}",
        )


CASES = (
    Case("GDR-01", WARN, "host memory", be("g6e.48xlarge")),
    Case("GDR-02", PASS, "dmabuf takes its place", empty_peer_memory),
    Case("GDR-02", FAIL, "dmabuf lacks CONFIG_PCI_P2PDMA", break_dmabuf_and_peer_memory),
    Case("GDR-02", UNKNOWN, "hangs on CONFIG_PCI_P2PDMA", hide_dmabuf_and_peer_memory),
    Case("GDR-02", PASS, "device/gdr", use_old_sysfs),
    Case("GDR-03", PASS, "note", unload("efa_nv_peermem")),
    Case("GDR-03", WARN, "uses UCX", unload_under_ucx),
    Case("GDR-04", FAIL, "535.183.01", use_proprietary_driver),
    Case("GDR-04", WARN, "proprietary", use_proprietary_driver_on_old_kernel),
    Case("GDR-04", FAIL, "no NVIDIA driver", lambda s: s.host.absent(VERSION)),
    Case("GDR-05", FAIL, "2.17.3", lambda s: s.host.file("/sys/module/efa/version", "2.13.0g\n")),
    Case(
        "GDR-06",
        FAIL,
        "nvidia_p2p_dma_unmap_pages",
        lambda s: s.host.command("dmesg", "efa_nv_peermem: no symbol version for nvidia_p2p_dma_unmap_pages\n"),
    ),
    Case("GDR-07", FAIL, "no peer memory", break_dmabuf_and_peer_memory),
    Case("GDR-07", UNKNOWN, "CONFIG_PCI_P2PDMA", hide_dmabuf_and_peer_memory),
    Case("GDR-07", PASS, "peer memory takes its place", lambda s: s.host.replace(BOOT, "P2PDMA=y", "P2PDMA=n")),
    Case("GDR-08", WARN, "1.16.2", use_old_plugin),
    Case("GDR-09", PASS, "does not need it", lambda s: s.host.listings["/sys/module"].append("nvidia_peermem")),
    Case("GDR-10", WARN, "no device", lambda s: s.host.listings["/dev"].remove("gdrdrv")),
    Case("GDR-10", WARN, "proprietary", build_gdrcopy_for_other_driver),
    Case(
        "GDR-10",
        WARN,
        "fails",
        lambda s: s.host.command("gdrcopy_sanity", "Total: 28, Passed: 26, Failed: 2, Waived: 0\n"),
    ),
    Case("GDR-10", PASS, "note", unload("gdrdrv")),
    Case("GDR-11", FAIL, "7 of 8", lambda s: s.host.listings["/proc/driver/nvidia/gpus"].pop()),
    Case("GDR-11", PASS, "given 2 of 8", give_two_gpus_to_a_container),
    Case("GDR-12", WARN, "SYS", put_gpus_across),
    Case("GDR-13", FAIL, "expandable", lambda s: s.host.env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")),
    Case("GDR-13", WARN, "expandable", expand_segments_under_ucx),
    Case("GDR-12", PASS, "under its own host bridge", show_bridges_only),
    Case("GDR-12", WARN, "0000:59:00.0: pci0000:c0", lambda s: show_bridges_only(s, 0xC0)),
    Case("GDR-14", FAIL, "could not be registered", break_dmabuf_without_peer_memory_log),
    Case("GDR-14", UNKNOWN, "speaks of it", silence_logs),
    Case(
        "GDR-15",
        FAIL,
        "failed",
        lambda s: s.host.command("systemctl is-active nvidia-fabricmanager", "failed\n", status=3),
    ),
    Case("GDR-15", UNKNOWN, "host's services", stop_fabric_manager_outside_a_container),
    Case("GDR-15", PASS, "nv-fabricmanager runs", run_fabric_manager_without_systemd),
    Case("GDR-16", PASS, "note", break_dmabuf_and_peer_memory),
)

GONE = {
    "GDR-01": ("/sys/devices/virtual/dmi", "/sys/bus/pci"),
    "GDR-02": ("/sys/class/infiniband/rdmap85s0/device/p2p",),
    "GDR-03": ("/sys/module",),
    "GDR-04": (VERSION,),
    "GDR-05": (VERSION,),
    "GDR-06": ("dmesg",),
    "GDR-07": ("fi_info --version",),
    "GDR-08": ("rpm",),
    "GDR-09": ("/sys/module",),
    "GDR-10": ("/dev",),
    "GDR-11": ("/proc/driver/nvidia/gpus", "nvidia-smi"),
    "GDR-12": ("nvidia-smi",),
    "GDR-13": ("/proc/4242/environ",),
    "GDR-14": ("dmesg", LOG),
    "GDR-15": ("systemctl",),
    "GDR-16": (VERSION,),
}
