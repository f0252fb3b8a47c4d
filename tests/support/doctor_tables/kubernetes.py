"""What must be noticed in a cluster."""

from __future__ import annotations

from doctor_cases import (
    FAIL,
    PASS,
    SKIP,
    UNKNOWN,
    WARN,
    Case,
    Scene,
    alone,
    edit_objects,
    neuron_cluster,
    pod,
    set_kubernetes,
    warning,
)
from doctor_hosts import limits

from doctor_tables.efa import lose_provider

EFA = "vpc.amazonaws.com/efa"


def edit(kind: str, *changes: str):
    return lambda scene: edit_objects(scene.host, kind, *changes)


def mount(kind: str):
    def add_volume(scene: Scene) -> None:
        volume = '"volumes": [{"name": "ib", "hostPath": {"path": "/dev/infiniband"}}, '
        edit_objects(scene.host, "pods", '"volumes": [', volume)
        edit_objects(scene.host, "nodes", "p5en.48xlarge", kind)

    return add_volume


def name_the_address_by_reference(scene: Scene) -> None:
    by_field = '{"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": '
    by_name = '{"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "value": "$(POD_IP)"}, {"name": "POD_IP", "valueFrom": '
    edit_objects(scene.host, "pods", by_field, by_name)


def add_router(scene: Scene) -> None:
    """A router of the same image, which takes no device."""
    router = {"metadata": {"name": "router"}, "spec": {"containers": [{"image": "vllm", "command": ["vllm-router"]}]}}
    pods = [pod("decode-0", "node-a"), pod("prefill-0", "node-b"), router]
    set_kubernetes(scene.host, pods=pods)


def forbid(command: str):
    """What kubectl answers without the right to look: an empty list on one stream, the reason on the other."""
    empty = '{"apiVersion": "v1", "items": [], "kind": "List"}'
    return lambda s: s.host.command(command, empty, "Error from server (Forbidden): nodes is forbidden\n", 1)


def limit_with_capability(scene: Scene) -> None:
    scene.host.file("/proc/1/limits", limits(65536)).file("/proc/1/status", "CapEff:\t00000000a80465fb\n")


def keep_pending(scene: Scene) -> None:
    text = "0/2 nodes are available: 2 Insufficient hugepages-2Mi."
    status = f'"status": {{"conditions": [{{"message": "{text}"}}]}}, "spec": {{'
    edit_objects(scene.host, "pods", '"spec": {', status)


def move_one_node(scene: Scene) -> None:
    argv = next(argv for argv in scene.host.commands if "nodes" in argv)
    stdout, stderr, status = scene.host.commands[argv]
    scene.host.commands[argv] = (stdout.replace("us-east-2b", "us-east-2a", 1), stderr, status)


def lose_cluster(scene: Scene) -> None:
    scene.host.command("kubectl get nodes -o json", "", "The connection to the server 10.1.2.3:443 was refused\n", 1)


def know_no_cluster(scene: Scene) -> None:
    scene.host.command("kubectl get nodes -o json", "", "The connection to the server localhost:8080 was refused\n", 1)


def lose_node(*events: dict[str, object]):
    """decode-0 is pending, and the events say why."""

    def change(scene: Scene) -> None:
        edit_objects(
            scene.host, "pods", '"nodeName": "node-a", "containers": [{"name": "vllm"', '"containers": [{"name": "vllm"'
        )
        set_kubernetes(scene.host, events=list(events))

    return change


def report(reason: str, message: str, pod_name: str = "decode-0"):
    return lambda scene: set_kubernetes(scene.host, events=[warning(reason, pod_name, message)])


def kill_for_memory(scene: Scene) -> None:
    ended = '{"reason": "OOMKilled", "exitCode": 137}'
    status = f'"status": {{"containerStatuses": [{{"name": "vllm", "restartCount": 4, "state": {{"running": {{}}}}, "lastState": {{"terminated": {ended}}}}}]}}'
    edit_objects(
        scene.host, "pods", '{"metadata": {"name": "decode-0"', "{" + status + ', "metadata": {"name": "decode-0"'
    )


# As the scheduler and the kubelet write them.
LACKS_EFA = (
    "0/6 nodes are available: 2 Insufficient vpc.amazonaws.com/efa, 4 node(s) didn't match Pod's node affinity/selector. "
    "preemption: 0/6 nodes are available: 2 No preemption victims found for incoming pod, 4 Preemption is not helpful for "
    "scheduling."
)
LACKS_PAGES = LACKS_EFA.replace("vpc.amazonaws.com/efa", "hugepages-2Mi")
NO_IMAGE = (
    'Failed to pull image "registry.example/vllm:0.32.0": rpc error: code = NotFound desc = failed to pull and unpack image '
    '"registry.example/vllm:0.32.0": failed to resolve reference: registry.example/vllm:0.32.0: not found'
)
NO_SECRET = 'MountVolume.SetUp failed for volume "token" : secret "huggingface" not found'


CASES = (
    Case("K8S-01", FAIL, "offers no EFA", edit("nodes", f'"{EFA}": "16"', f'"{EFA}": "0"')),
    Case("K8S-01", WARN, "8 of 16", edit("nodes", f'"{EFA}": "16"', f'"{EFA}": "8"')),
    Case("K8S-01", UNKNOWN, "refused", lose_cluster),
    Case("K8S-01", SKIP, "knows no cluster", know_no_cluster),
    Case("K8S-01", SKIP, "no kubectl", lambda s: None, alone),
    Case("K8S-02", WARN, "takes 1 of 16", edit("pods", f'"{EFA}": "16"', f'"{EFA}": "1"')),
    Case("K8S-02", FAIL, "takes 1 of 16", edit("pods", f'"{EFA}": "16"', f'"{EFA}": "1"'), neuron_cluster),
    Case("K8S-03", FAIL, "waits for huge pages", keep_pending),
    Case("K8S-03", FAIL, "5120 MiB of 0 MiB", edit("nodes", "42242Mi", "0")),
    Case("K8S-04", FAIL, "1 ready of 2", edit("daemonsets", '"numberReady": 2', '"numberReady": 1')),
    Case("K8S-04", FAIL, "no EFA device plugin", lambda s: set_kubernetes(s.host, daemonsets=[])),
    Case("K8S-05", WARN, "/dev/infiniband", mount("p5en.48xlarge")),
    Case("K8S-05", FAIL, "/dev/infiniband", mount("p6-b200.48xlarge")),
    Case("K8S-06", FAIL, "65536 bytes", lambda s: s.host.file("/proc/1/limits", limits(65536))),
    Case("K8S-07", WARN, "default shared memory", edit("pods", '"Memory"', '""')),
    Case("K8S-08", FAIL, "different zones", move_one_node),
    Case("K8S-09", FAIL, "not set", edit("pods", "VLLM_NIXL_SIDE_CHANNEL_HOST", "OTHER")),
    Case("K8S-09", FAIL, "a fixed value", edit("pods", '"valueFrom"', '"value"')),
    Case("K8S-09", PASS, "own address", name_the_address_by_reference),
    Case("K8S-09", PASS, "own address", add_router),
    Case("K8S-10", FAIL, "no EFA provider", lose_provider),
    Case("K8S-01", UNKNOWN, "Forbidden", forbid("kubectl get nodes -o json")),
    Case("K8S-06", PASS, "may lock memory", limit_with_capability),
    Case("K8S-11", WARN, "network device", lambda s: s.host.env(NCCL_SOCKET_IFNAME="efa0")),
    Case(
        "K8S-12", FAIL, "8 of 16 Neuron", edit("pods", '"aws.amazon.com/neuron": "16"', '"aws.amazon.com/neuron": "8"')
    ),
    Case("K8S-13", WARN, "both", lambda s: set_kubernetes(s.host, deviceclasses=[{"metadata": {"name": "efa.aws"}}])),
    Case("K8S-14", FAIL, "decode-0 finds no node", lose_node(warning("FailedScheduling", "decode-0", LACKS_EFA))),
    Case("K8S-14", FAIL, "decode-0 finds no node", lose_node(warning("FailedScheduling", "decode-0", LACKS_PAGES))),
    Case("K8S-14", UNKNOWN, "no event says why", lose_node(warning("FailedScheduling", "prefill-1", LACKS_EFA))),
    Case("K8S-14", PASS, "has a node", report("FailedScheduling", LACKS_EFA)),
    Case("K8S-15", FAIL, "lacks an image or a volume", report("Failed", NO_IMAGE)),
    Case("K8S-15", FAIL, "lacks an image or a volume", report("FailedMount", NO_SECRET, "prefill-0")),
    Case("K8S-15", PASS, "no engine pod waits", report("FailedMount", NO_SECRET, "grafana-0")),
    Case("K8S-16", FAIL, "killed for want of memory", kill_for_memory),
    Case("K8S-17", WARN, "was restarted", edit("pods", '"restartCount": 1', '"restartCount": 7')),
    Case(
        "K8S-17",
        FAIL,
        "does not stay up",
        edit("pods", '{"running": {}}', '{"waiting": {"reason": "CrashLoopBackOff"}}'),
    ),
)

PODS = ("kubectl get pods",)
ENVIRON = ("/proc/4242/environ",)
GONE = {
    "K8S-01": ("kubectl get nodes",),
    "K8S-02": PODS,
    "K8S-03": PODS,
    "K8S-04": ("kubectl get daemonsets",),
    "K8S-05": PODS,
    "K8S-06": ("/proc/1/limits",),
    "K8S-07": PODS,
    "K8S-08": PODS,
    "K8S-09": PODS,
    "K8S-10": ("/usr/lib64/libibverbs",),
    "K8S-11": ENVIRON,
    "K8S-12": PODS,
    "K8S-13": ("kubectl get daemonsets",),
    "K8S-14": PODS,
    "K8S-15": ("kubectl get events",),
    "K8S-16": PODS,
    "K8S-17": PODS,
}
