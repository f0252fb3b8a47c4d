"""The files for Grafana, Prometheus, compose and kube-prometheus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from kvops_dashboards import stored
from kvops_dashboards.provision import write_provisioning
from kvops_dashboards.scraping import Target


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


def test_pod_monitors_take_the_role_from_the_pod(folder):
    engines, routers = yaml.safe_load_all((folder / "kubernetes/podmonitors.yaml").read_text())
    endpoint = engines["spec"]["podMetricsEndpoints"][0]
    assert endpoint["path"] == "/metrics/"
    assert "role" in [each["targetLabel"] for each in endpoint["relabelings"]]
    assert routers["spec"]["selector"]["matchExpressions"][0]["values"] == ["router"]


def test_compose_binds_loopback(folder):
    services = read(folder / "compose.yaml")["services"]
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
