"""The files for Grafana, Prometheus, compose and kube-prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvops.launch.kubernetes import render
from kvops.topology import load_topology
from kvops_dashboards import stored
from kvops_dashboards.provision import write_provisioning
from kvops_dashboards.scraping import Target

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    engines = [Target("10.0.0.1:8100", {"role": "prefill"}), Target("10.0.0.2:8200", {"role": "decode"})]
    write_provisioning(tmp_path, engines, [Target("10.0.0.1:8000")])
    return tmp_path


def read(file: Path) -> dict:
    return yaml.safe_load(file.read_text())


def test_engines_are_scraped_where_vllm_shows_exemplars(folder):
    engines, router = read(folder / "prometheus/prometheus.yml")["scrape_configs"]
    assert engines["metrics_path"] == "/metrics/"
    assert [each["labels"]["role"] for each in engines["static_configs"]] == ["prefill", "decode"]
    assert router["metrics_path"] == "/metrics"
    assert router["static_configs"] == [{"targets": ["10.0.0.1:8000"], "labels": {}}]


def test_grafana_finds_the_dashboards_and_prometheus(folder):
    provider = read(folder / "grafana/provisioning/dashboards/kvops.yaml")["providers"][0]
    files = sorted(Path(provider["options"]["path"]).glob("*.json"))
    assert [file.stem for file in files] == sorted(stored.dashboards())


def test_the_exemplar_link_survives_grafana_s_own_substitution(folder):
    source = read(folder / "grafana/provisioning/datasources/kvops.yaml")["datasources"][0]
    assert "$${__value.raw}" in source["jsonData"]["exemplarTraceIdDestinations"][0]["url"]


def test_config_maps_carry_the_sidecar_s_label_and_fit_kubernetes(folder):
    files = list((folder / "kubernetes").glob("dashboard-*.yaml"))
    assert len(files) == len(stored.dashboards())
    for file in files:
        assert read(file)["metadata"]["labels"] == {"grafana_dashboard": "1"}
        # kubectl apply keeps a copy in an annotation of at most 256 KiB.
        assert file.stat().st_size < 256 * 1024
        for text in read(file)["data"].values():
            assert json.loads(text)["uid"].startswith("kvops-")


def pods(manifests: list[dict]) -> Iterator[dict]:
    for each in manifests:
        yield from [each] if {"metadata", "spec"} <= set(each) and "containers" in each["spec"] else []
        inner = [value for value in each.values() if isinstance(value, dict)]
        yield from pods(inner)


def chooses(selector: dict, labels: dict) -> bool:
    listed = [labels.get(each["key"]) in each["values"] for each in selector["matchExpressions"]]
    return selector["matchLabels"].items() <= labels.items() and all(listed)


def test_pod_monitors_choose_the_pods_that_kvops_renders_and_their_port(folder):
    monitors = list(yaml.safe_load_all((folder / "kubernetes/podmonitors.yaml").read_text()))
    files = render(load_topology(ROOT / "tests/fixtures/render/p5en-1p1d.yaml"))
    rendered = list(pods([each for text in files.values() for each in yaml.safe_load_all(text)]))
    chosen: dict[str, list[str]] = {}
    for monitor in monitors:
        port = monitor["spec"]["podMetricsEndpoints"][0]["port"]
        for pod in rendered:
            ports = [each["name"] for box in pod["spec"]["containers"] for each in box.get("ports", [])]
            if chooses(monitor["spec"]["selector"], pod["metadata"]["labels"]) and port in ports:
                role = pod["metadata"]["labels"]["app.kubernetes.io/component"]
                chosen.setdefault(monitor["metadata"]["name"], []).append(role)
    assert chosen == {"kvops-engines": ["prefill", "decode"], "kvops-router": ["router"]}


def test_the_role_of_an_engine_is_its_pod_s(folder):
    engines, _ = yaml.safe_load_all((folder / "kubernetes/podmonitors.yaml").read_text())
    endpoint = engines["spec"]["podMetricsEndpoints"][0]
    assert endpoint["path"] == "/metrics/"
    source = next(each["sourceLabels"] for each in endpoint["relabelings"] if each["targetLabel"] == "role")
    assert source == ["__meta_kubernetes_pod_label_app_kubernetes_io_component"]


def test_alerts_and_panels_link_the_runbooks_where_they_are_published(tmp_path):
    write_provisioning(tmp_path, [], [], runbook_url="https://wiki.example.com/runbooks/")
    link = "https://wiki.example.com/runbooks/KvopsKvNotMoving.md"
    for file in ("prometheus/rules/kvops-alerts.yaml", "kubernetes/rules.yaml"):
        assert f"runbook_url: {link}" in (tmp_path / file).read_text()
    assert f"[KvopsKvNotMoving]({link})" in (tmp_path / "grafana/dashboards/kvops-fleet.json").read_text()


def test_compose_binds_loopback(folder):
    services = read(folder / "compose.yaml")["services"]
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
