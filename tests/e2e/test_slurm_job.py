"""The batch script with real engines: prefill and decode on a node each, the router on the first."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvops import tiny_model
from namespaces import cluster
from slurm_job import Job, started

PATIENCE_SECONDS = 150

pytestmark = [pytest.mark.system("ip"), pytest.mark.timeout(3 * PATIENCE_SECONDS)]

# Nodes share a kernel here, so shared memory would carry KV that no network link does.
SETTINGS = """
model: {model}
prefill: {{hosts: [10.0.0.1]}}
decode: {{hosts: [10.0.0.2]}}
transport: {{env: {{UCX_TLS: tcp}}}}
slurm: {{python: {python}, run_folder: {folder}/run}}
"""


def test_a_job_serves_moves_kv_between_its_nodes_and_ends_clean(tmp_path: Path) -> None:
    model = tiny_model.default_path()
    tiny_model.ensure_model(model)
    with cluster(2, net=83) as hosts:
        settings = SETTINGS.format(model=model, python=sys.executable, folder=tmp_path)
        with started(Job(tmp_path, hosts, settings, PATIENCE_SECONDS)) as job:
            job.until(lambda: '"choices"' in job.ask())
            before = hosts.received_bytes(1)
            assert '"choices"' in job.ask("computed on one node, continued on the other " * 40)
            crossed = hosts.received_bytes(1) - before
            job.process.terminate()
            output, _ = job.process.communicate(timeout=PATIENCE_SECONDS)
            assert (job.process.returncode, job.left_over()) == (0, []), output + job.logs()
    journal = (tmp_path / "run/42/journal").glob("decode-0*.jsonl")
    lines = [json.loads(line) for path in journal for line in path.read_text().splitlines()]
    moved = max(line["transfer"]["bytes"] for line in lines if line.get("transfer"))
    assert 0 < moved < crossed
