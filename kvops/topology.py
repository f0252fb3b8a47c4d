"""What to run: the model behind ``kvops.yaml``, its presets, and the errors a wrong file gives.

A topology is the preset's file, overlaid by the user's file, overlaid by the command line. Presets are ``kvops.yaml``
files themselves (``kvops/presets/``), so they are the documentation of what each kind of machine needs and why.
"""

from __future__ import annotations

import difflib
import ipaddress
from enum import StrEnum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic_core import ErrorDetails

    KeyPath = tuple[str | int, ...]

# The address of the machine itself, looked up when the plan is made: presets cannot know it.
OWN_HOST = "own"
PRESETS = ("cpu-demo", "cuda-local", "p5", "p5en", "p6-b200", "trn1", "trn2")
# More than any host has; keeps `devices: 0-999999999` from filling memory.
_MAX_DEVICES = 4096
# What EC2 calls the machines that have a preset (/sys/devices/virtual/dmi/id/product_name).
_PRESET_OF_INSTANCE_TYPE = {
    "p5.48xlarge": "p5",
    "p5en.48xlarge": "p5en",
    "p6-b200.48xlarge": "p6-b200",
    "trn1.32xlarge": "trn1",
    "trn2.48xlarge": "trn2",
}


class Mode(StrEnum):
    """How the KV cache moves between prefill and decode."""

    PULL = "pull"
    BIDIRECTIONAL = "bidirectional"
    PUSH = "push"


class Platform(StrEnum):
    """What the engines compute on, which decides how devices are named to them."""

    CPU = "cpu"
    CUDA = "cuda"
    NEURON = "neuron"


def _expand_devices(value: object) -> object:
    """Turn ``0-3`` into ``[0, 1, 2, 3]`` and ``0`` into ``[0]``; anything else is left for the type check."""
    if isinstance(value, str | int) and not isinstance(value, bool):
        first, dash, last = str(value).partition("-")
        last = last if dash else first
        if first.strip().isdigit() and last.strip().isdigit() and int(last) < _MAX_DEVICES:
            return list(range(int(first), int(last) + 1))
    return value


def _number_as_text(value: object) -> object:
    """Let ``OMP_NUM_THREADS: 1`` stand without quotes; true and false stay errors, for no shell spells them so."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Text = Annotated[str, BeforeValidator(_number_as_text)]
Devices = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_expand_devices)]
Port = Annotated[int, Field(ge=1, le=65535)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Group(_Section):
    """All engines of one role."""

    replicas: int = Field(1, ge=1, le=256, description="Engines of this role.")
    tensor_parallel: int = Field(1, ge=1, description="Devices that one model copy is split over.")
    nodes: int = Field(1, ge=1, le=64, description="Machines that one engine spans; more than one for render only.")
    data_parallel: int = Field(1, ge=1, description="Model copies inside one engine; each takes a side-channel port.")
    devices: Devices = Field(
        (), description="Accelerators the group may use on a host: [0, 1] or 0-7; empty on a CPU. Dealt out in order."
    )
    hosts: tuple[str, ...] = Field(
        ("127.0.0.1",),
        min_length=1,
        description="Addresses at which the peers reach the engines, dealt out in turn; 'own': this machine's.",
    )
    port: Port | None = Field(
        None, description="HTTP port of the first engine, counting up from there; free ports if unset."
    )
    side_channel_port: Port | None = Field(
        None, description="NIXL side-channel port of the first engine's rank 0; free ports are found if unset."
    )
    args: tuple[Text, ...] = Field((), description="Arguments for vLLM, after those of the preset: the last one wins.")
    env: dict[str, Text] = Field(default_factory=dict, description="Environment of these engines.")


class Kv(_Section):
    """How long KV blocks are kept for the other side, and when reading them back is worth it."""

    recompute_threshold: int = Field(
        64, ge=0, description="Tokens below which P computes rather than reads D's KV back (kv_recompute_threshold)."
    )
    decoder_ttl: int = Field(
        480, ge=1, description="Seconds D keeps a turn's KV for the next turn (decoder_kv_blocks_ttl); never renewed."
    )
    lease: int = Field(
        30, ge=6, description="Seconds P keeps KV unread (kv_lease_duration); D renews it every sixth of that."
    )


class Transport(_Section):
    """What carries the KV cache."""

    backends: tuple[str, ...] = Field(("UCX",), min_length=1, description="NIXL backends, such as UCX or LIBFABRIC.")
    env: dict[str, Text] = Field(default_factory=dict, description="Environment of every engine, such as UCX_TLS.")


class Router(_Section):
    """Where clients connect."""

    host: str = Field("127.0.0.1", description="Address to listen on; loopback unless you mean to serve others.")
    port: Port | None = Field(None, description="Port to listen on; the first free one from 8000 if unset.")
    admin_port: Port | None = Field(
        None, description="Loopback port of the admin API (list, drain, add and remove engines); none if unset."
    )
    workers: int = Field(1, ge=1, le=64, description="Processes that serve clients, a core each.")
    api_key_file: Path | None = Field(None, description="File with one accepted API key a line.")


class Observability(_Section):
    """Prometheus (and Grafana, where it is installed) beside the fleet."""

    enabled: bool = Field(False, description="Start them with the fleet, as kvops up --observe does.")
    prometheus_port: Port | None = Field(None, description="Port on loopback; the first free one from 9090 if unset.")
    grafana_port: Port | None = Field(None, description="Port on loopback; the first free one from 3000 if unset.")
    retention_hours: int = Field(48, ge=1, le=8760, description="How long Prometheus keeps its data.")


_OBJECT_NAME = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
_QUANTITY = r"^[1-9][0-9]*(Mi|Gi|Ti)$"


class Kubernetes(_Section):
    """What ``kvops render kubernetes`` cannot know."""

    image: str | None = Field(None, min_length=1, description="Image of the engines; required for render.")
    kvops_image: str | None = Field(
        None, min_length=1, description="Image with kvops, which is copied into the engines' pods; theirs if unset."
    )
    namespace: str = Field("kvops", pattern=_OBJECT_NAME, description="Namespace of everything rendered.")
    instance_type: str | None = Field(None, description="EC2 type of the engines' nodes; that of the preset if unset.")
    cpu: int = Field(8, ge=1, description="Cores requested for an engine pod.")
    memory: str = Field("64Gi", pattern=_QUANTITY, description="Memory of an engine pod, /dev/shm included.")
    shared_memory: str = Field("16Gi", pattern=_QUANTITY, description="Size of /dev/shm in an engine pod.")
    huge_pages: str = Field("5120Mi", pattern=_QUANTITY, description="2 MiB pages of an engine pod on EFA nodes.")
    model_claim: str | None = Field(None, pattern=_OBJECT_NAME, description="PersistentVolumeClaim at /models.")
    cache_claim: str | None = Field(
        None, pattern=_OBJECT_NAME, description="PersistentVolumeClaim at /cache; else emptied with the pod."
    )
    token_secret: str | None = Field(None, pattern=_OBJECT_NAME, description="Secret whose key `token` is HF's token.")
    api_key_secret: str | None = Field(
        None, pattern=_OBJECT_NAME, description="Secret whose key `keys` has one accepted API key a line."
    )
    startup_minutes: int = Field(60, ge=1, description="Minutes an engine may take to load and compile.")
    drain_seconds: int = Field(600, ge=30, description="Seconds an engine may take to finish and hand out held KV.")
    router_replicas: int = Field(2, ge=1, le=64, description="Routers; a client's address stays with one of them.")
    monitoring_namespace: str = Field("monitoring", pattern=_OBJECT_NAME, description="Where Prometheus runs.")


class Compose(_Section):
    """What ``kvops render compose`` cannot know."""

    image: str | None = Field(None, min_length=1, description="Image of the engines; required for render.")
    kvops_image: str | None = Field(
        None, min_length=1, description="Image with kvops, which is copied beside the engines; theirs if unset."
    )
    model_folder: Path | None = Field(None, description="Folder of the host that engines see as /models, read-only.")
    token_file: Path | None = Field(None, description="File of the host with Hugging Face's token.")
    shared_memory: str = Field("16gb", pattern=r"^[1-9][0-9]*(mb|gb)$", description="Shared memory of all engines.")


class Slurm(_Section):
    """What ``kvops render slurm`` cannot know."""

    partition: str | None = Field(None, pattern=r"^[\w.,-]+$", description="Partition; the cluster's default if unset.")
    account: str | None = Field(None, pattern=r"^[\w.-]+$", description="Account that is charged.")
    time_limit: str = Field("08:00:00", pattern=r"^(\d+-)?\d{1,3}:\d\d:\d\d$", description="Time limit of the job.")
    python: str = Field("python3", pattern=r"^[\w./+-]+$", description="Python with vLLM, NIXL and kvops on all nodes.")
    run_folder: str = Field("kvops-run", pattern=r"^[\w./+-]+$", description="Shared folder for logs and journals.")
    drain_seconds: int = Field(60, ge=10, le=3600, description="Seconds before the time limit at which it stops.")


class Topology(_Section):
    """A whole fleet, as written in kvops.yaml."""

    model: str = Field(min_length=1, description="Model id or folder; kvops-tiny is written on first use.")
    mode: Mode = Field(Mode.PULL, description="pull, bidirectional or push.")
    platform: Platform = Field(Platform.CPU, description="cpu, cuda or neuron; comes from the preset.")
    preset: str | None = Field(None, description=f"One of {', '.join(PRESETS)}; found from the machine if unset.")
    prefill: Group = Group()
    decode: Group = Group()
    kv: Kv = Kv()
    transport: Transport = Transport()
    router: Router = Router()
    observability: Observability = Observability()
    kubernetes: Kubernetes = Kubernetes()
    slurm: Slurm = Slurm()
    compose: Compose = Compose()

    def groups(self) -> Iterator[tuple[str, Group]]:
        """Yield ``("prefill", group)`` and ``("decode", group)``."""
        yield "prefill", self.prefill
        yield "decode", self.decode

    @model_validator(mode="after")
    def _check_whole(self) -> Topology:
        for role, group in self.groups():
            _check_devices(role, group, self.platform)
        _check_disjoint_devices(self)
        _check_hosts(self)
        _check_ports(self)
        _check_push(self)
        return self


def _wrong(path: str, problem: str, fix: str) -> PydanticCustomError:
    """Return an error that ``_explain`` places at the dotted ``path`` rather than at the whole file."""
    return PydanticCustomError("topology", "{problem}; {fix}", {"path": path, "problem": problem, "fix": fix})


def _check_devices(role: str, group: Group, platform: Platform) -> None:
    if len(set(group.devices)) != len(group.devices):
        raise _wrong(f"{role}.devices", f"{role}.devices names a device twice: {list(group.devices)}", "name each once")
    if group.tensor_parallel * group.data_parallel % group.nodes:
        raise _wrong(
            f"{role}.nodes",
            f"{role}.nodes is {group.nodes}, which does not divide tensor_parallel {group.tensor_parallel}"
            f" x data_parallel {group.data_parallel}",
            "choose a divisor",
        )
    if platform is Platform.CPU:
        return
    # Replicas are dealt out over the hosts, so only those that share a host share its devices.
    replicas_a_host = -(-group.replicas // len(group.hosts))
    needed = replicas_a_host * group.tensor_parallel * group.data_parallel // group.nodes
    if needed > len(group.devices):
        parallel = f"tensor_parallel {group.tensor_parallel}"
        if group.data_parallel > 1:
            parallel += f" x data_parallel {group.data_parallel}"
        raise _wrong(
            f"{role}.devices",
            f"{role} needs {needed} devices on a host ({parallel} x {replicas_a_host} replicas) but devices lists "
            f"{len(group.devices)}",
            f"list {needed} devices, or lower tensor_parallel or replicas",
        )


def _check_disjoint_devices(topology: Topology) -> None:
    shared_devices = set(topology.prefill.devices) & set(topology.decode.devices)
    shared_hosts = set(topology.prefill.hosts) & set(topology.decode.hosts)
    if shared_devices and shared_hosts:
        raise _wrong(
            "decode.devices",
            f"prefill and decode both use device {min(shared_devices)} of host {min(shared_hosts)}",
            "give each role its own devices",
        )


def _check_hosts(topology: Topology) -> None:
    hosts = {host for _, group in topology.groups() for host in group.hosts}
    for role, group in topology.groups():
        for host in group.hosts:
            if _is_unspecified(host):
                raise _wrong(
                    f"{role}.hosts",
                    f"{role}.hosts has {host}, which is what the peer would dial as side-channel host",
                    "give the engine's own address",
                )
            if _is_loopback(host) and len(hosts) > 1:
                other = min(hosts - {host})
                raise _wrong(
                    f"{role}.hosts",
                    f"{role}.hosts has {host} but the fleet spans machines ({other} too), and a peer there that dials "
                    f"{host} reaches itself",
                    "give the engine's own address",
                )


def _check_ports(topology: Topology) -> None:
    taken: dict[tuple[str, int], str] = {}
    if topology.router.port:
        # The router shares the machine of the first prefill engine.
        taken[topology.prefill.hosts[0], topology.router.port] = "router.port"
    for role, group in topology.groups():
        for index in range(group.replicas):
            host = group.hosts[index % len(group.hosts)]
            step = index // len(group.hosts)
            for field, base, width in (
                ("port", group.port, 1),
                ("side_channel_port", group.side_channel_port, group.data_parallel),
            ):
                first = (base or 0) + step * width
                for port in range(first, first + width) if base else ():
                    owner = f"{field} of {role}-{index}"
                    if port > 65535:
                        raise _wrong(f"{role}.{field}", f"{owner} would be {port}, beyond 65535", "start lower")
                    if (host, port) in taken:
                        raise _wrong(
                            f"{role}.{field}",
                            f"{owner} and {taken[host, port]} are both {port} on {host}",
                            "give each its own port, or leave ports out and free ones are found",
                        )
                    taken[host, port] = owner


def _check_push(topology: Topology) -> None:
    if topology.mode is not Mode.PUSH:
        return
    for role, group in topology.groups():
        if any("bidirectional_kv_xfer" in arg for arg in group.args):
            raise _wrong(
                f"{role}.args",
                f"mode push cannot be combined with bidirectional_kv_xfer in {role}.args",
                "choose one: vLLM has no push connector that reads back",
            )


def _is_unspecified(host: str) -> bool:
    return host in ("0.0.0.0", "::", "*", "")  # noqa: S104


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_topology(
    file: Path | None = None, overrides: Mapping[str, Any] | None = None, preset: str | None = None
) -> Topology:
    """Return the topology of a kvops.yaml (or of a preset alone), with the command line's values on top.

    Args:
        file: the user's kvops.yaml; None for the preset alone.
        overrides: nested values that win over the file, such as ``{"decode": {"replicas": 2}}``.
        preset: the preset's name; None takes the file's, or the one that fits this machine.

    Raises:
        KvopsError: the file cannot be read, or is wrong: one sentence a problem, with its line and the nearest key.
    """
    data, lines, name = _read_file(file) if file else ({}, {}, "command line")
    chosen = preset or data.get("preset") or find_preset()
    base = _preset_data(chosen, name, lines)
    merged = _overlay(_overlay(base, data), overrides or {}) | {"preset": chosen}
    try:
        return Topology.model_validate(merged)
    except ValidationError as error:
        problems = [_explain(detail, name, lines) for detail in error.errors()]
        raise KvopsError("\n".join(problems)) from None


def instance_type(topology: Topology) -> str | None:
    """Return the EC2 type of the nodes: the one that is set, or the preset's; None where neither names one."""
    of_preset = {preset: kind for kind, preset in _PRESET_OF_INSTANCE_TYPE.items()}
    return topology.kubernetes.instance_type or of_preset.get(topology.preset or "")


def find_preset() -> str:
    """Return the preset that fits this machine: its EC2 instance type, any NVIDIA GPU, or else ``cpu-demo``."""
    try:
        instance_type = Path("/sys/devices/virtual/dmi/id/product_name").read_text().strip()
    except OSError:
        instance_type = ""
    if instance_type in _PRESET_OF_INSTANCE_TYPE:
        return _PRESET_OF_INSTANCE_TYPE[instance_type]
    return "cuda-local" if Path("/dev/nvidia0").exists() else "cpu-demo"


@cache
def preset_text(name: str) -> str:
    """Return the text of a preset's file; ``name`` is one of ``PRESETS``."""
    return resources.files("kvops").joinpath("presets", f"{name}.yaml").read_text()


def _preset_data(chosen: object, file_name: str, lines: Mapping[KeyPath, int]) -> dict[str, Any]:
    if chosen not in PRESETS:
        where = _place(("preset",), file_name, lines)
        raise KvopsError(f"{where}preset {chosen!r} does not exist{_nearest(str(chosen), PRESETS)}")
    data: dict[str, Any] = yaml.safe_load(preset_text(str(chosen)))
    return data


def _overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``top`` on it: sections merge, ``args`` add up, everything else is replaced."""
    result = dict(base)
    for key, value in top.items():
        below = result.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            result[key] = _overlay(below, value)
        elif key == "args" and isinstance(below, list) and isinstance(value, list):
            result[key] = below + value
        else:
            result[key] = value
    return result


def _read_file(file: Path) -> tuple[dict[str, Any], dict[KeyPath, int], str]:
    """Return the file's data, the line of every key in it, and the name to use in messages."""
    name = file.name
    try:
        node = yaml.compose(file.read_text(), Loader=yaml.SafeLoader)
    except OSError as error:
        raise KvopsError(f"cannot read {file}: {error.strerror}", "give the path of a kvops.yaml with -f") from None
    except UnicodeDecodeError:
        raise KvopsError(f"{file} is not a text file", "give the path of a kvops.yaml with -f") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        raise KvopsError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}", "mend that line") from None
    if node is None:
        return {}, {}, name
    if not isinstance(node, yaml.MappingNode):
        raise KvopsError(f"{name}:1: expected 'key: value' lines", "start with 'model: ...'")
    lines: dict[KeyPath, int] = {}
    _record_lines(node, (), lines, name)
    data: dict[str, Any] = yaml.SafeLoader("").construct_document(node)
    return data, lines, name


def _record_lines(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], name: str) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            key_path = (*path, str(key.value))
            line = key.start_mark.line + 1
            if key_path in lines:
                raise KvopsError(
                    f"{name}:{line}: {_dotted(key_path)} is already set on line {lines[key_path]}", "keep one of them"
                )
            lines[key_path] = line
            _record_lines(value, key_path, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[*path, index] = value.start_mark.line + 1
            _record_lines(value, (*path, index), lines, name)


def _explain(detail: ErrorDetails, name: str, lines: Mapping[KeyPath, int]) -> str:
    """Return one sentence for one pydantic error: where, what is wrong with which value, what to do."""
    path: KeyPath = detail["loc"]
    context = detail.get("ctx", {})
    if detail["type"] == "topology":
        path = tuple(context["path"].split("."))
        return f"{_place(path, name, lines)}{detail['msg']}"
    where = _place(path, name, lines)
    if detail["type"] == "extra_forbidden":
        return f"{where}unknown key {_dotted(path)}{_nearest(str(path[-1]), _keys_beside(path))}"
    if detail["type"] == "missing":
        return f"{where}{_dotted(path)} is missing; add it"
    if detail["type"] in ("model_type", "model_attributes_type"):
        return (
            f"{where}{_dotted(path)} is {detail['input']!r} but should be a section with keys of its own; indent them"
        )
    expected = detail["msg"].removeprefix("Input should be ").removeprefix("Value should have ")
    expected = expected.replace("a valid tuple", "a list")
    return f"{where}{_dotted(path)} is {detail['input']!r} but should be {expected}; change the value"


def _keys_beside(path: KeyPath) -> list[str]:
    model: type[BaseModel] = Topology
    for part in path[:-1]:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(known)}"


def _place(path: KeyPath, name: str, lines: Mapping[KeyPath, int]) -> str:
    """Return ``kvops.yaml:7: `` for the deepest part of ``path`` that the file has, else the file's name alone."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return f"{name}:{lines[path[:length]]}: "
    return f"{name}: "


def _dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)
