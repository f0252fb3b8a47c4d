"""Prometheus and Grafana beside a fleet: their processes in the plan, and the files that they read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvops.launch.plan import Plan
    from kvops.topology import Observability

FOLDER = "observe"
ROLES = ("prometheus", "grafana")
HEALTH_PATH = {"prometheus": "/-/ready", "grafana": "/api/health"}
# Where Grafana's packages for Debian and Red Hat put its pages and defaults.
_GRAFANA_HOME = Path("/usr/share/grafana")
_HOW_TO_INSTALL = {
    "prometheus": "apt-get install prometheus, or unpack a release from prometheus.io/download onto the PATH",
    "grafana": "install Grafana's package (grafana.com/grafana/download)",
}


def installed() -> list[str]:
    """Return the roles whose program is found on this machine."""
    return [role for role in ROLES if shutil.which(role) and (role != "grafana" or _GRAFANA_HOME.is_dir())]


def missing_advice(folder: Path) -> list[str]:
    """Return a sentence for every program that is not found: how to install it, and where its files are."""
    there = installed()
    return [
        f"{role} is not installed: {_HOW_TO_INSTALL[role]}; its files are in {folder / FOLDER}"
        for role in ROLES
        if role not in there
    ]


def prometheus_argv(settings: Observability, folder: Path, port: int) -> Iterable[str]:
    """Yield the command line of a Prometheus that keeps its data in the fleet's folder and listens on loopback."""
    own = folder / FOLDER
    yield "prometheus"
    yield f"--config.file={own / 'prometheus/prometheus.yml'}"
    yield f"--storage.tsdb.path={own / 'data'}"
    yield f"--storage.tsdb.retention.time={settings.retention_hours}h"
    yield f"--web.listen-address=127.0.0.1:{port}"
    # Without it Prometheus drops the request ids that lead from a graph to a request.
    yield "--enable-feature=exemplar-storage"


def grafana_argv() -> Iterable[str]:
    """Yield the command line of Grafana; everything else is in its environment."""
    yield from ("grafana", "server", f"--homepath={_GRAFANA_HOME}")


def grafana_env(folder: Path, port: int) -> dict[str, str]:
    """Return the environment of a Grafana that anyone on this machine may read and nobody may change."""
    own = folder / FOLDER
    return {
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_PATHS_PROVISIONING": str(own / "grafana/provisioning"),
        "GF_PATHS_DATA": str(own / "grafana/data"),
        "GF_PATHS_LOGS": str(own / "grafana/logs"),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
    }


def write_files(plan: Plan, folder: Path) -> None:
    """Write what Prometheus and Grafana read to ``folder/observe``, whether they are installed or not."""
    from kvops_dashboards.provision import write_provisioning  # noqa: PLC0415
    from kvops_dashboards.scraping import Target  # noqa: PLC0415

    engines = [
        Target(_address(engine.url), {"fleet": plan.name, "process": engine.name, "role": engine.role})
        for engine in plan.engines
    ]
    router = Target(_address(plan.router.url), {"fleet": plan.name, "process": plan.router.name})
    prometheus = plan.role("prometheus")
    url = prometheus[0].url if prometheus else "http://127.0.0.1:9090"
    write_provisioning(folder / FOLDER, engines, [router], url, interval_seconds=5)


def _address(url: str) -> str:
    return url.removeprefix("http://")
