from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from compose_spec import PyCompose

from kvops.cli.main import main
from kvops.launch.compose import render
from kvops.topology import load_topology

FIXTURES = Path(__file__).parents[2] / "fixtures" / "render"
GPU_HOST = FIXTURES / "gpu-host.yaml"
ENGINES = ("prefill-0", "decode-0", "decode-1")


def project(file: Path = GPU_HOST) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(render(load_topology(file))["compose.yaml"])
    return loaded


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "kvops.yaml"
    file.write_text(text)
    return file


def test_the_project_fits_the_compose_specification() -> None:
    parsed = PyCompose.from_yaml(render(load_topology(GPU_HOST))["compose.yaml"])
    parsed.validate()
    assert {"router", "prometheus", "grafana", *ENGINES} <= set(parsed.service_names())


@pytest.mark.parametrize(
    "wrong", [{"ipcs": "host"}, {"init": "perhaps"}, {"shm_size": "much"}, {"ulimits": ["memlock"]}]
)
def test_the_check_by_the_specification_finds_what_is_wrong(wrong: dict[str, Any]) -> None:
    loaded = project()
    loaded["services"]["namespaces"] |= wrong
    with pytest.raises(ValueError, match=r"\S"):
        PyCompose.from_yaml(yaml.safe_dump(loaded))


def test_the_same_topology_gives_the_committed_bytes() -> None:
    files = render(load_topology(GPU_HOST))
    assert files["compose.yaml"] == (FIXTURES / "gpu-host.compose.yaml").read_text()
    assert files["start/decode.sh"] == (FIXTURES / "gpu-host.decode.sh").read_text()


def test_engines_share_what_ucx_needs_to_open_a_peers_gpu_memory() -> None:
    services = project()["services"]
    for name in ENGINES:
        assert (services[name]["pid"], services[name]["ipc"]) == ("service:namespaces", "service:namespaces")
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == ["2", "3", "4", "5"]
    assert services["namespaces"]["ipc"] == "shareable"


def test_each_engine_computes_on_its_own_gpus_as_its_container_numbers_them() -> None:
    services = project()["services"]
    visible = [services[name]["environment"]["CUDA_VISIBLE_DEVICES"] for name in ENGINES]
    assert visible == ["0,1", "2", "3"]


def test_nothing_is_published_beyond_loopback_unless_the_router_is_told_so(tmp_path: Path) -> None:
    ports = [port for service in project()["services"].values() for port in service.get("ports", ())]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)
    file = written(tmp_path, "preset: cuda-local\nrouter: {host: 0.0.0.0}\ncompose: {image: x}\n")
    assert project(file)["services"]["router"]["ports"] == ["0.0.0.0:8000:8000"]


def test_every_service_that_stays_is_checked_restarted_and_confined() -> None:
    for name, service in project()["services"].items():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not {"privileged", "devices"} & set(service)
        if name not in ("namespaces", "kvops"):
            assert "healthcheck" in service, name
        if name != "kvops":
            assert service["restart"] == "unless-stopped"


def test_engines_may_lock_all_memory_that_they_register() -> None:
    limits = [project()["services"][name]["ulimits"]["memlock"] for name in ENGINES]
    assert limits == [{"soft": -1, "hard": -1}] * 3


def test_secrets_are_files_and_stand_in_no_environment() -> None:
    loaded = project()
    assert loaded["secrets"]["router-keys"] == {"file": "/srv/kvops/router-keys"}
    assert loaded["services"]["router"]["secrets"] == ["router-keys"]
    assert loaded["services"]["decode-1"]["environment"]["HF_TOKEN_PATH"] == "/run/secrets/token"


def test_prometheus_scrapes_every_engine_and_grafana_finds_the_dashboards() -> None:
    files = render(load_topology(GPU_HOST))
    config = yaml.safe_load(files["prometheus/prometheus.yml"])
    targets = [t for job in config["scrape_configs"] for each in job["static_configs"] for t in each["targets"]]
    assert sorted(targets) == ["decode-0:8100", "decode-1:8100", "prefill-0:8100", "router:8000"]
    provider = yaml.safe_load(files["grafana/provisioning/dashboards/kvops.yaml"])["providers"][0]
    mounts = project()["services"]["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in mounts
    assert json.loads(files["grafana/dashboards/kvops-fleet.json"])["panels"]


@pytest.mark.system("promtool")
def test_prometheus_takes_its_files(tmp_path: Path) -> None:
    for name, text in render(load_topology(GPU_HOST)).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    argv = ["promtool", "check", "config", str(tmp_path / "prometheus" / "prometheus.yml")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_start_script_gives_the_engine_its_address_and_a_new_id_each_time(tmp_path: Path) -> None:
    script = render(load_topology(GPU_HOST))["start/decode.sh"]
    (tmp_path / "start.sh").write_text(script)
    stub = tmp_path / "python3"
    # The real Python for the address; doctor and engine only say how they were called.
    stub.write_text(
        f'#!/bin/sh\ncase "$1$2" in -c*) exec {shutil.which("python3")} "$@" ;; esac\n'
        'echo "$VLLM_NIXL_SIDE_CHANNEL_HOST" "$@"\n'
    )
    stub.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "POD_NAME": "decode-0"}
    seen = []
    for _ in range(2):
        done = subprocess.run(
            ["sh", str(tmp_path / "start.sh")], env=env, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        assert done[0].split(maxsplit=1)[1] == "-m kvops.cli.main doctor --only quick"
        seen.append(
            json.loads(done[1].partition("--kv-transfer-config ")[2].partition(" --middleware")[0])["engine_id"]
        )
        assert done[1].split()[0].count(".") == 3
    assert seen[0] != seen[1]
    assert all(each.startswith("decode-0-") for each in seen)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("preset: cuda-local\n", "compose.image is not set; name an image"),
        ("preset: trn2\ncompose: {image: x}\n", "use kvops render kubernetes or kvops render slurm for Neuron"),
        ("preset: p5en\ncompose: {image: x}\n", "transport.backends has LIBFABRIC"),
        ("preset: cuda-local\nprefill: {replicas: 2, hosts: [10.0.0.1, 10.0.0.2]}\ndecode: {hosts: [10.0.0.1]}\n"
         "compose: {image: x}\n", "the fleet spans hosts"),
        ("preset: cuda-local\nprefill: {hosts: [10.0.0.1]}\ndecode: {hosts: [10.0.0.2]}\ncompose: {image: x}\n",
         "the fleet spans hosts"),
        ("preset: cuda-local\nrouter: {host: gpu-7}\ncompose: {image: x}\n", "router.host is gpu-7"),
        ("preset: cuda-local\ncompose: {image: x, shared_memory: lots}\n", "kvops.yaml:2: compose.shared_memory is 'lots'"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered_is_said_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    result = CliRunner().invoke(main, ["render", "compose", "-f", str(written(tmp_path, text))])
    assert (result.exit_code, sentence in result.output) == (2, True), result.output


def test_a_fleet_on_cpus_reserves_no_gpu(tmp_path: Path) -> None:
    file = written(tmp_path, "preset: cpu-demo\ncompose: {image: x}\n")
    assert "deploy" not in project(file)["services"]["prefill-0"]
