from __future__ import annotations

import importlib
import platform
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from kvops.cli.main import main
from kvops.launch import helm, kubernetes
from kvops.topology import load_topology

if platform.machine() != "x86_64":
    pytest.skip("not run: helm-python-sdk has wheels for x86-64 only", allow_module_level=True)
helm_python: Any = importlib.import_module("helm_python")

pytestmark = pytest.mark.heavy
FIXTURES = Path(__file__).parents[2] / "fixtures" / "render"
FLEETS = ("p5en-1p1d", "p5en-2p2d", "trn2-1p1d", "p6-b200-two-nodes", "cpu-demo")


def written(fleet: Path, folder: Path) -> Path:
    result = CliRunner().invoke(main, ["render", "kubernetes", "--helm", "-f", str(fleet), "-o", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


def objects(texts: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    loaded = [item for text in texts for item in yaml.load_all(text, yaml.CSafeLoader) if item]
    return {(item["kind"], item["metadata"]["name"]): item for item in loaded}


def installed(folder: Path, values: dict[str, Any] | None = None, namespace: str = "kvops") -> dict[Any, Any]:
    """Return the objects that Helm would install."""
    with helm_python.Chart.load(folder) as chart:
        return objects(list(chart.render(values or {}, name="kvops", namespace=namespace).values()))


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    return written(FIXTURES / "p5en-2p2d.yaml", tmp_path / "chart")


@pytest.mark.parametrize("fleet", FLEETS)
def test_helm_renders_the_same_objects_from_the_chart_as_the_plain_manifests_have(fleet: str, tmp_path: Path) -> None:
    plain = objects(list(kubernetes.render(load_topology(FIXTURES / f"{fleet}.yaml")).values()))
    del plain["Namespace", "kvops"]
    assert installed(written(FIXTURES / f"{fleet}.yaml", tmp_path)) == plain


def test_helm_lints_the_chart_without_a_finding(chart: Path) -> None:
    found = helm_python.lint(str(chart))
    # 1 is advice: a chart without an icon.
    assert [each for each in found["messages"] if each["severity"] > 1] == []


def test_the_values_change_what_they_name(chart: Path) -> None:
    values = {"image": "other:2", "replicas": {"prefill": 3, "decode": 5, "router": 4}, "monitoring": False}
    found = installed(chart, values, namespace="blue")
    assert [found[key]["spec"]["replicas"] for key in (("StatefulSet", "prefill"), ("StatefulSet", "decode"))] == [3, 5]
    router = found["Deployment", "router"]["spec"]
    assert router["replicas"] == 4
    (container,) = router["template"]["spec"]["containers"]
    assert container["image"] == "other:2"
    assert "dns+http://decode.blue.svc:8100" in container["command"]
    assert {item["metadata"]["namespace"] for item in found.values()} == {"blue"}
    assert not {"PodMonitor", "PrometheusRule"} & {kind for kind, _ in found}


def test_an_image_with_kvops_alone_is_a_value_too(tmp_path: Path) -> None:
    file = tmp_path / "kvops.yaml"
    file.write_text("preset: p5en\nkubernetes: {image: vllm, kvops_image: kvops}\n")
    found = installed(written(file, tmp_path / "chart"), {"kvopsImage": "kvops:2"})
    pod = found["StatefulSet", "decode"]["spec"]["template"]["spec"]
    assert [c["image"] for c in (*pod["initContainers"], *pod["containers"])] == ["kvops:2", "vllm", "vllm"]


@pytest.mark.parametrize("wrong", [{"imge": "x"}, {"replicas": {"decode": "two"}}, {"image": ""}])
def test_a_wrong_value_is_refused(chart: Path, wrong: dict[str, Any]) -> None:
    with helm_python.Chart.load(chart) as loaded, pytest.raises(helm_python.HelmError):
        loaded.validate_schema(loaded.merge_values(wrong))


def test_the_same_topology_gives_the_same_bytes() -> None:
    topology = load_topology(FIXTURES / "p5en-1p1d.yaml")
    files = helm.render(topology)
    assert files == helm.render(topology)
    assert files["values.yaml"] == (FIXTURES / "p5en-1p1d.values.yaml").read_text()


def test_a_chart_needs_a_folder() -> None:
    result = CliRunner().invoke(main, ["render", "kubernetes", "--helm", "-f", str(FIXTURES / "cpu-demo.yaml")])
    assert (result.exit_code, "name the folder with -o" in result.output) == (2, True)
