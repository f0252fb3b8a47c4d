"""The fleet as a docker compose project for one GPU host, with Prometheus and Grafana.

Sources: the Compose specification (https://github.com/compose-spec/compose-spec) for ``pid``, ``ipc`` and
``deploy.resources.reservations.devices``; vLLM's pull request 55906: between containers UCX opens a peer's CUDA memory
only where both share the namespaces of process ids and of IPC and see each other's GPU, and falls back to TCP silently
where they do not.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvops.errors import KvopsError
from kvops.launch.engine_script import ENGINE_PORT, ROUTER_PORT, SIDE_CHANNEL_PORT, part, start_script
from kvops.topology import Platform
from kvops_dashboards import provision, stored
from kvops_dashboards.scraping import Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvops.topology import Group, Topology

    Service = dict[str, Any]

_NAMESPACES = "namespaces"
_OBSERVE = "/observe"
_SCRAPE_SECONDS = 15
# Large models load for tens of minutes; failing checks do not count before that.
_START_PERIOD = "60m"


def render(topology: Topology) -> dict[str, str]:
    """Return the project's files by name; the same topology gives the same bytes.

    Raises:
        KvopsError: the fleet needs more than one host, or an image is not named.
    """
    _check(topology)
    engines = dict(_engines(topology))
    project = {
        "name": "kvops",
        "services": {
            _NAMESPACES: _namespaces(topology),
            **({"kvops": _delivery(topology)} if topology.compose.kvops_image else {}),
            **engines,
            "router": _router(topology, list(engines)),
            "prometheus": _prometheus(topology),
            "grafana": _grafana(topology),
        },
        "volumes": {"cache": {}, "prometheus": {}, "grafana": {}}
        | ({"kvops": {}} if topology.compose.kvops_image else {}),
    }
    if secrets := _secrets(topology):
        project["secrets"] = {name: {"file": str(path)} for name, path in secrets.items()}
    files = {"compose.yaml": yaml.safe_dump(project, sort_keys=False, width=120)}
    before = part("engine_compose.sh")
    files |= {f"start/{role}.sh": start_script(topology, role, before=before) for role, _ in topology.groups()}
    return files | _observed(list(engines))


def _check(topology: Topology) -> None:
    if not topology.compose.image:
        raise KvopsError("compose.image is not set", "name an image that has vLLM and NIXL in it")
    if topology.platform is Platform.NEURON:
        raise KvopsError("compose runs on GPUs or CPUs", "use kvops render kubernetes or kvops render slurm for Neuron")
    if "LIBFABRIC" in topology.transport.backends:
        raise KvopsError(
            "transport.backends has LIBFABRIC, and EFA does not carry KV between containers of one host",
            "set transport: {backends: [UCX]}",
        )
    hosts = {host for _, group in topology.groups() for host in group.hosts}
    if len(hosts) > 1 or any(group.nodes > 1 for _, group in topology.groups()):
        raise KvopsError(
            "the fleet spans hosts and compose runs on one", "use kvops render kubernetes or kvops render slurm"
        )
    try:
        ipaddress.ip_address(topology.router.host)
    except ValueError:
        raise KvopsError(
            f"router.host is {topology.router.host}, and compose publishes on addresses only", "name an address"
        ) from None


def _devices(topology: Topology) -> list[int]:
    """Return the GPUs of all engines, in the order in which every container numbers them from 0 on."""
    return sorted({device for _, group in topology.groups() for device in group.devices})


def _secrets(topology: Topology) -> dict[str, Path]:
    named = {"token": topology.compose.token_file, "router-keys": topology.router.api_key_file}
    return {name: path.absolute() for name, path in named.items() if path}


def _namespaces(topology: Topology) -> Service:
    """Return the service that owns what engines share, so that an engine may restart and the others stay."""
    return {
        "image": topology.compose.image,
        "entrypoint": ["sleep", "infinity"],
        "init": True,
        "ipc": "shareable",
        "shm_size": topology.compose.shared_memory,
        "network_mode": "none",
        "restart": "unless-stopped",
        **_confined(),
    }


def _delivery(topology: Topology) -> Service:
    return {
        "image": topology.compose.kvops_image,
        "entrypoint": ["python3", "-m", "kvops.launch.deliver", "/kvops"],
        "network_mode": "none",
        "volumes": ["kvops:/kvops"],
        **_root(),
    }


def _confined(*capabilities: str) -> Service:
    added = {"cap_add": list(capabilities)} if capabilities else {}
    return {"cap_drop": ["ALL"], **added, "security_opt": ["no-new-privileges:true"]}


def _root(*capabilities: str, secret: str | None = None) -> Service:
    """Return what runs a service as a root that may write what the host's root owns and little else."""
    if not secret:
        return {"user": "0:0", **_confined(*capabilities)}
    # A secret is a file of the host, which is often readable for its owner only.
    return {"user": "0:0", **_confined(*capabilities, "DAC_READ_SEARCH"), "secrets": [secret]}


def _engines(topology: Topology) -> Iterator[tuple[str, Service]]:
    for role, group in topology.groups():
        for index in range(group.replicas):
            yield f"{role}-{index}", _engine(topology, role, group, index)


def _engine(topology: Topology, role: str, group: Group, index: int) -> Service:
    settings, name = topology.compose, f"{role}-{index}"
    waits = {_NAMESPACES: {"condition": "service_started"}}
    if settings.kvops_image:
        waits["kvops"] = {"condition": "service_completed_successfully"}
    service: Service = {
        "image": settings.image,
        "entrypoint": ["/bin/sh", f"/start/{role}.sh"],
        "environment": _environment(topology, group, name, index),
        "pid": f"service:{_NAMESPACES}",
        "ipc": f"service:{_NAMESPACES}",
        "ulimits": {"memlock": {"soft": -1, "hard": -1}},
        # UCX looks into its peer's process to share memory with it.
        **_root("SYS_PTRACE", secret="token" if settings.token_file else None),
        "volumes": list(_mounts(topology)),
        "depends_on": waits,
        "healthcheck": _asked(f"http://127.0.0.1:{ENGINE_PORT}/health", start_period=_START_PERIOD),
        "stop_grace_period": "60s",
        "restart": "unless-stopped",
    }
    if devices := _devices(topology):
        device = {"driver": "nvidia", "device_ids": [str(number) for number in devices], "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return service


def _environment(topology: Topology, group: Group, name: str, index: int) -> dict[str, str]:
    values = {
        "POD_NAME": name,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL_PORT),
        "HOME": "/cache",
        "VLLM_CACHE_ROOT": "/cache/vllm",
        "HF_HOME": "/cache/huggingface",
    }
    if topology.compose.token_file:
        values["HF_TOKEN_PATH"] = "/run/secrets/token"  # noqa: S105
    if topology.compose.kvops_image:
        values["PYTHONPATH"] = "/kvops"
    if devices := _devices(topology):
        width = group.tensor_parallel * group.data_parallel
        own = group.devices[index * width : (index + 1) * width]
        values["CUDA_VISIBLE_DEVICES"] = ",".join(str(devices.index(device)) for device in own)
    values |= topology.transport.env | group.env
    # compose would take a dollar for a variable of its own.
    return {key: value.replace("$", "$$") for key, value in values.items()}


def _mounts(topology: Topology) -> Iterator[str]:
    yield from ("./start:/start:ro", "./journal:/journal", "cache:/cache")
    if topology.compose.kvops_image:
        yield "kvops:/kvops:ro"
    if topology.compose.model_folder:
        yield f"{topology.compose.model_folder.absolute()}:/models:ro"


def _asked(url: str, start_period: str = "30s") -> Service:
    ask = f"import urllib.request as r; r.urlopen({url!r}, timeout=5)"
    return _check_every(["CMD", "python3", "-c", ask], start_period)


def _check_every(test: list[str], start_period: str = "30s") -> Service:
    return {"test": test, "interval": "10s", "timeout": "10s", "retries": 5, "start_period": start_period}


def _router(topology: Topology, engines: list[str]) -> Service:
    settings = topology.compose
    argv = ["python3", "-m", "kvops.cli.main", "router"]
    for name in engines:
        role = name.partition("-")[0]
        ranks = dict(topology.groups())[role].data_parallel
        argv += [f"--{role}", f"http://{name}:{ENGINE_PORT}" + (f"#0-{ranks - 1}" if ranks > 1 else "")]
    argv += ["--mode", topology.mode.value, "--host", "0.0.0.0", "--port", str(ROUTER_PORT)]  # noqa: S104
    argv += ["--decoder-ttl", str(topology.kv.decoder_ttl), "--journal", "/journal/router.jsonl"]
    if topology.router.api_key_file:
        argv += ["--api-key-file", "/run/secrets/router-keys"]
    published = f"{topology.router.host}:{topology.router.port or ROUTER_PORT}:{ROUTER_PORT}"
    return {
        "image": settings.kvops_image or settings.image,
        "entrypoint": argv,
        "ports": [published],
        **_root(secret="router-keys" if topology.router.api_key_file else None),
        "volumes": ["./journal:/journal"],
        "depends_on": {name: {"condition": "service_healthy"} for name in engines},
        "healthcheck": _asked(f"http://127.0.0.1:{ROUTER_PORT}/readyz"),
        # It finishes what it serves, and compose stops it before the engines that it depends on.
        "stop_grace_period": "60s",
        "restart": "unless-stopped",
    }


def _prometheus(topology: Topology) -> Service:
    settings = topology.observability
    return {
        "image": provision.PROMETHEUS_IMAGE,
        "command": [
            "--config.file=/etc/prometheus/prometheus.yml",
            "--storage.tsdb.path=/prometheus",
            f"--storage.tsdb.retention.time={settings.retention_hours}h",
            "--enable-feature=exemplar-storage",
        ],
        "ports": [f"127.0.0.1:{settings.prometheus_port or 9090}:9090"],
        **_confined(),
        "volumes": ["./prometheus:/etc/prometheus:ro", "prometheus:/prometheus"],
        "healthcheck": _check_every(["CMD", "wget", "-q", "--spider", "http://127.0.0.1:9090/-/ready"]),
        "restart": "unless-stopped",
    }


def _grafana(topology: Topology) -> Service:
    return {
        "image": provision.GRAFANA_IMAGE,
        "environment": {
            # Whoever reaches the loopback port may look, and nobody may change.
            "GF_AUTH_ANONYMOUS_ENABLED": "true",
            "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
            "GF_AUTH_DISABLE_LOGIN_FORM": "true",
            "GF_ANALYTICS_REPORTING_ENABLED": "false",
            "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        },
        "ports": [f"127.0.0.1:{topology.observability.grafana_port or 3000}:3000"],
        **_confined(),
        "volumes": [
            "./grafana/provisioning:/etc/grafana/provisioning:ro",
            f"./grafana/dashboards:{_OBSERVE}/grafana/dashboards:ro",
            "grafana:/var/lib/grafana",
        ],
        "depends_on": {"prometheus": {"condition": "service_healthy"}},
        "healthcheck": _check_every(["CMD", "wget", "-q", "--spider", "http://127.0.0.1:3000/api/health"]),
        "restart": "unless-stopped",
    }


def _observed(engines: list[str]) -> dict[str, str]:
    targets = [Target(f"{name}:{ENGINE_PORT}", {"process": name, "role": name.partition("-")[0]}) for name in engines]
    router = Target(f"router:{ROUTER_PORT}", {"process": "router"})
    boards, rules = stored.dashboards(), stored.rule_files()
    files = dict(provision.grafana_files(Path(_OBSERVE), boards, "http://prometheus:9090", _SCRAPE_SECONDS))
    return files | dict(provision.prometheus_files(targets, [router], _SCRAPE_SECONDS, rules))
