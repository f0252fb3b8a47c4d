"""When a check applies: each condition returns an empty text, or why the check is skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvops.doctor import manifest
from kvops.doctor.facts import UnavailableError

if TYPE_CHECKING:
    from kvops.doctor.facts import Facts
    from kvops.doctor.instances import Instance


def profile_if_known(facts: Facts) -> Instance | None:
    """Return the expectations for the instance type, None where the type is unknown or not captured."""
    try:
        return facts.profile
    except UnavailableError:
        return None


def efa(facts: Facts) -> str:
    """Applies where EFA is expected or present."""
    profile = profile_if_known(facts)
    if profile and profile.efas:
        return ""
    if profile:
        return f"{profile.name} takes no EFA"
    return "" if facts.efa_pci else "no EFA device, and none is expected of this machine"


def rdma(facts: Facts) -> str:
    """Applies where any RDMA device is expected or present."""
    return efa(facts) and ("" if facts.rdma_devices else "no RDMA device, and none is expected of this machine")


def known_type(facts: Facts) -> str:
    """Applies where the instance type is in the table."""
    return "" if facts.profile else f"instance type {facts.instance_type or 'unknown'!r} is not in the table"


def nvidia(facts: Facts) -> str:
    """Applies where NVIDIA GPUs are expected or present."""
    profile = profile_if_known(facts)
    if profile:
        return "" if profile.gpus else f"{profile.name} has no NVIDIA GPU"
    return "" if facts.gpu_pci else "no NVIDIA GPU"


def neuron(facts: Facts) -> str:
    """Applies where Neuron devices are expected or present."""
    profile = profile_if_known(facts)
    if profile:
        return "" if profile.neurons else f"{profile.name} has no Neuron device"
    return "" if facts.neuron_pci else "no Neuron device"


def accelerator(facts: Facts) -> str:
    """Applies where there is any accelerator."""
    return nvidia(facts) and neuron(facts) and "no accelerator"


def gpudirect(facts: Facts) -> str:
    """Applies where EFA is meant to reach GPU memory."""
    reason = efa(facts) or nvidia(facts)
    profile = profile_if_known(facts)
    if not reason and profile and profile.gpudirect is False:
        return f"{profile.name} does not support GPUDirect RDMA"
    return reason


def neuron_direct(facts: Facts) -> str:
    """Applies where EFA is meant to reach Neuron memory."""
    reason = neuron(facts) or efa(facts)
    profile = profile_if_known(facts)
    if not reason and profile and profile.gpudirect is False:
        return f"NIXL does not support Neuron direct RDMA on {profile.name}"
    return reason


def engine(facts: Facts) -> str:
    """Applies where an engine with a KV transfer configuration runs or is planned."""
    return "" if facts.kv_engines else "no vLLM engine with --kv-transfer-config"


def nixl_engine(facts: Facts) -> str:
    """Applies where such an engine uses one of the NIXL connectors."""
    found = [engine for engine in facts.kv_engines if "Nixl" in str((engine.kv_config or {}).get("kv_connector"))]
    return engine(facts) or ("" if found else "no engine uses a NIXL connector")


def libfabric_backend(facts: Facts) -> str:
    """Applies where an engine uses NIXL's LIBFABRIC backend."""
    used = any("LIBFABRIC" in engine.backends for engine in facts.kv_engines)
    return engine(facts) or ("" if used else "no engine uses the LIBFABRIC backend")


def ucx_backend(facts: Facts) -> str:
    """Applies where an engine uses NIXL's UCX backend."""
    used = any("UCX" in engine.backends for engine in facts.kv_engines)
    return engine(facts) or ("" if used else "no engine uses the UCX backend")


def pair(facts: Facts) -> str:
    """Applies where a prefill and a decode engine can be compared."""
    return "" if facts.engine_pairs else "needs a prefill and a decode engine: both here, or --pair"


def two_hosts(facts: Facts) -> str:
    """Applies where two machines are compared."""
    return "" if facts.peer else "compares two machines: --pair"


def one_host(facts: Facts) -> str:
    """Applies where prefill and decode share a machine."""
    if facts.peer is not None or len(facts.engines) < 2:
        return "only where prefill and decode share a host"
    return ""


def kubernetes(facts: Facts) -> str:
    """Applies where kubectl is there and set up; without a configuration it asks localhost:8080."""
    if not facts.installed(manifest.KUBECTL_NODES):
        return "no kubectl"
    return "kubectl knows no cluster" if "localhost:8080" in facts.output(manifest.KUBECTL_NODES).stderr else ""
