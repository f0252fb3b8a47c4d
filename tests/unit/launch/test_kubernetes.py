from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from kvops.cli.main import main
from kvops.launch.kubernetes import render
from kvops.topology import load_topology

FIXTURES = Path(__file__).parents[2] / "fixtures" / "render"
FLEETS = ("p5en-1p1d", "p5en-2p2d", "trn2-1p1d", "p6-b200-two-nodes", "cpu-demo")
CUSTOM = {"LeaderWorkerSet", "PodMonitor"}
# Of the custom resources, the keys that their reference pages name for what is rendered; nothing else may appear:
# https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/ and
# https://prometheus-operator.dev/docs/api-reference/api/#monitoring.coreos.com/v1.PodMonitor
KEYS = {
    "LeaderWorkerSet": {
        "spec": {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy", "networkConfig"},
        "spec.leaderWorkerTemplate": {"leaderTemplate", "workerTemplate", "size", "restartPolicy"},
    },
    "PodMonitor": {
        "spec": {"selector", "podMetricsEndpoints", "namespaceSelector", "jobLabel", "podTargetLabels"},
        "spec.podMetricsEndpoints.0": {"port", "path", "interval", "scheme", "scrapeTimeout"},
    },
}


def manifests(fleet: str) -> list[dict[str, Any]]:
    files = render(load_topology(FIXTURES / f"{fleet}.yaml"))
    return [manifest for text in files.values() for manifest in yaml.safe_load_all(text)]


def pod_templates(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    spec = manifest.get("spec", {})
    if "leaderWorkerTemplate" in spec:
        yield spec["leaderWorkerTemplate"]["leaderTemplate"]
        yield spec["leaderWorkerTemplate"]["workerTemplate"]
    elif "template" in spec:
        yield spec["template"]


def pods(fleet: str) -> list[dict[str, Any]]:
    return [template["spec"] for manifest in manifests(fleet) for template in pod_templates(manifest)]


def containers(fleet: str) -> list[dict[str, Any]]:
    return [c for pod in pods(fleet) for c in (*pod.get("initContainers", ()), *pod["containers"])]


def at(manifest: dict[str, Any], path: str) -> Any:
    value: Any = manifest
    for part in path.split("."):
        value = value[int(part) if part.isdigit() else part]
    return value


def find(fleet: str, kind: str, name: str) -> dict[str, Any]:
    return next(m for m in manifests(fleet) if (m["kind"], m["metadata"]["name"]) == (kind, name))


@pytest.mark.parametrize("version", ["1.31.0", "1.37.0"])
@pytest.mark.parametrize("fleet", FLEETS)
def test_what_is_rendered_fits_the_schemas_of_two_kubernetes_versions(fleet: str, version: str) -> None:
    for manifest in manifests(fleet):
        if manifest["kind"] not in CUSTOM:
            kubernetes_validate.validate(manifest, version, strict=True)
        for template in pod_templates(manifest):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"} | template["metadata"]}
            kubernetes_validate.validate(pod | {"spec": template["spec"]}, version, strict=True)


def test_the_schema_check_finds_a_misspelt_key() -> None:
    wrong = find("cpu-demo", "StatefulSet", "decode")
    wrong["spec"]["template"]["spec"]["terminationGraceSeconds"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.31.0", strict=True)


@pytest.mark.parametrize("fleet", FLEETS)
def test_custom_resources_use_only_the_keys_of_their_reference(fleet: str) -> None:
    for manifest in manifests(fleet):
        for path, keys in KEYS.get(manifest["kind"], {}).items():
            assert set(at(manifest, path)) <= keys


@pytest.mark.parametrize("fleet", FLEETS)
def test_the_same_topology_gives_the_committed_bytes(fleet: str) -> None:
    result = CliRunner().invoke(main, ["render", "kubernetes", "-f", str(FIXTURES / f"{fleet}.yaml")])
    assert result.output == (FIXTURES / f"{fleet}.kubernetes.yaml").read_text()


@pytest.mark.parametrize("fleet", FLEETS)
def test_every_container_has_requests_and_limits(fleet: str) -> None:
    for container in containers(fleet):
        for side in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(container["resources"][side]), container["name"]


@pytest.mark.parametrize("fleet", FLEETS)
def test_every_container_that_stays_is_probed(fleet: str) -> None:
    for pod in pods(fleet):
        for container in pod["containers"]:
            assert {"readinessProbe", "livenessProbe"} <= set(container), container["name"]


@pytest.mark.parametrize("fleet", FLEETS)
def test_no_pod_takes_more_of_its_node_than_it_needs(fleet: str) -> None:
    for pod in pods(fleet):
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert not any("hostPath" in volume for volume in pod["volumes"])
    for container in containers(fleet):
        security = container["securityContext"]
        assert "privileged" not in security
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        assert set(security["capabilities"].get("add", ())) <= {"IPC_LOCK"}


@pytest.mark.parametrize("fleet", FLEETS)
def test_only_engines_that_lock_memory_run_as_root(fleet: str) -> None:
    for pod in pods(fleet):
        locks = any("add" in container["securityContext"]["capabilities"] for container in pod["containers"])
        assert pod["securityContext"].get("runAsNonRoot", False) is not locks


def test_secrets_are_mounted_for_reading_and_stand_in_no_environment() -> None:
    for pod in pods("p5en-2p2d"):
        secret = {volume["name"] for volume in pod["volumes"] if "secret" in volume}
        mounts = [mount for c in pod["containers"] for mount in c["volumeMounts"] if mount["name"] in secret]
        assert secret
        assert all(mount["readOnly"] for mount in mounts)
        assert not any("secretKeyRef" in str(c.get("env")) for c in pod["containers"])


@pytest.mark.parametrize(
    ("fleet", "resources"),
    [
        ("p5en-1p1d", {"nvidia.com/gpu": "4", "vpc.amazonaws.com/efa": "16", "hugepages-2Mi": "5120Mi"}),
        ("p6-b200-two-nodes", {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "8", "hugepages-2Mi": "5120Mi"}),
        ("trn2-1p1d", {"aws.amazon.com/neuron": "16", "vpc.amazonaws.com/efa": "16", "hugepages-2Mi": "5120Mi"}),
        ("cpu-demo", {}),
    ],
)
def test_an_engine_takes_its_devices_and_all_efas_of_its_node(fleet: str, resources: dict[str, str]) -> None:
    for pod in pods(fleet):
        for container in pod["containers"]:
            if container["name"] == "vllm":
                limits = container["resources"]["limits"]
                assert {key: value for key, value in limits.items() if key not in ("cpu", "memory")} == resources


def test_an_engine_over_two_nodes_is_a_leader_worker_set_whose_leader_alone_is_routed_to() -> None:
    workload = find("p6-b200-two-nodes", "LeaderWorkerSet", "prefill")["spec"]["leaderWorkerTemplate"]
    assert (workload["size"], workload["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    worker = workload["workerTemplate"]["spec"]["containers"][0]
    assert worker["args"] == ["--headless"]
    assert "ports" not in worker
    selector = find("p6-b200-two-nodes", "Service", "prefill")["spec"]["selector"]
    assert selector["leaderworkerset.sigs.k8s.io/worker-index"] == "0"


def test_prefill_and_decode_are_kept_on_different_nodes_of_one_zone() -> None:
    affinity = find("p5en-2p2d", "StatefulSet", "prefill")["spec"]["template"]["spec"]["affinity"]
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    assert affinity["podAntiAffinity"][key][0]["topologyKey"] == "kubernetes.io/hostname"
    assert affinity["podAffinity"][key][0]["topologyKey"] == "topology.kubernetes.io/zone"
    assert "decode" in str(affinity["podAntiAffinity"])


def test_the_router_follows_the_headless_services() -> None:
    command = " ".join(
        find("p5en-2p2d", "Deployment", "router")["spec"]["template"]["spec"]["containers"][0]["command"]
    )
    for role in ("prefill", "decode"):
        assert f"--{role} dns+http://{role}.kvops.svc:8100" in command
        assert find("p5en-2p2d", "Service", role)["spec"]["clusterIP"] == "None"


def test_an_engine_may_drain_until_its_pod_is_killed() -> None:
    pod = find("p5en-1p1d", "StatefulSet", "decode")["spec"]["template"]["spec"]
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:3] == ["python3", "-m", "kvops.launch.drain"]
    assert pod["terminationGracePeriodSeconds"] > int(command[-1])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("preset: p5en\n", "kubernetes.image is not set"),
        ("preset: cuda-local\nkubernetes: {image: x}\n", "the nodes' EC2 type is not set"),
        ("preset: p5en\nkubernetes: {image: x, instance_type: p9.metal}\n", "'p9.metal' is not known"),
        ("preset: p5en\nprefill: {tensor_parallel: 16, devices: 0-15}\ndecode: {devices: 16-19}\n"
         "kubernetes: {image: x}\n", "a p5en.48xlarge has 8; set prefill.nodes to 2"),
        ("preset: p5en\nkubernetes: {image: x, memory: lots}\n", "kvops.yaml:2: kubernetes.memory is 'lots'"),
        ("preset: p5en\nkubernetes:\n  imag: x\n", "kvops.yaml:3: unknown key kubernetes.imag; did you mean image?"),
        ("preset: p5en\nprefill:\n  nodes: 3\n", "kvops.yaml:3: prefill.nodes is 3, which does not divide"),
        ("preset: p5en\nkubernetes: {image: x}\nrouter: {api_key_file: keys}\n", "kubernetes.api_key_secret"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered_is_said_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "kvops.yaml"
    file.write_text(text)
    result = CliRunner().invoke(main, ["render", "kubernetes", "-f", str(file)])
    assert (result.exit_code, sentence in result.output) == (2, True), result.output


def test_a_fleet_that_spans_machines_is_not_started_on_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["up", "--dry-run", "-f", str(FIXTURES / "p6-b200-two-nodes.yaml")])
    assert (result.exit_code, "use kvops render kubernetes" in result.output) == (2, True)


def test_files_are_written_to_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    result = CliRunner().invoke(
        main, ["render", "kubernetes", "-f", str(FIXTURES / "cpu-demo.yaml"), "-o", str(folder)]
    )
    assert result.exit_code == 0
    assert sorted(result.output.split()) == sorted(map(str, folder.iterdir()))
    assert (folder / "10-prefill.yaml").read_text().startswith("---\n")
