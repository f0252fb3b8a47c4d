from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from kvops.cli.main import main
from kvops.launch.kubernetes import render
from kvops.topology import load_topology

FIXTURES = Path(__file__).parents[2] / "fixtures" / "render"
CRDS = FIXTURES.parent / "crds"
FLEETS = ("p5en-1p1d", "p5en-2p2d", "trn2-1p1d", "p6-b200-two-nodes", "cpu-demo")
CUSTOM = {"LeaderWorkerSet", "PodMonitor", "PrometheusRule"}
# What they hold is generated and tested by its own package.
SHIPPED = "40-"


def strict(schema: Any) -> Any:
    """Return the schema with unknown keys refused wherever it names keys, as the API server's strict validation does."""
    if isinstance(schema, dict):
        closed = {key: strict(value) for key, value in schema.items()}
        return {"additionalProperties": False} | closed if isinstance(schema.get("properties"), dict) else closed
    return schema


def check_custom(manifest: dict[str, Any]) -> None:
    schema = strict(yaml.safe_load((CRDS / f"{manifest['kind'].lower()}.yaml").read_text()))
    jsonschema.validate(manifest, schema)


@cache
def rendered(fleet: str) -> dict[str, str]:
    return render(load_topology(FIXTURES / f"{fleet}.yaml"))


@cache
def parsed(fleet: str) -> str:
    # libyaml: in Python alone the dashboards take seconds.
    texts = rendered(fleet).values()
    return json.dumps([manifest for text in texts for manifest in yaml.load_all(text, yaml.CSafeLoader)])


def manifests(fleet: str) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads(parsed(fleet))
    return loaded


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


def find(fleet: str, kind: str, name: str) -> dict[str, Any]:
    return next(m for m in manifests(fleet) if (m["kind"], m["metadata"]["name"]) == (kind, name))


@pytest.mark.heavy
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
def test_custom_resources_fit_the_schemas_of_their_crds(fleet: str) -> None:
    for manifest in manifests(fleet):
        if manifest["kind"] in CUSTOM:
            check_custom(manifest)


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("LeaderWorkerSet", "prefill", {"restartPolicy": "RecreateGroupOnPodRestart"}),
        ("LeaderWorkerSet", "decode", {"leaderWorkerTemplate": {"size": "2"}}),
        ("PodMonitor", "kvops-engines", {"podMetricsEndpoint": []}),
        ("PodMonitor", "kvops-router", {"podMetricsEndpoints": [{"interval": "soon"}]}),
        ("PrometheusRule", "kvops", {"groups": [{"rules": []}]}),
    ],
)
def test_the_check_of_custom_resources_finds_what_is_wrong(kind: str, name: str, change: dict[str, Any]) -> None:
    wrong = find("p6-b200-two-nodes", kind, name)
    wrong["spec"] |= change
    with pytest.raises(jsonschema.ValidationError):
        check_custom(wrong)


@pytest.mark.parametrize("fleet", FLEETS)
def test_the_same_topology_gives_the_committed_bytes(fleet: str) -> None:
    text = "".join(text for name, text in rendered(fleet).items() if not name.startswith(SHIPPED))
    assert text == (FIXTURES / f"{fleet}.kubernetes.yaml").read_text()


def chooses(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert all(each["operator"] == "In" for each in selector["matchExpressions"])
    return all(labels.get(key) == value for key, value in selector["matchLabels"].items()) and all(
        labels.get(each["key"]) in each["values"] for each in selector["matchExpressions"]
    )


def test_one_monitor_of_the_dashboards_chooses_each_pod_and_names_a_port_that_it_has() -> None:
    monitors = [m["spec"] for m in manifests("p6-b200-two-nodes") if m["kind"] == "PodMonitor"]
    for manifest in manifests("p6-b200-two-nodes"):
        for template in pod_templates(manifest):
            (monitor,) = [m for m in monitors if chooses(m["selector"], template["metadata"]["labels"])]
            ports = [port["name"] for c in template["spec"]["containers"] for port in c.get("ports", ())]
            # The ranks behind an engine's first node have no port, so no monitor asks them.
            headless = template["spec"]["containers"][0].get("args") == ["--headless"]
            assert (monitor["podMetricsEndpoints"][0]["port"] in ports) is not headless


def test_rules_and_dashboards_come_as_the_operator_and_grafana_take_them() -> None:
    kinds = [manifest["kind"] for manifest in manifests("cpu-demo")]
    assert kinds.count("PrometheusRule") >= 1
    boards = [m for m in manifests("cpu-demo") if m["metadata"].get("labels", {}).get("grafana_dashboard") == "1"]
    assert all("panels" in text for board in boards for text in board["data"].values())
    assert boards


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


def test_every_rank_of_an_engine_has_a_side_channel_port_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "kvops.yaml"
    file.write_text("preset: p5en\ndecode: {data_parallel: 4, tensor_parallel: 1}\nkubernetes: {image: x}\n")
    text = render(load_topology(file))["10-decode.yaml"]
    (workload,) = [m for m in yaml.safe_load_all(text) if m["kind"] == "StatefulSet"]
    ports = workload["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert [port["containerPort"] for port in ports] == [8100, 5600, 5601, 5602, 5603]


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


def test_engines_in_an_image_without_kvops_get_it_from_one_that_has_it(tmp_path: Path) -> None:
    file = tmp_path / "kvops.yaml"
    file.write_text("preset: p5en\nkubernetes: {image: vllm, kvops_image: kvops}\n")
    rendered = [m for text in render(load_topology(file)).values() for m in yaml.load_all(text, yaml.CSafeLoader)]
    pods = {m["metadata"]["name"]: t["spec"] for m in rendered for t in pod_templates(m)}
    assert pods["router"]["containers"][0]["image"] == "kvops"
    for role in ("prefill", "decode"):
        deliver, doctor = pods[role]["initContainers"]
        assert (deliver["image"], deliver["command"][2:]) == ("kvops", ["kvops.launch.deliver", "/kvops"])
        for container in (doctor, *pods[role]["containers"]):
            assert container["image"] == "vllm"
            assert {"name": "PYTHONPATH", "value": "/kvops"} in container["env"]
            assert {"name": "kvops", "mountPath": "/kvops", "readOnly": True} in container["volumeMounts"]


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
