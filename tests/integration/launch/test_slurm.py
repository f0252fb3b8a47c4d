"""The batch script under an ``srun`` that starts real processes, each node a network namespace of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvops.launch.slurm import render
from kvops.topology import load_topology
from namespaces import Cluster, cluster, run_on

ROOT = Path(__file__).parents[3]
PATIENCE_SECONDS = 60

pytestmark = [pytest.mark.system("ip"), pytest.mark.timeout(3 * PATIENCE_SECONDS)]

# What sruns do that the script relies on: a task a node, SLURM_* for each, TERM passed on, the worst status back.
SRUN = """#!{python}
import os, signal, subprocess, sys
words, options = sys.argv[1:], {{}}
while words[0].startswith("--"):
    key, _, value = words.pop(0).partition("=")
    options[key] = value
hosts = options["--nodelist"].split(",") if "--nodelist" in options else {names!r}
out = open(options["--output"], "ab") if "--output" in options else None
tasks = [
    subprocess.Popen(
        ["ip", "netns", "exec", host, *words], stdout=out, stderr=out,
        env=os.environ | {{"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)}},
    )
    for rank, host in enumerate(hosts)
]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
sys.exit(max(abs(task.wait()) for task in tasks))
"""
# On the cluster's Python vLLM is there; here its server is the scripted one.
PYTHON = """#!/bin/sh
if [ "$2" = vllm.entrypoints.openai.api_server ]; then
  case "$*" in *kv_producer*) role=prefill ;; *) role=decode ;; esac
  printf '%s\\n' "$VLLM_NIXL_SIDE_CHANNEL_HOST $*" >> {folder}/engines
  exec {python} {root}/tests/support/fake_engine.py --role $role --host 0.0.0.0 --port 8100
fi
exec {python} "$@"
"""


class Job:
    def __init__(self, folder: Path, hosts: Cluster) -> None:
        self.folder, self.hosts = folder, hosts
        self.script("srun", SRUN.format(python=sys.executable, names=hosts.names))
        self.script("scontrol", "#!/bin/sh\necho $3 | tr , '\\n'\n")
        self.script("kvpython", PYTHON.format(folder=folder, python=sys.executable, root=ROOT))
        (folder / "kvops.yaml").write_text(
            f"preset: cpu-demo\nmodel: /models/tiny\nrouter: {{host: 0.0.0.0}}\n"
            f"prefill: {{hosts: [10.0.0.1]}}\ndecode: {{hosts: [10.0.0.2], port: 8100, replicas: 2}}\n"
            f"slurm: {{python: {folder}/kvpython, run_folder: {folder}/run}}\n"
        )
        (text,) = render(load_topology(folder / "kvops.yaml")).values()
        (folder / "kvops.sbatch").write_text(text)

    def script(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def start(self) -> None:
        env = os.environ | {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT}/connectors",
            "SLURM_JOB_ID": "42",
            "SLURM_JOB_NODELIST": ",".join(self.hosts.names),
        }
        self.process = subprocess.Popen(
            ["bash", str(self.folder / "kvops.sbatch")],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def ask(self) -> str:
        """Send a request from the last node to the router on the first and return the answer's text."""
        body = json.dumps({"model": "kvops-tiny", "prompt": "x" * 200, "max_tokens": 4})
        url = f"http://{self.hosts.addresses[0]}:8000/v1/completions"
        program = (
            "import sys, urllib.request as r; "
            f"q = r.Request({url!r}, {body.encode()!r}, {{'Content-Type': 'application/json'}}); "
            "print(r.urlopen(q, timeout=20).read().decode())"
        )
        return run_on(self.hosts, 2, [sys.executable, "-c", program]).stdout

    def pids(self) -> list[str]:
        return [
            pid
            for host in self.hosts.names
            for pid in subprocess.run(
                ["ip", "netns", "pids", host], capture_output=True, text=True, check=True
            ).stdout.split()
        ]

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("run/42/logs/*"))

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with cluster(3, net=81) as hosts:
        job = Job(tmp_path, hosts)
        job.start()
        try:
            yield job
        finally:
            if job.process.poll() is None:
                os.killpg(job.process.pid, signal.SIGKILL)
            for pid in job.pids():
                os.kill(int(pid), signal.SIGKILL)
            job.process.communicate()


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
    assert (job.process.returncode, job.pids()) == (0, []), output
    assert (job.folder / "run/42/journal/router.jsonl").read_text().count("\n") >= 1


def test_an_engine_that_ends_ends_the_job_with_its_log_named(job: Job) -> None:
    job.until(lambda: '"choices"' in job.ask())
    for pid in subprocess.run(
        ["ip", "netns", "pids", job.hosts.names[2]], capture_output=True, text=True, check=True
    ).stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    output, _ = job.process.communicate(timeout=PATIENCE_SECONDS)
    assert (job.process.returncode, "a step ended; its log" in output, job.pids()) == (1, True, [])
