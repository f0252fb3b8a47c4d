"""Kubernetes: what nodes offer, what engine pods ask for. Reads what ``kubectl get ... -o json`` answered."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kvops.doctor import conditions, manifest
from kvops.doctor.check import State, failed, in_group, passed, skipped, unknown, warned, worst
from kvops.doctor.checks import efa, libfabric
from kvops.doctor.facts import UnavailableError
from kvops.doctor.instances import Instance, instances
from kvops.doctor.parsers import proc
from kvops.doctor.parsers.cloud import dig, rows

if TYPE_CHECKING:
    from kvops.doctor.check import Finding
    from kvops.doctor.facts import Facts

    Object = dict[str, Any]

check = in_group("kubernetes")

EFA_RESOURCE = "vpc.amazonaws.com/efa"
NEURON_RESOURCE = "aws.amazon.com/neuron"
GPU_RESOURCE = "nvidia.com/gpu"
POD_ADDRESSES = ("status.podIP", "status.hostIP")
HUGE_PAGES = "hugepages-2Mi"
UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "k": 1000, "M": 10**6, "G": 10**9}


def in_pod(facts: Facts) -> str:
    """Applies inside a pod."""
    inside = any("KUBERNETES_SERVICE_HOST" in env for env in facts.environments.values())
    return "" if inside else "not inside a pod"


def _nodes(facts: Facts) -> list[tuple[Object, Instance]]:
    """Return the nodes whose instance type is known, with what to expect of it."""
    label = ("metadata", "labels", "node.kubernetes.io/instance-type")
    found = [(node, str(dig(node, *label))) for node in _all_nodes(facts)]
    return [(node, instances()[kind]) for node, kind in found if kind in instances()]


def _all_nodes(facts: Facts) -> list[Object]:
    return facts.kubectl(manifest.KUBECTL_NODES)


def _name(thing: Object) -> str:
    return str(dig(thing, "metadata", "name"))


def _engine_pods(facts: Facts) -> list[Object]:
    """Return the pods that run vLLM on devices, or with a KV transfer configuration; not routers and clients of it.

    Raises:
        UnavailableError: there is none.
    """
    running = [pod for pod in facts.kubectl(manifest.KUBECTL_PODS) if any(map(_runs_vllm, _containers(pod)))]
    devices = (EFA_RESOURCE, GPU_RESOURCE, NEURON_RESOURCE)
    pods = [pod for pod in running if _moves_kv(pod) or any(_limit(pod, name) for name in devices)]
    if not pods:
        raise UnavailableError("kubectl get pods: no pod runs vLLM")
    return pods


def _containers(pod: Object) -> list[Object]:
    return rows(pod, "spec", "containers")


def _runs_vllm(container: Object) -> bool:
    text = " ".join(str(container.get(part, "")) for part in ("image", "command", "args"))
    return "vllm" in text or "--kv-transfer-config" in text


def _moves_kv(pod: Object) -> bool:
    """Tell whether a pod is prefill or decode: it takes EFAs, or its command line says so."""
    return _limit(pod, EFA_RESOURCE) > 0 or "--kv-transfer-config" in str(_containers(pod))


def _limit(pod: Object, resource: str) -> int:
    """Return a resource's limit summed over a pod's containers; quantities in bytes."""
    return sum(_quantity(dig(container, "resources", "limits", resource)) for container in _containers(pod))


def _quantity(value: object) -> int:
    number = re.fullmatch(r"(\d{1,15})(Ki|Mi|Gi|k|M|G)?", str(value))
    return int(number[1]) * UNITS[number[2] or ""] if number else 0


def _node_of(facts: Facts, pod: Object) -> Instance | None:
    """Return what to expect of the node that a pod runs on."""
    name = dig(pod, "spec", "nodeName")
    return next((profile for node, profile in _nodes(facts) if _name(node) == name), None)


@check(
    "K8S-01",
    "EFA nodes offer their EFAs",
    evidence=f"kubectl get nodes: status.allocatable[{EFA_RESOURCE}]",
    rule="FAIL if a P or Trn node offers none, WARN if a node of an EFA type offers fewer than it takes",
    fix="Run the EFA device plugin on it, and launch the node group with EFA interfaces",
    sources=("A-EKSEFA", "nvcf#1349"),
    applies=(conditions.kubernetes,),
    explained_by=("K8S-04",),
)
def node_offers(facts: Facts) -> Finding:
    """A pod gets verbs nodes only for EFAs that it asked the device plugin for."""
    nodes = [(node, profile) for node, profile in _nodes(facts) if profile.efas]
    if not nodes:
        return skipped("no node of an EFA type")
    findings = []
    for node, profile in nodes:
        count = _quantity(dig(node, "status", "allocatable", EFA_RESOURCE))
        evidence = f"{_name(node)} ({profile.name}): {EFA_RESOURCE}: {count}"
        if not count and profile.needs_every_efa:
            findings.append(failed(f"node {_name(node)} offers no EFA", evidence))
        elif count < profile.efas:
            findings.append(warned(f"node {_name(node)} offers {count} of {profile.efas} EFAs", evidence))
    return worst(findings, passed(f"{len(nodes)} nodes offer all their EFAs"))


@check(
    "K8S-02",
    "An engine pod that takes all accelerators of a node takes all its EFAs",
    evidence=f"kubectl get pods: limits {EFA_RESOURCE}",
    rule="WARN if fewer; FAIL on Neuron, where every EFA must be attached",
    fix=f"limits: {EFA_RESOURCE}: <as many as the node has>",
    sources=("NEU-FAQ", "nixl#1994"),
    applies=(conditions.kubernetes,),
)
def pod_takes_all(facts: Facts) -> Finding:
    """EFAs cannot be shared: what the pod leaves is left idle."""
    findings = []
    for pod in _engine_pods(facts):
        profile = _node_of(facts, pod)
        if profile is None or not profile.efas:
            continue
        taken, neuron = _limit(pod, EFA_RESOURCE), _limit(pod, NEURON_RESOURCE)
        whole = neuron or _limit(pod, GPU_RESOURCE) >= profile.gpus > 0
        if whole and taken < profile.efas:
            answer = failed if neuron else warned
            message = f"pod {_name(pod)} takes {taken} of {profile.efas} EFAs"
            findings.append(answer(message, f"{EFA_RESOURCE}: {taken} on {profile.name}"))
    return worst(findings, passed("engine pods take the EFAs of their nodes"))


@check(
    "K8S-03",
    "Huge pages are requested and available",
    evidence=f"kubectl get pods, nodes: {HUGE_PAGES}",
    rule="FAIL if a pod asks for more than its node has, or is pending for lack of them",
    fix="Reserve them on the node (vm.nr_hugepages) before the kubelet starts",
    sources=("awsome#1240", "EKS-HP", "K8S-HP"),
    applies=(conditions.kubernetes,),
)
def huge_pages(facts: Facts) -> Finding:
    """The kubelet counts huge pages when it starts, and never again."""
    most = max((_quantity(dig(n, "status", "allocatable", HUGE_PAGES)) for n in _all_nodes(facts)), default=0)
    for pod in _engine_pods(facts):
        text = " ".join(str(row.get("message", "")) for row in rows(pod, "status", "conditions"))
        if f"Insufficient {HUGE_PAGES}" in text:
            return failed(f"pod {_name(pod)} waits for huge pages", text[:160])
        wanted = _limit(pod, HUGE_PAGES)
        if wanted > most:
            return failed(
                f"pod {_name(pod)} asks for more huge pages than any node has",
                f"{HUGE_PAGES}: {wanted >> 20} MiB of {most >> 20} MiB",
            )
    return passed(f"up to {most >> 20} MiB of huge pages on a node")


def _device_plugins(facts: Facts) -> list[Object]:
    found = facts.kubectl(manifest.KUBECTL_DAEMONSETS)
    return [daemon for daemon in found if "efa" in _name(daemon) and "device-plugin" in _name(daemon)]


def _device_classes(facts: Facts) -> list[str]:
    """Return the names of device classes for EFA; none where the cluster has no such kind."""
    try:
        return [_name(thing) for thing in facts.kubectl(manifest.KUBECTL_DEVICE_CLASSES) if "efa" in _name(thing)]
    except UnavailableError:
        return []


@check(
    "K8S-04",
    "The EFA device plugin runs on every EFA node",
    evidence="kubectl get daemonsets: *efa*device-plugin*",
    rule="FAIL if there is none (and no DRA driver), or it is not ready where it should be",
    fix="Upgrade the chart; run it as root; add the instance type to its affinity and its taints to its tolerations",
    sources=("aws-efa-eks#8", "eksctl#6222", "eks-charts#1245", "eks-charts#1358"),
    applies=(conditions.kubernetes,),
)
def device_plugin(facts: Facts) -> Finding:
    """Its list of instance types is part of the chart: new types need a new chart."""
    wanted = sum(profile.efas > 0 and profile.needs_every_efa for _, profile in _nodes(facts))
    if not wanted:
        return skipped("no P or Trn node with EFA")
    plugins = _device_plugins(facts)
    if not plugins:
        classes = _device_classes(facts)
        if classes:
            return passed("the EFA DRA driver takes the device plugin's place", classes[0])
        return failed("no EFA device plugin runs", "kubectl get daemonsets: no *efa*device-plugin*")
    status = plugins[0].get("status")
    desired, ready = (dig(status, name) or 0 for name in ("desiredNumberScheduled", "numberReady"))
    evidence = f"{_name(plugins[0])}: {ready} ready of {desired}, {wanted} EFA nodes"
    if not isinstance(ready, int) or ready < wanted:
        return failed("the EFA device plugin does not run on every EFA node", evidence)
    return passed("the EFA device plugin runs on every EFA node", evidence)


@check(
    "K8S-05",
    "No engine pod mounts /dev/infiniband from the host",
    evidence="kubectl get pods: spec.volumes[].hostPath",
    rule="WARN; FAIL on p6-b200, which has Mellanox devices beside EFA",
    fix=f"Remove the volume and request {EFA_RESOURCE}",
    sources=("aws-do-eks#63",),
    applies=(conditions.kubernetes,),
)
def host_path(facts: Facts) -> Finding:
    """The nodes are there then, and may not be opened; libfabric stops at the first that it cannot open."""
    for pod in _engine_pods(facts):
        for volume in rows(pod, "spec", "volumes"):
            path = str(dig(volume, "hostPath", "path") or "")
            if path.startswith("/dev/infiniband"):
                profile = _node_of(facts, pod)
                answer = failed if profile and profile.foreign_rdma else warned
                return answer(f"pod {_name(pod)} mounts {path} from the host", f"hostPath: {path}")
    return passed("no engine pod mounts /dev/infiniband")


@check(
    "K8S-06",
    "The container may lock memory",
    evidence="/proc/1/limits in the pod: Max locked memory",
    rule="FAIL below 16 GiB without the capability IPC_LOCK",
    fix="LimitMEMLOCK=infinity for the container runtime, and the capability IPC_LOCK for the pod",
    sources=("awsome#647",),
    applies=(in_pod, conditions.rdma),
)
def memlock(facts: Facts) -> Finding:
    """The limit comes from the container runtime's own service."""
    size = proc.parse_memlock_bytes(facts.text("/proc/1/limits"))
    evidence = f"/proc/1/limits: Max locked memory {'unlimited' if size == proc.UNLIMITED else size}"
    lifted = proc.may_lock_any_memory(facts.process_status("1"))
    if size != proc.UNLIMITED and size < 16 << 30 and not lifted:
        return failed(f"the container may lock {size} bytes only", evidence)
    return passed("the container may lock memory", evidence)


@check(
    "K8S-07",
    "Engine pods have a large /dev/shm",
    evidence="kubectl get pods: an emptyDir with medium Memory, mounted on /dev/shm",
    rule="WARN if there is none",
    fix="volumes: - name: shm, emptyDir: {medium: Memory}; volumeMounts: - name: shm, mountPath: /dev/shm",
    sources=("K8S-HP",),
    applies=(conditions.kubernetes,),
)
def shared_memory(facts: Facts) -> Finding:
    """A container has 64 MiB by default, too little for ranks that talk through it."""
    for pod in _engine_pods(facts):
        in_memory = [v.get("name") for v in rows(pod, "spec", "volumes") if dig(v, "emptyDir", "medium") == "Memory"]
        mounts = [mount for container in _containers(pod) for mount in rows(container, "volumeMounts")]
        if not any(m.get("name") in in_memory and m.get("mountPath") == manifest.SHARED_MEMORY for m in mounts):
            return warned(f"pod {_name(pod)} has the default shared memory", "no emptyDir with medium Memory there")
    return passed("engine pods have their own shared memory")


@check(
    "K8S-08",
    "Engine pods are in one zone",
    evidence="kubectl get nodes: label topology.kubernetes.io/zone of the nodes that engine pods run on",
    rule="FAIL if those of one namespace differ",
    fix="A node affinity or topology constraint on topology.kubernetes.io/zone",
    sources=("EC2-CREATE",),
    applies=(conditions.kubernetes,),
)
def one_zone(facts: Facts) -> Finding:
    """EFA's packets do not leave a subnet, and a subnet is in one zone."""
    zones = {_name(node): dig(node, "metadata", "labels", "topology.kubernetes.io/zone") for node in _all_nodes(facts)}
    used: dict[str, set[str]] = {}
    for pod in filter(_moves_kv, _engine_pods(facts)):
        zone = zones.get(str(dig(pod, "spec", "nodeName")))
        if zone:
            used.setdefault(str(dig(pod, "metadata", "namespace")), set()).add(str(zone))
    for namespace, found in used.items():
        if len(found) > 1:
            return failed("engine pods are in different zones", f"{namespace}: {', '.join(sorted(found))}")
    return (
        passed(f"engine pods are in zone {', '.join(sorted(set().union(*used.values())))}")
        if used
        else unknown("no node names its zone")
    )


@check(
    "K8S-09",
    "Engine pods tell peers their own address",
    evidence="kubectl get pods: VLLM_NIXL_SIDE_CHANNEL_HOST from fieldRef status.podIP",
    rule="FAIL if it is not set from the pod's address",
    fix="env: - name: VLLM_NIXL_SIDE_CHANNEL_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}",
    sources=("VLLM-NIXL",),
    applies=(conditions.kubernetes,),
)
def pod_address(facts: Facts) -> Finding:
    """A fixed address is wrong as soon as the pod is scheduled anew."""
    for pod in filter(_moves_kv, _engine_pods(facts)):
        variables = [v for container in _containers(pod) for v in rows(container, "env")]
        own = [v for v in variables if v.get("name") == "VLLM_NIXL_SIDE_CHANNEL_HOST"]
        from_pod = [v for v in variables if str(dig(v, "valueFrom", "fieldRef", "fieldPath")) in POD_ADDRESSES]
        references = [f"$({v.get('name')})" for v in from_pod]
        if not any(v in from_pod or v.get("value") in references for v in own):
            if any(
                "VLLM_NIXL_SIDE_CHANNEL_HOST" in str(c.get(p)) for c in _containers(pod) for p in ("command", "args")
            ):
                return unknown(f"the command of pod {_name(pod)} sets its own address")
            shown = "a fixed value" if own else "not set"
            return failed(f"pod {_name(pod)} does not tell its own address", f"VLLM_NIXL_SIDE_CHANNEL_HOST: {shown}")
    return passed("engine pods tell their own address")


@check(
    "K8S-10",
    "The image has EFA's user space",
    evidence="as EFA-17 and LF-01, inside the pod",
    rule="FAIL if either fails",
    fix="Install the EFA bundle in the image: efa_installer.sh --skip-kmod",
    sources=("vllm#55783",),
    applies=(in_pod, conditions.efa),
    explained_by=("EFA-17", "LF-01"),
)
def user_space(facts: Facts) -> Finding:
    """The host's libraries are not in the container."""
    findings = [efa.verbs_provider.find(facts), libfabric.provider_answers.find(facts)]
    gravest = worst(findings, passed(""))
    if gravest.state is State.FAIL:
        return failed(f"the image lacks EFA's user space: {gravest.message}", gravest.evidence)
    return passed("the image has EFA's user space")


@check(
    "K8S-11",
    "Nothing takes EFA for a network device",
    evidence="environment of the engines: *_SOCKET_IFNAME and UCX_NET_DEVICES that name efa*",
    rule="WARN if a variable names a network device efa*",
    fix="Name the Ethernet device (eth0) for sockets; EFA is found through its verbs node",
    sources=("ray#62339",),
    applies=(in_pod, conditions.efa),
)
def not_a_netdev(facts: Facts) -> Finding:
    """EFA is a verbs device; there is no /sys/class/net/efa0."""
    for owner, env in facts.environments.items():
        for name in manifest.SOCKET_VARIABLES:
            if re.match(r"=?efa\d", env.get(name, "")):
                return warned(f"{owner} takes EFA for a network device", f"{name}={env[name]}")
    return passed("EFA is looked for among verbs devices")


@check(
    "K8S-12",
    "Engine pods take every Neuron device of the node",
    evidence=f"kubectl get pods: limits {NEURON_RESOURCE}",
    rule="FAIL if fewer",
    fix=f"limits: {NEURON_RESOURCE}: <as many as the node has>",
    sources=("NEU-FAQ",),
    applies=(conditions.kubernetes,),
)
def neuron_devices(facts: Facts) -> Finding:
    """EFA's mapping is by device; a subset breaks it."""
    pods = [(pod, _limit(pod, NEURON_RESOURCE)) for pod in _engine_pods(facts)]
    for pod, taken in pods:
        profile = _node_of(facts, pod)
        if taken and profile and taken < profile.neurons:
            message = f"pod {_name(pod)} takes {taken} of {profile.neurons} Neuron devices"
            return failed(message, f"{NEURON_RESOURCE}: {taken}")
    return passed("engine pods take whole nodes") if any(n for _, n in pods) else skipped("no pod asks for Neuron")


@check(
    "K8S-13",
    "EFA comes from the device plugin or from DRA, not both",
    evidence="kubectl get daemonsets, deviceclasses",
    rule="WARN if both are there",
    fix="Keep one of them",
    sources=("EKS-DRA",),
    applies=(conditions.kubernetes,),
)
def one_allocator(facts: Facts) -> Finding:
    """Two allocators hand the same device out twice."""
    plugins, classes = _device_plugins(facts), _device_classes(facts)
    if plugins and classes:
        return warned("the device plugin and the DRA driver both hand out EFAs", f"{_name(plugins[0])}, {classes[0]}")
    return passed("one allocator" if plugins or classes else "no allocator")


def _warnings(facts: Facts, things: list[Object], *reasons: str) -> list[tuple[Object, str]]:
    """Return the things that one of the reasons is reported for, each with the newest message about it."""
    newest: dict[tuple[str, str], tuple[str, str]] = {}
    for event in facts.kubectl(manifest.KUBECTL_WARNINGS):
        if event.get("reason") not in reasons:
            continue
        about = (str(dig(event, "involvedObject", "namespace")), str(dig(event, "involvedObject", "name")))
        seen = str(event.get("lastTimestamp") or event.get("eventTime") or "")
        newest[about] = max(newest.get(about, ("", "")), (seen, " ".join(str(event.get("message", "")).split())))
    keys = [(thing, (str(dig(thing, "metadata", "namespace")), _name(thing))) for thing in things]
    return [(thing, newest[key][1]) for thing, key in keys if key in newest]


# What a scheduler's complaint names, and what to do about each.
_LACKS = {
    f"Insufficient {EFA_RESOURCE}": "Run the EFA device plugin there, or free the EFAs that another pod holds",
    f"Insufficient {HUGE_PAGES}": "Reserve 2 MiB pages (vm.nr_hugepages), then restart the kubelet",
    f"Insufficient {GPU_RESOURCE}": "Run NVIDIA's device plugin there, or add nodes",
    f"Insufficient {NEURON_RESOURCE}": "Run the Neuron device plugin there, or add nodes",
    "untolerated taint": "Tolerate the taint in the pod, or take it off the nodes",
    "pod anti-affinity rules": "Add nodes: every engine takes one of its own",
    "node affinity/selector": "Add nodes of the instance type that the pod selects, in the zone of the others",
    "persistentvolumeclaim": "Create the claim in the pod's namespace, in the zone of the nodes",
}


@check(
    "K8S-14",
    "Every engine pod has found a node",
    evidence="kubectl get events: FailedScheduling of engine pods that have no node",
    rule="FAIL if the newest event of a pod without a node says why",
    fix="Give the cluster what the scheduler misses",
    sources=("K8S-DEBUG",),
    applies=(conditions.kubernetes,),
    explained_by=("K8S-01", "K8S-03"),
)
def scheduled(facts: Facts) -> Finding:
    """The scheduler names each thing that is missing, for all nodes in one line."""
    waiting = [pod for pod in _engine_pods(facts) if not dig(pod, "spec", "nodeName")]
    for pod, message in _warnings(facts, waiting, "FailedScheduling"):
        fix = "; ".join(todo for lack, todo in _LACKS.items() if lack in message)
        return failed(f"pod {_name(pod)} finds no node", message, fix)
    if waiting:
        return unknown(f"pod {_name(waiting[0])} has no node, and no event says why")
    return passed("every engine pod has a node")


@check(
    "K8S-15",
    "Images and volumes reach the engine pods",
    evidence="kubectl get events: Failed, FailedMount, FailedAttachVolume of engine pods that are not ready",
    rule="FAIL if there is one",
    fix="Check the image's name and the pull secret; create the Secret or claim that the message names",
    sources=("K8S-DEBUG",),
    applies=(conditions.kubernetes,),
)
def provided(facts: Facts) -> Finding:
    """Without its image or a volume a pod stays in ContainerCreating for ever."""
    pods = [pod for pod in _engine_pods(facts) if not _is_ready(pod)]
    for pod, message in _warnings(facts, pods, "Failed", "FailedMount", "FailedAttachVolume"):
        return failed(f"pod {_name(pod)} lacks an image or a volume", message)
    return passed("no engine pod waits for an image or a volume")


def _is_ready(pod: Object) -> bool:
    return any(row.get("type") == "Ready" and row.get("status") == "True" for row in rows(pod, "status", "conditions"))


@check(
    "K8S-16",
    "No engine was killed for want of memory",
    evidence="kubectl get pods: containerStatuses with reason OOMKilled",
    rule="FAIL if the last end of a container was that",
    fix="Raise the memory limit (kubernetes.memory): pages of /dev/shm and of pinned buffers count against it",
    sources=("K8S-DEBUG",),
    applies=(conditions.kubernetes,),
)
def within_memory(facts: Facts) -> Finding:
    """The kernel kills a worker of an engine without a word in its log."""
    for pod in _engine_pods(facts):
        statuses = [*rows(pod, "status", "initContainerStatuses"), *rows(pod, "status", "containerStatuses")]
        for status in statuses:
            for state in ("state", "lastState"):
                if dig(status, state, "terminated", "reason") == "OOMKilled":
                    evidence = f"{status.get('name')}: OOMKilled, restarted {status.get('restartCount', 0)} times"
                    return failed(f"pod {_name(pod)} was killed for want of memory", evidence)
    return passed("no engine was killed for want of memory")


@check(
    "K8S-17",
    "The device plugin stays up",
    evidence="kubectl get pods: containerStatuses of *efa*device-plugin*",
    rule="FAIL if one waits to be restarted, WARN if one was restarted three times or more",
    fix="kubectl logs --previous of that pod; upgrade the chart, whose list of instance types may lack this one",
    sources=("aws-efa-eks#8", "eks-charts#1245"),
    applies=(conditions.kubernetes,),
)
def plugin_stays_up(facts: Facts) -> Finding:
    """While the plugin is away the kubelet counts the node's EFAs as gone, and new pods find no place."""
    pods = [p for p in facts.kubectl(manifest.KUBECTL_PODS) if "efa" in _name(p) and "device-plugin" in _name(p)]
    findings = []
    for pod in pods:
        for status in rows(pod, "status", "containerStatuses"):
            restarts, waits = status.get("restartCount", 0), dig(status, "state", "waiting", "reason")
            evidence = f"{_name(pod)} on {dig(pod, 'spec', 'nodeName')}: {waits or 'running'}, {restarts} restarts"
            if waits:
                findings.append(failed("the EFA device plugin does not stay up", evidence))
            elif isinstance(restarts, int) and restarts >= 3:
                findings.append(warned("the EFA device plugin was restarted", evidence))
    return worst(findings, passed("the EFA device plugin stays up") if pods else skipped("no device plugin pod"))


CHECKS = (
    node_offers,
    pod_takes_all,
    huge_pages,
    device_plugin,
    host_path,
    memlock,
    shared_memory,
    one_zone,
    pod_address,
    user_space,
    not_a_netdev,
    neuron_devices,
    one_allocator,
    scheduled,
    provided,
    within_memory,
    plugin_stays_up,
)
