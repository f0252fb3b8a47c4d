"""The Prometheus configuration that the dashboards and rules expect, as data that YAML can hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Engines are asked at /metrics/ with the trailing slash: only there does vLLM speak OpenMetrics and show exemplars.
ENGINE_METRICS_PATH = "/metrics/"
ROUTER_METRICS_PATH = "/metrics"
ENGINE_JOB, ROUTER_JOB = "kvops-engines", "kvops-router"
# Prometheus 2 and OpenMetrics turn vllm:name into vllm_name; this turns it back, and does nothing on Prometheus 3.
COLON_BACK = {
    "source_labels": ["__name__"],
    "regex": "vllm_(.+)",
    "target_label": "__name__",
    "replacement": "vllm:${1}",
}


@dataclass(frozen=True)
class Target:
    """One process to scrape: ``host:port`` and the labels that it gets."""

    address: str
    labels: dict[str, str] = field(default_factory=dict)


def prometheus_config(
    engines: list[Target], routers: list[Target], *, interval_seconds: int, rule_files: list[str]
) -> dict[str, Any]:
    """Return a whole prometheus.yml.

    Args:
        engines: prefill and decode engines; each needs the label ``role`` for the panels that tell them apart.
        routers: routers, without ``role``: their metrics carry that label themselves.
        interval_seconds: time between two scrapes, and between two evaluations of the rules.
        rule_files: paths of rule files, relative to the configuration.
    """
    interval = f"{interval_seconds}s"
    return {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": rule_files,
        "scrape_configs": [
            {
                "job_name": ENGINE_JOB,
                "metrics_path": ENGINE_METRICS_PATH,
                "metric_relabel_configs": [COLON_BACK],
                "static_configs": [_static(target) for target in engines],
            },
            {
                "job_name": ROUTER_JOB,
                "metrics_path": ROUTER_METRICS_PATH,
                "static_configs": [_static(target) for target in routers],
            },
        ],
    }


def _static(target: Target) -> dict[str, Any]:
    return {"targets": [target.address], "labels": target.labels}
