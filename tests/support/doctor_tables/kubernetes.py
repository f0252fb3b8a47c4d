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
}
