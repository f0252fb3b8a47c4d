"""A Slurm job on network namespaces: the rendered script under an srun that starts real processes, a host a node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvops.launch.slurm import render
from kvops.topology import load_topology
from namespaces import Cluster, run_on

ROOT = Path(__file__).parents[2]

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


class Job:
    """One job in ``folder``; its output is read by ``process.communicate``."""

    def __init__(self, folder: Path, hosts: Cluster, settings: str, patience_seconds: float) -> None:
        self.folder, self.hosts, self.patience_seconds = folder, hosts, patience_seconds
        self.script("srun", SRUN.format(python=sys.executable, names=hosts.names))
        self.script("scontrol", "#!/bin/sh\necho $3 | tr , '\\n'\n")
        (folder / "kvops.yaml").write_text(f"preset: cpu-demo\nrouter: {{host: 0.0.0.0}}\n{settings}")
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

    def ask(self, prompt: str = "x" * 200) -> str:
        """Send a request from the last node to the router on the first and return the answer, or nothing."""
        body = json.dumps({"model": "kvops-tiny", "prompt": prompt, "max_tokens": 4})
        url = f"http://{self.hosts.addresses[0]}:8000/v1/completions"
        program = (
            "import sys, urllib.request as r; "
            f"q = r.Request({url!r}, {body.encode()!r}, {{'Content-Type': 'application/json'}}); "
            "print(r.urlopen(q, timeout=20).read().decode())"
        )
        return run_on(self.hosts, len(self.hosts.names) - 1, [sys.executable, "-c", program]).stdout

    def pids(self) -> list[str]:
        return [pid for host in range(len(self.hosts.names)) for pid in self.hosts.pids(host)]

    def left_over(self) -> list[str]:
        """Return the processes that do not end by themselves.

        Python's resource tracker ends only after the engine that it tidies up for; a real step is over when its last
        process is.
        """
        deadline = time.monotonic() + self.patience_seconds
        while (pids := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return pids

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("run/42/logs/*"))

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + self.patience_seconds
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            assert self.process.poll() is None, self.logs()
            time.sleep(0.2)


@contextmanager
def started(job: Job) -> Iterator[Job]:
    job.start()
    try:
        yield job
    finally:
        if job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)
        for pid in job.pids():
            os.kill(int(pid), signal.SIGKILL)
        job.process.communicate()
