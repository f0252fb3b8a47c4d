"""The files that put dashboards and rules into Grafana and Prometheus: docker compose, and kube-prometheus."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from kvops_dashboards import stored
from kvops_dashboards.scraping import COLON_BACK, ENGINE_METRICS_PATH, ROUTER_METRICS_PATH, Target, prometheus_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DATASOURCE_UID = "kvops-prometheus"
_PROMETHEUS_URL = "http://127.0.0.1:9090"
_RULES_GLOB = "rules/*.yaml"
# Label by which the dashboard sidecar of the Grafana chart finds ConfigMaps.
_SIDECAR_LABEL = {"grafana_dashboard": "1"}
# Label by which kube-prometheus-stack's Prometheus chooses rules and monitors, with the chart's default release name.
_RELEASE_LABEL = {"release": "kube-prometheus-stack"}
_NAMESPACE = "monitoring"
PROMETHEUS_IMAGE, GRAFANA_IMAGE = "prom/prometheus:v3.5.0", "grafana/grafana:12.2.0"
# Labels of the pods that `kvops render kubernetes` writes.
_FLEET, _ROLE = {"app.kubernetes.io/part-of": "kvops"}, "app.kubernetes.io/component"

Boards: TypeAlias = "dict[str, dict[str, Any]]"


def write_provisioning(
    folder: Path,
    engines: list[Target],
    routers: list[Target],
    prometheus_url: str = _PROMETHEUS_URL,
    *,
    interval_seconds: int = 15,
    runbook_url: str = "",
) -> list[Path]:
    """Write everything below ``folder`` and return the files.

    Args:
        folder: made if it is not there; files of the same names are replaced.
        engines: what Prometheus scrapes as engines, with the label ``role``.
        routers: what it scrapes as routers.
        prometheus_url: where Grafana finds Prometheus.
        interval_seconds: time between two scrapes.
        runbook_url: where the folder ``runbooks`` is published, for links from panels and alerts.
    """
    boards, rules = stored.dashboards(runbook_url), stored.rule_files(runbook_url)
    files = dict(grafana_files(folder.absolute(), boards, prometheus_url, interval_seconds))
    files |= dict(prometheus_files(engines, routers, interval_seconds, rules)) | dict(kubernetes_files(boards, rules))
    files["compose.yaml"] = _yaml(_compose())
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return [folder / name for name in files]


def grafana_files(
    folder: Path, boards: Boards, prometheus_url: str, interval_seconds: int
) -> Iterator[tuple[str, str]]:
    """Yield name and text of what Grafana reads, where it finds the files below ``folder``, an absolute path."""
    yield "grafana/provisioning/datasources/kvops.yaml", _yaml(_datasource(prometheus_url, interval_seconds))
    yield "grafana/provisioning/dashboards/kvops.yaml", _yaml(_provider(folder / "grafana/dashboards"))
    for uid, board in boards.items():
        yield f"grafana/dashboards/{uid}.json", _json(board)


def _datasource(prometheus_url: str, interval_seconds: int) -> dict[str, Any]:
    source = {
        "name": "Prometheus (kvops)",
        "uid": DATASOURCE_UID,
        "type": "prometheus",
        "access": "proxy",
        "url": prometheus_url,
        "isDefault": True,
        # Exemplars carry request_id; the link opens the dashboard on which it is looked up. "$$" because Grafana
        # replaces single dollars of provisioning files by environment variables.
        "jsonData": {
            "httpMethod": "POST",
            # Grafana takes rates over at least four times this.
            "timeInterval": f"{interval_seconds}s",
            "exemplarTraceIdDestinations": [
                {
                    "name": "request_id",
                    "url": "/d/kvops-request?var-request=$${__value.raw}",
                    "urlDisplayLabel": "Request",
                }
            ],
        },
    }
    return {"apiVersion": 1, "datasources": [source]}


def _provider(dashboards: Path) -> dict[str, Any]:
    provider = {
        "name": "kvops",
        "folder": "kvops",
        "type": "file",
        "allowUiUpdates": False,
        "options": {"path": str(dashboards)},
    }
    return {"apiVersion": 1, "providers": [provider]}


def prometheus_files(
    engines: list[Target], routers: list[Target], interval_seconds: int, rules: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield name and text of what Prometheus reads."""
    config = prometheus_config(engines, routers, interval_seconds=interval_seconds, rule_files=[_RULES_GLOB])
    yield "prometheus/prometheus.yml", _yaml(config)
    for name, text in rules.items():
        yield f"prometheus/rules/{name}", text


def _compose() -> dict[str, Any]:
    # The host's network, since engines and router listen on loopback unless told otherwise.
    return {
        "services": {
            "prometheus": {
                "image": PROMETHEUS_IMAGE,
                "network_mode": "host",
                "command": [
                    "--config.file=/etc/prometheus/prometheus.yml",
                    "--web.listen-address=127.0.0.1:9090",
                    "--enable-feature=exemplar-storage",
                ],
                "volumes": ["./prometheus:/etc/prometheus:ro", "prometheus-data:/prometheus"],
            },
            "grafana": {
                "image": GRAFANA_IMAGE,
                "network_mode": "host",
                "environment": {"GF_SERVER_HTTP_ADDR": "127.0.0.1"},
                "volumes": [
                    "./grafana/provisioning:/etc/grafana/provisioning:ro",
                    # At the same path as outside, which is what the provider file names.
                    "./grafana/dashboards:${PWD}/grafana/dashboards:ro",
                    "grafana-data:/var/lib/grafana",
                ],
            },
        },
        "volumes": {"prometheus-data": {}, "grafana-data": {}},
    }


def kubernetes_files(boards: Boards, rules: dict[str, str], namespace: str = _NAMESPACE) -> Iterator[tuple[str, str]]:
    """Yield name and text of the objects for kube-prometheus in ``namespace``."""
    for uid, board in boards.items():
        config_map = _object("v1", "ConfigMap", uid, namespace, _SIDECAR_LABEL)
        yield f"kubernetes/dashboard-{uid}.yaml", _yaml(config_map | {"data": {f"{uid}.json": _json(board)}})
    groups = [group for text in rules.values() for group in yaml.safe_load(text)["groups"]]
    rule = _object("monitoring.coreos.com/v1", "PrometheusRule", "kvops", namespace, _RELEASE_LABEL)
    yield "kubernetes/rules.yaml", _yaml(rule | {"spec": {"groups": groups}})
    monitors = (_engines(namespace), _routers(namespace))
    yield "kubernetes/podmonitors.yaml", "---\n".join(_yaml(monitor) for monitor in monitors)


def _engines(namespace: str) -> dict[str, Any]:
    endpoint = {
        "port": "http",
        "path": ENGINE_METRICS_PATH,
        "relabelings": [
            {"sourceLabels": ["__meta_kubernetes_pod_label_app_kubernetes_io_component"], "targetLabel": "role"},
            {"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "instance"},
        ],
        "metricRelabelings": [
            {
                "sourceLabels": COLON_BACK["source_labels"],
                "regex": COLON_BACK["regex"],
                "targetLabel": COLON_BACK["target_label"],
                "replacement": COLON_BACK["replacement"],
            }
        ],
    }
    return _pod_monitor("kvops-engines", namespace, ["prefill", "decode"], endpoint)


def _routers(namespace: str) -> dict[str, Any]:
    return _pod_monitor("kvops-router", namespace, ["router"], {"port": "http", "path": ROUTER_METRICS_PATH})


def _pod_monitor(name: str, namespace: str, roles: list[str], endpoint: dict[str, Any]) -> dict[str, Any]:
    chosen = {"matchLabels": _FLEET, "matchExpressions": [{"key": _ROLE, "operator": "In", "values": roles}]}
    spec = {"namespaceSelector": {"any": True}, "selector": chosen, "podMetricsEndpoints": [endpoint]}
    return _object("monitoring.coreos.com/v1", "PodMonitor", name, namespace, _RELEASE_LABEL) | {"spec": spec}


def _object(api: str, kind: str, name: str, namespace: str, labels: dict[str, str]) -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "namespace": namespace, "labels": labels}}


def _yaml(value: object) -> str:
    return yaml.safe_dump(value, sort_keys=False, width=120)


def _json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
