"""The batch script with scripted engines on three nodes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from namespaces import cluster
from slurm_job import ROOT, Job, started

PATIENCE_SECONDS = 60

pytestmark = [pytest.mark.system("ip"), pytest.mark.timeout(3 * PATIENCE_SECONDS)]

# On the cluster's Python vLLM is there; here its server is the scripted one.
PYTHON = """#!/bin/sh
if [ "$2" = vllm.entrypoints.openai.api_server ]; then
  case "$*" in *kv_producer*) role=prefill ;; *) role=decode ;; esac
  printf '%s\\n' "$VLLM_NIXL_SIDE_CHANNEL_HOST $*" >> {folder}/engines
  exec {python} {root}/tests/support/fake_engine.py --role $role --host 0.0.0.0 --port 8100
fi
exec {python} "$@"
"""
SETTINGS = """
model: /models/tiny
prefill: {{hosts: [10.0.0.1]}}
decode: {{hosts: [10.0.0.2], port: 8100, replicas: 2}}
slurm: {{python: {folder}/kvpython, run_folder: {folder}/run}}
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with cluster(3, net=81) as hosts:
        job = Job(tmp_path, hosts, SETTINGS.format(folder=tmp_path), PATIENCE_SECONDS)
        job.script("kvpython", PYTHON.format(folder=tmp_path, python=sys.executable, root=ROOT))
        with started(job):
            yield job


def test_each_engine_runs_on_a_node_of_its_own_and_the_router_reaches_all(job: Job) -> None:
    job.until(lambda: '"choices"' in job.ask())
    lines = (job.folder / "engines").read_text().splitlines()
    advertised = {line.split()[0]: line for line in lines}
    assert sorted(advertised) == sorted(job.hosts.addresses)
    assert '"engine_id": "prefill-0-42-0"' in advertised[job.hosts.addresses[0]]


def test_the_signal_before_the_time_limit_ends_everything_in_order(job: Job) -> None:
    job.until(lambda: '"choices"' in job.ask())
    job.process.terminate()
    output, _ = job.process.communicate(timeout=PATIENCE_SECONDS)
    assert (job.process.returncode, job.left_over()) == (0, []), output
    assert (job.folder / "run/42/journal/router.jsonl").read_text().count("\n") >= 1


def test_an_engine_that_ends_ends_the_job_with_its_log_named(job: Job) -> None:
    job.until(lambda: '"choices"' in job.ask())
    for pid in job.hosts.pids(2):
        os.kill(int(pid), signal.SIGKILL)
    output, _ = job.process.communicate(timeout=PATIENCE_SECONDS)
    assert (job.process.returncode, "a step ended; its log" in output, job.left_over()) == (1, True, [])
