"""What must be noticed about libfabric and its variables."""

from __future__ import annotations

from doctor_cases import FAIL, PASS, UNKNOWN, WARN, Case, Scene, set_config
from doctor_hosts import LOG, WORKER_PID, rpm

RPM = ("rpm", "-qa", "--qf", "%{NAME}\t%{VERSION}-%{RELEASE}\n")
NO_DATA = ("", "fi_getinfo: -61 (No data available)\n", 61)
ENVIRON = ("/proc/4242/environ",)


def silence(command: str):
    return lambda scene: scene.host.command(command, *NO_DATA)


def use_libfabric(version: str):
    return lambda s: s.host.command("fi_info --version", f"fi_info: {version}\nlibfabric: {version}\n")


def use_old_fabric_names(scene: Scene) -> None:
    scene.host.replace("fi_info -p efa", "efa-direct", "EFA-fe80::4b2:1ff:fe3c:9a01")


def use_old_fabric_names_with_plugin(scene: Scene) -> None:
    use_old_fabric_names(scene)
    scene.host.replace(
        "ldconfig -p", "\tlibefa", "\tlibnccl-net.so (libc6) => /opt/amazon/lib/libnccl-net.so\n\tlibefa"
    )


def map_two_builds(scene: Scene) -> None:
    path = f"/proc/{WORKER_PID}/maps"
    bundled = "7f0004-7f0005 r-xp 00000000 103:01 19 /opt/venv/nixl_cu12.libs/libfabric-7f3a.so.1.2\n"
    scene.host.file(path, scene.host.files[path] + bundled)


def install_two_builds(scene: Scene) -> None:
    other = "\tlibfabric.so.1 (libc6,x86-64) => /lib64/libfabric.so.1\n\tlibefa"
    scene.host.replace("ldconfig -p", "\tlibefa", other)


def use_rdma_core(version: str):
    return lambda scene: scene.host.commands.update({RPM: (rpm({"rdma-core": version}), "", 0)})


def forbid_dmabuf(scene: Scene) -> None:
    scene.host.env(FI_HMEM_CUDA_USE_DMABUF="0").listings["/sys/module"].remove("efa_nv_peermem")


def forbid_dmabuf_without_peer_memory(scene: Scene) -> None:
    forbid_dmabuf(scene)
    for device in scene.host.listings["/sys/class/infiniband"]:
        scene.host.file(f"/sys/class/infiniband/{device}/device/p2p", "\n")


def ask_for_rdma_on_p3dn(scene: Scene) -> None:
    scene.host.file("/sys/devices/virtual/dmi/id/product_name", "p3dn.24xlarge\n")
    scene.host.env(FI_EFA_USE_DEVICE_RDMA="1")


def fill_host_memory_with_large_pages(scene: Scene) -> None:
    set_config(scene.host, top={"kv_buffer_size": 1e11})
    scene.host.command("getconf PAGESIZE", "65536\n")


CASES = (
    Case("LF-01", FAIL, "-61", silence("fi_info -p efa")),
    Case("LF-02", FAIL, "15 of 16", lambda s: s.host.replace("fi_info -p efa", "rdmap85s0-rdm", "rdmap86s0-rdm")),
    Case("LF-02", FAIL, "no EFA domain", silence("fi_info -p efa")),
    Case("LF-03", PASS, "note", use_old_fabric_names),
    Case("LF-03", WARN, "not offered", use_old_fabric_names_with_plugin),
    Case("LF-04", FAIL, "older than 1.21", use_libfabric("1.20.1")),
    Case("LF-04", WARN, "older than 1.22", use_libfabric("1.21.0")),
    Case("LF-04", WARN, "dmabuf", use_libfabric("2.1.0amzn3.0")),
    Case("LF-05", FAIL, "2 builds", map_two_builds),
    Case("LF-05", WARN, "/lib64/libfabric.so.1", install_two_builds),
    Case("LF-06", FAIL, "FI_EFA_IFACE", lambda s: s.host.env(FI_EFA_IFACE="")),
    Case("LF-06", FAIL, "no longer accepts", lambda s: s.host.env(FI_EFA_MTU_SIZE="8900")),
    Case("LF-06", FAIL, "not a boolean", lambda s: s.host.env(FI_EFA_USE_DEVICE_RDMA="maybe")),
    Case("LF-06", FAIL, "EFA of p3dn.24xlarge has not", ask_for_rdma_on_p3dn),
    Case("LF-06", PASS, "no variable", lambda s: s.host.env(FI_EFA_USE_DEVICE_RDMA="1")),
    Case("LF-06", FAIL, "above 0", lambda s: s.host.env(FI_EFA_TX_MIN_CREDITS="0")),
    Case("LF-07", FAIL, "FI_PROVIDER=tcp", lambda s: s.host.env(FI_PROVIDER="tcp")),
    Case("LF-07", FAIL, "FI_PROVIDER=^efa", lambda s: s.host.env(FI_PROVIDER="^efa")),
    Case("LF-07", PASS, "no variable", lambda s: s.host.env(FI_PROVIDER="^tcp")),
    Case("LF-07", FAIL, "cuda memory", lambda s: s.host.env(FI_HMEM="system,rocr")),
    Case("LF-07", FAIL, "peer-to-peer", lambda s: s.host.env(FI_HMEM_DISABLE_P2P="1")),
    Case("LF-07", FAIL, "no peer memory", forbid_dmabuf_without_peer_memory),
    Case("LF-07", PASS, "no variable", forbid_dmabuf),
    Case("LF-07", WARN, "RDMA of the device", lambda s: s.host.env(FI_EFA_USE_DEVICE_RDMA="0")),
    Case("LF-08", WARN, "FI_EFA_FORK_SAFE", lambda s: s.host.env(FI_EFA_FORK_SAFE="1")),
    Case("LF-08", WARN, "does not know", lambda s: s.host.env(FI_EFA_USE_HUGEPAGES="1")),
    Case("LF-09", FAIL, "without device memory", silence("fi_info -p efa -c FI_HMEM")),
    Case("LF-10", FAIL, "ibv_reg_dmabuf_mr", use_rdma_core("33.1-1")),
    Case("LF-10", WARN, "fork", use_rdma_core("37.2-1")),
    Case(
        "LF-11",
        WARN,
        "efadv_query_qp_wqs",
        lambda s: s.host.log("ImportError: undefined symbol: efadv_query_qp_wqs@EFA_1.4\n"),
    ),
    Case("LF-12", WARN, "debug", lambda s: s.host.env(FI_LOG_LEVEL="debug")),
    Case("LF-13", WARN, "93 GiB", lambda s: set_config(s.host, top={"kv_buffer_size": 1e11})),
    Case("LF-13", WARN, "100 GB of host memory", fill_host_memory_with_large_pages),
    Case("LF-14", PASS, "note", lambda s: s.host.env(FI_EFA_ENABLE_SHM_TRANSFER="0")),
    Case("LF-01", UNKNOWN, "no 'provider:' line", lambda s: s.host.command("fi_info -p efa", "Segmentation fault\n")),
)

GONE = {
    "LF-01": ("fi_info",),
    "LF-02": ("fi_info",),
    "LF-03": ("fi_info",),
    "LF-04": ("fi_info",),
    "LF-05": ("ldconfig",),
    "LF-06": ENVIRON,
    "LF-07": ENVIRON,
    "LF-08": ("fi_info -e",),
    "LF-09": ("fi_info -p efa -c",),
    "LF-10": ("rpm",),
    "LF-11": (LOG,),
    "LF-12": ENVIRON,
    "LF-13": ("/proc/4242/cmdline",),
    "LF-14": ENVIRON,
}
