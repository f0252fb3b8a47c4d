"""Scenes (one host, a pair, two looks at one host, a cluster) in which each check can pass, fail, or lack evidence."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from doctor_hosts import SERVER_PID, SITE, Fixture, p5, p5en, trn2

from kvops.doctor.check import Finding, State
from kvops.doctor.checks import CHECKS
from kvops.doctor.facts import Facts
from kvops.doctor.run import evaluate

if TYPE_CHECKING:
    from collections.abc import Callable

FAIL, WARN, PASS, SKIP, UNKNOWN = State.FAIL, State.WARN, State.PASS, State.SKIP, State.UNKNOWN
BY_ID = {check.id: check for check in CHECKS}
NIXLBENCH = (
    "nixlbench --etcd_endpoints http://etcd:2379 --backend LIBFABRIC --initiator_seg_type VRAM "
    "--target_seg_type VRAM --op_type READ"
)
UCX_MAPS = "7f0000-7f0001 r-xp 00000000 103:01 12 /x/libplugin_UCX.so\n"
SRD = "\n".join(
    f"#\n# Memory domain: rdmap{bus}s0\n#     Component: ib\n#             register: unlimited, dmabuf\n"
    "#         memory types: host (access,reg,cache), cuda (access,reg,cache,dmabuf)\n#\n"
    f"#      Transport: srd\n#         Device: rdmap{bus}s0:1\n#           Type: network"
    for bus in (85, 86)
)


@dataclass
class Scene:
    """What a check looks at: a host, and where it compares, a peer or an earlier look."""

    host: Fixture
    peer: Fixture | None = None
    previous: Fixture | None = None

    def facts(self) -> Facts:
        previous = Facts(self.previous.host()) if self.previous else None
        peer = Facts(self.peer.host()) if self.peer else None
        return Facts(self.host.host(), previous=previous, peer=peer)

    def find(self, check_id: str) -> Finding:
        return evaluate(BY_ID[check_id], self.facts())


@dataclass(frozen=True)
class Case:
    """An edit that a check must notice, with the state and words that it must find."""

    check_id: str
    state: State
    says: str
    edit: Callable[[Scene], object]
    scene: Callable[[], Scene] | None = None

    def __str__(self) -> str:
        return f"{self.check_id}-{self.says[:30]}"

    def judge(self) -> None:
        scene = (self.scene or scene_of(self.check_id))()
        self.edit(scene)
        found = scene.find(self.check_id)
        assert found.state is self.state, found
        assert self.says in f"{found.message} {found.evidence} {found.fix}", found


def alone() -> Scene:
    return Scene(p5en())


def on_trn2() -> Scene:
    return Scene(trn2())


def pair() -> Scene:
    return Scene(p5en(), peer=p5en())


def neuron_pair() -> Scene:
    return Scene(trn2(), peer=trn2())


def watched() -> Scene:
    """Two looks at a host between which KV was read over EFA."""
    scene = Scene(p5en(), previous=p5en())
    counter = "/sys/class/infiniband/rdmap85s0/ports/1/hw_counters/rdma_read_bytes"
    scene.host.file(counter, int(scene.host.files[counter]) + (1 << 30))
    return scene


def with_ucx() -> Scene:
    """An engine that uses a UCX of the system, which has EFA."""
    host = p5en()
    set_config(host, backends=["UCX"])
    host.without(f"{SITE}/nixl_cu12.libs").listings[SITE].remove("nixl_cu12.libs")
    host.command("ucx_info -d", SRD).command("ucx_info -v", "# Library version: 1.20.0\n# Library path: /usr/lib\n")
    host.file("/proc/4311/maps", UCX_MAPS)
    return Scene(host)


def with_ucx_on_p5() -> Scene:
    host = p5()
    set_config(host, backends=["UCX"])
    host.command("ucx_info -v", "# Library version: 1.20.0\n")
    return Scene(host)


def colocated() -> Scene:
    """Prefill and decode on one host, with UCX beside LIBFABRIC."""
    host = p5en()
    set_config(host, backends=["LIBFABRIC", "UCX"])
    host.listings["/proc"].append("4243")
    for name in ("cmdline", "maps", "limits"):
        host.file(f"/proc/4243/{name}", host.files[f"/proc/{SERVER_PID}/{name}"])
    host.file("/proc/4243/environ", "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.1.17\0VLLM_NIXL_SIDE_CHANNEL_PORT=5700")
    host.command("nc -z -w 2 10.0.1.17 5700").file("/proc/sys/kernel/yama/ptrace_scope", "0\n")
    return Scene(host)


def across_hosts() -> Scene:
    """An engine whose ranks span two hosts, so that NCCL uses the network."""
    host = p5en()
    add_options(host, "--nnodes", "2")
    host.file(
        "/var/log/vllm/decode.log",
        "NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)\n"
        "NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/1/GDRDMA\n",
    )
    return Scene(host)


def with_host_buffer() -> Scene:
    host = p5en()
    set_config(host, top={"kv_buffer_device": "cpu", "kv_buffer_size": 1e9})
    return Scene(host)


def benchmarked() -> Scene:
    """A host whose capture holds what nixlbench printed beside it."""
    scene = Scene(p5en())
    add_nixlbench(scene.host, 71.4)
    return scene


def add_nixlbench(host: Fixture, gb_per_second: float) -> None:
    """Three or more ranks, so that nixlbench prints its percentage of 50 GB/s a pair."""
    titles = ("Block Size (B)", "Batch Size", "B/W (GB/Sec)", "Aggregate B/W (GB/Sec)", "Network Util (%)")
    rows = ((4096, 1, 0.2), (67_108_864, 1, gb_per_second))
    lines = ["".join(f"{title:<25}" for title in (*titles, "Avg Lat. (us)"))]
    for block, batch, speed in rows:
        cells = (block, batch, f"{speed:.6f}", f"{4 * speed:.6f}", f"{speed / 50 * 100:.6f}", "741.2")
        lines.append("".join(f"{cell:<25}" for cell in cells))
    host.command(NIXLBENCH, "\n".join(lines) + "\n")


def cluster() -> Scene:
    """A node and an engine pod as kubectl shows them, seen from inside the pod."""
    host = p5en()
    host.env(KUBERNETES_SERVICE_HOST="172.20.0.1")
    labels = {"node.kubernetes.io/instance-type": "p5en.48xlarge", "topology.kubernetes.io/zone": "us-east-2b"}
    node = {
        "metadata": {"name": "node-a", "labels": labels},
        "status": {"allocatable": {"vpc.amazonaws.com/efa": "16", "hugepages-2Mi": "42242Mi", "nvidia.com/gpu": "8"}},
    }
    set_kubernetes(host, nodes=[node, json.loads(json.dumps(node).replace("node-a", "node-b"))])
    pods = [pod("decode-0", "node-a"), pod("prefill-0", "node-b"), plugin_pod()]
    set_kubernetes(host, pods=pods, deviceclasses=[], events=[])
    plugin = {"metadata": {"name": "aws-efa-k8s-device-plugin"}}
    set_kubernetes(host, daemonsets=[{**plugin, "status": {"desiredNumberScheduled": 2, "numberReady": 2}}])
    return Scene(host)


def neuron_cluster() -> Scene:
    scene = cluster()
    edit_objects(scene.host, "nodes", "p5en.48xlarge", "trn2.48xlarge")
    edit_objects(scene.host, "pods", "nvidia.com/gpu", "aws.amazon.com/neuron", '"8"', '"16"')
    return scene


def pod(name: str, node: str) -> dict[str, object]:
    limits = {"vpc.amazonaws.com/efa": "16", "nvidia.com/gpu": "8", "hugepages-2Mi": "5120Mi"}
    address = {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    container = {
        "name": "vllm",
        "image": "registry.example/vllm:0.32.0",
        "command": ["vllm", "serve", "Qwen/Qwen3-32B"],
        "resources": {"limits": limits},
        "env": [address],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    return {
        "metadata": {"name": name, "namespace": "kvops"},
        "spec": {"nodeName": node, "containers": [container], "volumes": volumes},
    }


def plugin_pod() -> dict[str, object]:
    status = {"name": "aws-efa-k8s-device-plugin", "restartCount": 1, "state": {"running": {}}}
    metadata = {"name": "aws-efa-k8s-device-plugin-x7k2p", "namespace": "kube-system"}
    containers = [{"name": "aws-efa-k8s-device-plugin", "image": "eks/aws-efa-k8s-device-plugin:v0.5.6"}]
    spec = {"nodeName": "node-a", "containers": containers}
    return {"metadata": metadata, "spec": spec, "status": {"containerStatuses": [status]}}


def warning(reason: str, pod_name: str, message: str, seen: str = "2026-11-30T08:12:41Z") -> dict[str, object]:
    """An event as kubectl shows it."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "type": "Warning",
        "reason": reason,
        "message": message,
        "count": 14,
        "firstTimestamp": "2026-11-30T08:02:17Z",
        "lastTimestamp": seen,
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "name": pod_name, "namespace": "kvops"},
        "metadata": {"name": f"{pod_name}.187ca7d2f0b1c2de", "namespace": "kvops"},
        "source": {"component": "default-scheduler"},
    }


def set_kubernetes(host: Fixture, **objects: list[dict[str, object]]) -> None:
    host.not_captured = [gap for gap in host.not_captured if "kubectl" not in str(gap)]
    for kind, items in objects.items():
        everywhere = " -A" if kind in {"pods", "daemonsets", "events"} else ""
        everywhere += " --field-selector=type=Warning" if kind == "events" else ""
        host.command(f"kubectl get {kind}{everywhere} -o json", json.dumps({"items": items}))


def edit_objects(host: Fixture, kind: str, *changes: str) -> None:
    """Replace words (old, new, old, new, ...) in what kubectl or aws printed about a kind of object."""
    argv = next(argv for argv in host.commands if kind in argv[2:3])
    stdout, stderr, status = host.commands[argv]
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in stdout, (old, stdout)
        stdout = stdout.replace(old, new)
    host.commands[argv] = (stdout, stderr, status)


def set_config(host: Fixture, *, top: dict[str, object] | None = None, **extra: object) -> None:
    """Change the KV transfer configuration of the engine: ``top`` at its top level, the rest in the extra part."""
    argv = host.files[f"/proc/{SERVER_PID}/cmdline"].rstrip("\0").split("\0")
    place = argv.index("--kv-transfer-config") + 1
    config = json.loads(argv[place]) | (top or {})
    config["kv_connector_extra_config"] = {
        name: value for name, value in (config["kv_connector_extra_config"] | extra).items() if value is not None
    }
    argv[place] = json.dumps(config)
    host.file(f"/proc/{SERVER_PID}/cmdline", "\0".join(argv) + "\0")


def add_options(host: Fixture, *words: str) -> None:
    """Append words to the engine's command line; of two values the last counts."""
    host.file(f"/proc/{SERVER_PID}/cmdline", host.files[f"/proc/{SERVER_PID}/cmdline"] + "\0".join(words) + "\0")


def scene_of(check_id: str) -> Callable[[], Scene]:
    """Return the scene in which a check applies and passes."""
    return SCENES.get(check_id) or SCENES.get(check_id.split("-", maxsplit=1)[0]) or alone


SCENES: dict[str, Callable[[], Scene]] = {
    "NEU": on_trn2,
    "NEU-05": neuron_pair,
    "K8S": cluster,
    "K8S-12": neuron_cluster,
    "EFA-14": watched,
    "EFA-20": watched,
    "HOST-07": colocated,
    "HOST-08": colocated,
    "LF-13": with_host_buffer,
    "LF-14": colocated,
    "NX-10": with_ucx,
    "NX-11": with_ucx,
    "NX-12": with_ucx,
    "NX-13": with_ucx_on_p5,
    "NX-23": benchmarked,
    "NX-17": across_hosts,
    "NX-18": across_hosts,
    "NX-19": across_hosts,
    "NW-03": pair,
    "NW-09": pair,
    "VL-18": colocated,
    **{f"VL-{number:02}": pair for number in range(3, 13)},
}
