"""A real Prometheus with the configuration that kvops ships, every second instead of every few."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import yaml

from kvops.launch.plan import Plan
from kvops_dashboards.scraping import Target, prometheus_config
from ports import free_port


@contextlib.contextmanager
def prometheus(folder: Path, engines: list[Target], routers: list[Target], rule_files: list[str]) -> Iterator[str]:
    """Run a Prometheus that keeps its data in ``folder``, and yield its URL.

    Args:
        folder: for configuration, log and data; those of an earlier one are gone on with.
        engines: what to scrape as prefill and decode engines.
        routers: what to scrape as routers.
        rule_files: relative to ``folder``, or absolute.
    """
    config = prometheus_config(engines, routers, interval_seconds=1, rule_files=rule_files)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    address = f"127.0.0.1:{free_port()}"
    argv = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    argv += [f"--web.listen-address={address}", "--enable-feature=exemplar-storage"]
    with (folder / "prometheus.log").open("ab") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def targets(plan: Plan) -> tuple[list[Target], list[Target]]:
    """Return the engines of a fleet and its router, named after the fleet."""
    engines = [
        Target(f"{each.host}:{each.port}", {"role": each.role, "instance": f"{plan.name}-{each.name}"})
        for each in plan.engines
    ]
    return engines, [Target(f"{plan.router.host}:{plan.router.port}", {"instance": f"{plan.name}-router"})]
