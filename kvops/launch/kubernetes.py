"""The fleet as Kubernetes manifests: engines, router, services, policies.

Sources: the LeaderWorkerSet API and vLLM's guide to it (https://docs.vllm.ai/en/latest/deployment/frameworks/lws.html:
``--nnodes``, ``--node-rank``, ``LWS_*`` variables, ``--headless`` workers), the EFA page of the EKS guide
(``vpc.amazonaws.com/efa`` and ``hugepages-2Mi: 5120Mi``), the Prometheus operator's API (PodMonitor).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from kvops import tiny_model
from kvops.doctor.instances import instances
from kvops.errors import KvopsError
from kvops.launch.engine_script import ENGINE_PORT, ROUTER_PORT, SIDE_CHANNEL_PORT, start_script
from kvops.topology import Group, Platform, instance_type
from kvops_dashboards import provision, stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvops.doctor.instances import Instance
    from kvops.topology import Topology

    Manifest = dict[str, Any]

ENGINE_USER = 1000
_FLEET, _ROLE = "app.kubernetes.io/part-of", "app.kubernetes.io/component"
_HOST, _ZONE, _TYPE = "kubernetes.io/hostname", "topology.kubernetes.io/zone", "node.kubernetes.io/instance-type"
_LEADER = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
_PROBE = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10, "timeoutSeconds": 5}


def render(topology: Topology) -> dict[str, str]:
    """Return the manifests by file name; the same topology gives the same bytes.

    Raises:
        KvopsError: the topology lacks what a cluster needs, or asks for more than its nodes have.
    """
    _check(topology)
    files = {
        "00-namespace.yaml": [_namespace(topology)],
        "10-prefill.yaml": _engines(topology, "prefill"),
        "10-decode.yaml": _engines(topology, "decode"),
        "20-router.yaml": _router(topology),
        "30-network.yaml": [_engine_policy(topology), _router_policy(topology)],
    }
    return {name: _text(manifests) for name, manifests in files.items()} | dict(_monitoring(topology))


class _Dumper(yaml.SafeDumper):
    """Writes scripts as blocks and repeats what is equal rather than pointing at it."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _text(manifests: list[Manifest]) -> str:
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=120, explicit_start=True)


def _check(topology: Topology) -> None:
    settings = topology.kubernetes
    if not settings.image:
        raise KvopsError("kubernetes.image is not set", "name an image that has vLLM, NIXL and kvops in it")
    kind = instance_type(topology)
    if topology.platform is not Platform.CPU and kind not in instances():
        raise KvopsError(
            f"the nodes' EC2 type {kind!r} is not known here" if kind else "the nodes' EC2 type is not set",
            "set kubernetes.instance_type, such as p5en.48xlarge",
        )
    if topology.platform is not Platform.CPU and topology.model == tiny_model.MODEL_NAME:
        raise KvopsError(f"{tiny_model.MODEL_NAME} runs on CPUs only", "set model to a model id or a folder in /models")
    if topology.router.api_key_file:
        raise KvopsError(
            f"router.api_key_file is {topology.router.api_key_file}, which no pod has",
            "put the keys into a Secret and name it in kubernetes.api_key_secret",
        )
    for role, group in topology.groups():
        _check_size(role, group, _node(topology))


def _check_size(role: str, group: Group, node: Instance | None) -> None:
    width = group.tensor_parallel * group.data_parallel // group.nodes
    if node and node.gpus and width > node.gpus:
        raise KvopsError(
            f"one {role} engine takes {width} GPUs of a node, and a {node.name} has {node.gpus}",
            f"set {role}.nodes to {-(-width * group.nodes // node.gpus)}",
        )
    if group.nodes > 1 and node is None:
        raise KvopsError(f"{role}.nodes is {group.nodes} on CPUs", "leave it out: only accelerators are spanned")
    if group.nodes > 1 and group.data_parallel > 1:
        raise KvopsError(
            f"{role} has nodes {group.nodes} and data_parallel {group.data_parallel}",
            "span machines by tensor_parallel, and add engines by replicas",
        )


def _node(topology: Topology) -> Instance | None:
    kind = instance_type(topology)
    return instances()[kind] if topology.platform is not Platform.CPU and kind else None


def _meta(topology: Topology, name: str, role: str) -> Manifest:
    return {"name": name, "namespace": topology.kubernetes.namespace, "labels": _labels(role)}


def _labels(role: str) -> Manifest:
    return {_FLEET: "kvops", _ROLE: role}


def _namespace(topology: Topology) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": topology.kubernetes.namespace, "labels": {_FLEET: "kvops"}},
    }


def _engines(topology: Topology, role: str) -> list[Manifest]:
    group = dict(topology.groups())[role]
    scripts = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _meta(topology, f"{role}-start", role),
        "data": {"start.sh": start_script(topology, role)},
    }
    selector = _labels(role) | (_LEADER if group.nodes > 1 else {})
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(topology, role, role),
        # Headless: the router sees each engine that is ready, and none that is ending.
        "spec": {"clusterIP": "None", "selector": selector, "ports": [{"name": "http", "port": ENGINE_PORT}]},
    }
    workload = _leader_worker_set(topology, role) if group.nodes > 1 else _stateful_set(topology, role)
    return [scripts, service, workload]


def _stateful_set(topology: Topology, role: str) -> Manifest:
    group = dict(topology.groups())[role]
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _meta(topology, role, role),
        "spec": {
            "replicas": group.replicas,
            "serviceName": role,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": _labels(role)},
            "template": {"metadata": {"labels": _labels(role)}, "spec": _engine_pod(topology, role, serves=True)},
        },
    }


def _leader_worker_set(topology: Topology, role: str) -> Manifest:
    group = dict(topology.groups())[role]
    leader = {"metadata": {"labels": _labels(role)}, "spec": _engine_pod(topology, role, serves=True)}
    worker = {"metadata": {"labels": _labels(role)}, "spec": _engine_pod(topology, role, serves=False)}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": _meta(topology, role, role),
        "spec": {
            "replicas": group.replicas,
            "leaderWorkerTemplate": {
                "size": group.nodes,
                # Ranks of a group share one communicator, which no restarted rank can join again.
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": leader,
                "workerTemplate": worker,
            },
        },
    }


def _engine_pod(topology: Topology, role: str, *, serves: bool) -> Manifest:
    """Return the spec of an engine's pod; only the first of a group ``serves`` HTTP."""
    settings, node = topology.kubernetes, _node(topology)
    shared: Manifest = {
        "image": settings.image,
        "env": _engine_env(topology, role),
        "resources": _engine_resources(topology, role),
        "securityContext": _container_security(rdma=node is not None),
        "volumeMounts": _engine_mounts(topology),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    check = {"name": "doctor", "command": ["python3", "-m", "kvops.cli.main", "doctor", "--only", "quick"], **shared}
    engine = {"name": "vllm", "command": ["/bin/sh", "/start/start.sh"], **shared}
    if serves:
        engine |= _serving(topology, dict(topology.groups())[role].data_parallel)
    else:
        engine |= {"args": ["--headless"]}
        # A rank without HTTP has nothing to ask but whether its process is there.
        alive = {"exec": {"command": ["pgrep", "-f", "vllm"]}, "periodSeconds": 30, "timeoutSeconds": 10}
        engine |= {"readinessProbe": alive, "livenessProbe": alive, "startupProbe": alive | {"failureThreshold": 10}}
    pod: Manifest = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": settings.drain_seconds + 30,
        "securityContext": _pod_security(rdma=node is not None),
        "affinity": _affinity(apart=node is not None),
    }
    if node:
        pod["nodeSelector"] = {_TYPE: node.name}
        resource = "nvidia.com/gpu" if node.gpus else "aws.amazon.com/neuron"
        pod["tolerations"] = [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}]
    before = [_delivery(topology), check] if settings.kvops_image else [check]
    return pod | {"initContainers": before, "containers": [engine], "volumes": _engine_volumes(topology, role)}


def _delivery(topology: Topology) -> Manifest:
    """Return the container that brings kvops to engines whose image has vLLM and NIXL alone."""
    resources = {"cpu": "1", "memory": "256Mi"}
    return {
        "name": "kvops",
        "image": topology.kubernetes.kvops_image,
        "command": ["python3", "-m", "kvops.launch.deliver", "/kvops"],
        "resources": {"requests": resources, "limits": resources},
        "securityContext": _container_security(rdma=False) | {"readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "kvops", "mountPath": "/kvops"}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _serving(topology: Topology, ranks: int) -> Manifest:
    settings = topology.kubernetes
    drain = ["python3", "-m", "kvops.launch.drain", f"http://127.0.0.1:{ENGINE_PORT}", str(settings.drain_seconds)]
    return {
        "ports": [
            {"name": "http", "containerPort": ENGINE_PORT},
            # vLLM's rank N listens on the base port plus N.
            *({"name": f"side-channel-{rank}", "containerPort": SIDE_CHANNEL_PORT + rank} for rank in range(ranks)),
        ],
        "startupProbe": _PROBE | {"failureThreshold": settings.startup_minutes * 6},
        "readinessProbe": _PROBE | {"failureThreshold": 3},
        # An engine that compiles or works on a long prompt answers late; killing it would lose all its requests.
        "livenessProbe": _PROBE | {"periodSeconds": 30, "timeoutSeconds": 15, "failureThreshold": 10},
        "lifecycle": {"preStop": {"exec": {"command": drain}}},
    }


def _engine_env(topology: Topology, role: str) -> list[Manifest]:
    group = dict(topology.groups())[role]
    own = {"POD_NAME": "metadata.name", "VLLM_NIXL_SIDE_CHANNEL_HOST": "status.podIP", "VLLM_HOST_IP": "status.podIP"}
    env: list[Manifest] = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in own.items()]
    values = {
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL_PORT),
        "HOME": "/cache",
        "VLLM_CACHE_ROOT": "/cache/vllm",
        "HF_HOME": "/cache/huggingface",
    }
    if topology.kubernetes.kvops_image:
        values["PYTHONPATH"] = "/kvops"
    if topology.kubernetes.token_secret:
        values["HF_TOKEN_PATH"] = "/secrets/huggingface/token"  # noqa: S105
    if topology.platform is Platform.NEURON:
        values["NEURON_COMPILE_CACHE_URL"] = "/cache/neuron"
    values |= topology.transport.env | group.env
    return env + [{"name": name, "value": value} for name, value in values.items()]


def _engine_resources(topology: Topology, role: str) -> Manifest:
    settings, node, group = topology.kubernetes, _node(topology), dict(topology.groups())[role]
    amounts: Manifest = {"cpu": str(settings.cpu), "memory": settings.memory}
    if node and node.gpus:
        amounts["nvidia.com/gpu"] = str(group.tensor_parallel * group.data_parallel // group.nodes)
    if node and node.neurons:
        # Each Neuron device registers its memory with its own EFA, so a pod takes the node whole.
        amounts["aws.amazon.com/neuron"] = str(node.neurons)
    if node and node.efas:
        amounts |= {"vpc.amazonaws.com/efa": str(node.efas), "hugepages-2Mi": settings.huge_pages}
    return {"requests": amounts, "limits": amounts}


def _container_security(*, rdma: bool) -> Manifest:
    # Registering memory with a rail locks it, and the container runtime may limit locked memory.
    capabilities: Manifest = {"drop": ["ALL"]} | ({"add": ["IPC_LOCK"]} if rdma else {})
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}


def _pod_security(*, rdma: bool) -> Manifest:
    profile = {"seccompProfile": {"type": "RuntimeDefault"}}
    # Kubernetes gives an added capability to processes of root only, so an engine that needs IPC_LOCK runs as root.
    user = {} if rdma else {"runAsNonRoot": True, "runAsUser": ENGINE_USER, "fsGroup": ENGINE_USER}
    return profile | user


def _affinity(*, apart: bool) -> Manifest:
    engines = {"matchLabels": {_FLEET: "kvops"}, "matchExpressions": [_one_of("prefill", "decode")]}
    same_zone = {"labelSelector": engines, "topologyKey": _ZONE}
    other_node = {"labelSelector": engines, "topologyKey": _HOST}
    if not apart:
        preferred = [{"weight": 100, "podAffinityTerm": other_node}]
        return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    return {
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [same_zone]},
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [other_node]},
    }


def _one_of(*roles: str) -> Manifest:
    return {"key": _ROLE, "operator": "In", "values": list(roles)}


def _engine_mounts(topology: Topology) -> list[Manifest]:
    settings = topology.kubernetes
    mounts: list[Manifest] = [
        {"name": "start", "mountPath": "/start", "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        {"name": "cache", "mountPath": "/cache"},
        {"name": "journal", "mountPath": "/journal"},
    ]
    if settings.kvops_image:
        mounts.append({"name": "kvops", "mountPath": "/kvops", "readOnly": True})
    if settings.model_claim:
        mounts.append({"name": "models", "mountPath": "/models", "readOnly": True})
    if settings.token_secret:
        mounts.append({"name": "token", "mountPath": "/secrets/huggingface", "readOnly": True})
    return mounts


def _engine_volumes(topology: Topology, role: str) -> list[Manifest]:
    settings = topology.kubernetes
    cache = {"persistentVolumeClaim": {"claimName": settings.cache_claim}} if settings.cache_claim else {"emptyDir": {}}
    volumes: list[Manifest] = [
        {"name": "start", "configMap": {"name": f"{role}-start"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}},
        {"name": "cache", **cache},
        {"name": "journal", "emptyDir": {"sizeLimit": "4Gi"}},
    ]
    if settings.kvops_image:
        volumes.append({"name": "kvops", "emptyDir": {"sizeLimit": "256Mi"}})
    if settings.model_claim:
        claim = {"claimName": settings.model_claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
    if settings.token_secret:
        volumes.append({"name": "token", "secret": {"secretName": settings.token_secret, "defaultMode": 0o440}})
    return volumes


def _router(topology: Topology) -> list[Manifest]:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(topology, "router", "router"),
        "spec": {
            "selector": _labels("router"),
            # Each router knows only the conversations that it served itself.
            "sessionAffinity": "ClientIP",
            "ports": [{"name": "http", "port": ROUTER_PORT, "targetPort": "http"}],
        },
    }
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _meta(topology, "router", "router"),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": _labels("router")}},
    }
    return [_router_deployment(topology), service, budget]


def _router_deployment(topology: Topology) -> Manifest:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(topology, "router", "router"),
        "spec": {
            "replicas": topology.kubernetes.router_replicas,
            "selector": {"matchLabels": _labels("router")},
            "template": {"metadata": {"labels": _labels("router")}, "spec": _router_pod(topology)},
        },
    }


def _router_pod(topology: Topology) -> Manifest:
    settings = topology.kubernetes
    resources = {"cpu": "1", "memory": "2Gi"}
    mounts: list[Manifest] = [{"name": "journal", "mountPath": "/journal"}]
    volumes: list[Manifest] = [{"name": "journal", "emptyDir": {"sizeLimit": "4Gi"}}]
    if settings.api_key_secret:
        mounts.append({"name": "keys", "mountPath": "/secrets/router", "readOnly": True})
        volumes.append({"name": "keys", "secret": {"secretName": settings.api_key_secret, "defaultMode": 0o440}})
    router = {
        "name": "router",
        "image": settings.kvops_image or settings.image,
        "command": _router_command(topology),
        "ports": [{"name": "http", "containerPort": ROUTER_PORT}],
        "resources": {"requests": resources, "limits": resources},
        "securityContext": _container_security(rdma=False) | {"readOnlyRootFilesystem": True},
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "http"}, "periodSeconds": 5, "timeoutSeconds": 2},
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 10, "timeoutSeconds": 5},
        # Until every node has heard that this pod is ending, new connections still come.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "10"]}}},
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 60,
        "securityContext": _pod_security(rdma=False),
        "containers": [router],
        "volumes": volumes,
    }


def _router_command(topology: Topology) -> list[str]:
    argv = ["kvops", "router"]
    for role, group in topology.groups():
        ranks = f"#0-{group.data_parallel - 1}" if group.data_parallel > 1 else ""
        name = f"{role}.{topology.kubernetes.namespace}.svc"
        argv += [f"--{role}", f"dns+http://{name}:{ENGINE_PORT}{ranks}"]
    argv += ["--mode", topology.mode.value, "--host", "0.0.0.0", "--port", str(ROUTER_PORT)]  # noqa: S104
    argv += ["--decoder-ttl", str(topology.kv.decoder_ttl), "--journal", "/journal/router.jsonl"]
    return argv + (["--api-key-file", "/secrets/router/keys"] if topology.kubernetes.api_key_secret else [])


def _from_fleet(*roles: str) -> Manifest:
    return {"podSelector": {"matchExpressions": [_one_of(*roles)]}}


def _policy(topology: Topology, name: str, pods: Manifest, ingress: list[Manifest]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _meta(topology, name, name),
        "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _engine_policy(topology: Topology) -> Manifest:
    namespace = {"kubernetes.io/metadata.name": topology.kubernetes.monitoring_namespace}
    ingress = [
        # NIXL listens on ports that the kernel chooses.
        {"from": [_from_fleet("prefill", "decode")]},
        {
            "from": [_from_fleet("router"), {"namespaceSelector": {"matchLabels": namespace}}],
            "ports": [{"port": ENGINE_PORT, "protocol": "TCP"}],
        },
    ]
    return _policy(topology, "engines", {"matchExpressions": [_one_of("prefill", "decode")]}, ingress)


def _router_policy(topology: Topology) -> Manifest:
    return _policy(
        topology, "router", {"matchLabels": _labels("router")}, [{"ports": [{"port": ROUTER_PORT, "protocol": "TCP"}]}]
    )


def _monitoring(topology: Topology) -> Iterator[tuple[str, str]]:
    boards, rules = stored.dashboards(), stored.rule_files()
    for name, text in provision.kubernetes_files(boards, rules, topology.kubernetes.monitoring_namespace):
        # Flat, for kubectl apply -f FOLDER does not look into folders below.
        yield f"40-{name.rpartition('/')[2]}", f"---\n{text}"
