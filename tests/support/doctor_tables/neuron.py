"""What must be noticed on Neuron hosts."""

from __future__ import annotations

import json

from doctor_cases import FAIL, PASS, UNKNOWN, WARN, Case, Scene
from doctor_hosts import LOG, add_neurons, base

RPM = ("rpm", "-qa", "--qf", "%{NAME}\t%{VERSION}-%{RELEASE}\n")
DEVICES = "/sys/devices/virtual/neuron_device"
HARDWARE = f"{DEVICES}/neuron3/stats/hardware"
TABLE = (
    "instance-type: trn2.48xlarge\ninstance-id: i-0123456789abcdef0\nlogical-neuroncore-config: 2\n"
    "+--------+--------+----------+--------+---------------+--------------+---------------+------+\n"
    "| NEURON | NEURON |  NEURON  | NEURON |   CONNECTED   |     PCI      |      CPU      | NUMA |\n"
    "| DEVICE | CORES  | CORE IDS | MEMORY |    DEVICES    |     BDF      |   AFFINITY    | NODE |\n"
    "+--------+--------+----------+--------+---------------+--------------+---------------+------+\n"
    "| 0      | 4      | 0-3      | 96 GB  | 12, 3, 4, 1   | 0000:cc:00.0 | 48-95,144-191 | 1    |\n"
)


def edit_devices(scene: Scene, edit) -> None:
    stdout, stderr, status = scene.host.commands["neuron-ls", "-j"]
    devices = json.loads(stdout)
    edit(devices)
    scene.host.commands["neuron-ls", "-j"] = (json.dumps(devices), stderr, status)


def let_strangers_in(scene: Scene) -> None:
    edit_devices(
        scene, lambda devices: devices[2]["neuron_processes"].append({"pid": 99, "command": "python train.py"})
    )


def use_logical_core_size_1(scene: Scene) -> None:
    scene.peer.replace("neuron-ls -j", '"logical_neuroncore_config": 2', '"logical_neuroncore_config": 1')


def use_small_instance() -> Scene:
    host = base("trn2.3xlarge")
    add_neurons(host, ["0000:10:00.0"], "7364", core_size=2)
    return Scene(host)


def forbid_dmabuf_without_peer_memory(scene: Scene) -> None:
    clear_peer_memory(scene)
    scene.host.env(FI_HMEM_NEURON_USE_DMABUF="0")


def clear_peer_memory(scene: Scene) -> None:
    scene.host.file("/sys/class/infiniband/rdmap16s0/device/p2p", "\n")


def show_table_only(scene: Scene) -> None:
    scene.host.without("neuron-ls").command("neuron-ls", TABLE)


def keep_efas(scene: Scene, count: int) -> None:
    folder = "/sys/bus/pci/devices"
    names = scene.host.listings[folder]
    efas = [name for name in names if "efa" in scene.host.files[f"{folder}/{name}/device"]]
    scene.host.listings[folder] = [name for name in names if name not in efas[count:]]


def claim_cores_twice(scene: Scene) -> None:
    scene.host.env(NEURON_RT_VISIBLE_CORES="0-31").listings["/proc"].append("4243")
    scene.host.file("/proc/4243/cmdline", scene.host.files["/proc/4242/cmdline"])
    scene.host.file("/proc/4243/environ", "NEURON_RT_VISIBLE_CORES=31-63")


def say(line: str):
    return lambda scene: scene.host.log(line + "\n")


CASES = (
    Case("NEU-01", FAIL, "not loaded", lambda s: s.host.listings["/sys/module"].remove("neuron")),
    Case("NEU-01", WARN, "2.31.0.0 is installed", lambda s: s.host.command("modinfo neuron", "version: 2.31.0.0\n")),
    Case("NEU-02", FAIL, "15 of 16", lambda s: s.host.listings["/dev"].remove("neuron15")),
    Case("NEU-03", FAIL, "15 of 16", lambda s: s.host.listings["/sys/bus/pci/devices"].remove("0000:dd:00.0")),
    Case("NEU-04", FAIL, "15 of 16", lambda s: edit_devices(s, lambda devices: devices.pop())),
    Case("NEU-04", FAIL, "device 5", lambda s: edit_devices(s, lambda devices: devices[5].update(connected_to=[]))),
    Case("NEU-04", FAIL, "1 of 16", show_table_only),
    Case("NEU-05", FAIL, "differ", use_logical_core_size_1),
    Case("NEU-06", FAIL, "1 of 16 EFAs", lambda s: keep_efas(s, 1)),
    Case(
        "NEU-07",
        FAIL,
        "libnrt 2.29.0",
        lambda s: s.host.commands.update({RPM: ("aws-neuronx-runtime-lib\t2.29.0-1\n", "", 0)}),
    ),
    Case("NEU-07", FAIL, "no EFA", say("W libfabric_topology.cpp:9] nrt_get_attached_efa_bdf failed for device 3")),
    Case("NEU-08", FAIL, "1 EFA devices cannot", forbid_dmabuf_without_peer_memory),
    Case("NEU-08", UNKNOWN, "dmabuf may", clear_peer_memory),
    Case("NEU-09", FAIL, "libnrt.so.1", lambda s: s.host.replace("ldconfig -p", "libnrt.so.1", "libother.so.1")),
    Case("NEU-10", FAIL, "no Neuron interface", say("libfabric:1:core: Failed to dlopen libnrt.so.1")),
    Case("NEU-10", UNKNOWN, "does not speak", say("nothing of interest")),
    Case("NEU-11", FAIL, "do not fit", say("ERROR NRT: This runtime requires Neuron Driver version 2.30 or later")),
    Case(
        "NEU-11",
        WARN,
        "aws-neuronx-dkms",
        lambda s: s.host.commands.update({RPM: ("aws-neuronx-runtime-lib\t2.31.0-1\n", "", 0)}),
    ),
    Case("NEU-12", FAIL, "no EFA", say("ERROR TDRV: OFI plugin initNet() failed is EFA enabled?")),
    Case("NEU-13", WARN, "FI_PROVIDER=verbs", lambda s: s.host.env(FI_PROVIDER="verbs")),
    Case("NEU-13", WARN, "device RDMA off", lambda s: s.host.env(FI_EFA_USE_DEVICE_RDMA="0")),
    Case("NEU-13", WARN, "fork safety", lambda s: s.host.env(FI_EFA_FORK_SAFE="1")),
    Case("NEU-14", FAIL, "python train.py", let_strangers_in),
    Case("NEU-14", FAIL, "core 31", claim_cores_twice),
    Case(
        "NEU-15",
        FAIL,
        "link_efa",
        lambda s: s.host.file(f"{HARDWARE}/health_status/unhealthy_components", "link_efa\n"),
    ),
    Case("NEU-16", FAIL, "neuron3", lambda s: s.host.file(f"{HARDWARE}/mem_ecc_uncorrected", "2\n")),
    Case(
        "NEU-16",
        FAIL,
        "terminate",
        lambda s: s.host.command("dmesg", "neuron: NEURON_HW_ERR=HBM_UE action=TERMINATE_INSTANCE\n"),
    ),
    Case("NEU-17", WARN, "without EFA", lambda s: s.host.env(NEURON_SKIP_EFA_AFFINITY="1")),
    Case("NEU-18", WARN, "trn2.3xlarge", lambda s: None, use_small_instance),
    Case(
        "NEU-09",
        PASS,
        "LD_LIBRARY_PATH",
        lambda s: [
            s.host.replace("ldconfig -p", "libnrt.so.1", "libother.so.1"),
            s.host.env(LD_LIBRARY_PATH="/opt/aws/neuron/lib"),
        ],
    ),
)

GONE = {
    "NEU-01": ("/sys/module",),
    "NEU-02": ("/dev",),
    "NEU-03": ("/sys/bus/pci",),
    "NEU-04": ("neuron-ls",),
    "NEU-05": ("neuron-ls",),
    "NEU-06": ("/sys/bus/pci",),
    "NEU-07": ("rpm",),
    "NEU-08": ("/sys/class/infiniband",),
    "NEU-09": ("ldconfig",),
    "NEU-10": (LOG,),
    "NEU-11": ("rpm",),
    "NEU-12": (LOG,),
    "NEU-13": ("/proc/4242/environ",),
    "NEU-14": ("neuron-ls",),
    "NEU-15": (DEVICES,),
    "NEU-16": (DEVICES,),
    "NEU-17": ("/proc/4242/environ",),
    "NEU-18": ("/sys/devices/virtual/dmi",),
}
