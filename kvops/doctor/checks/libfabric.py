"""libfabric: what its EFA provider offers, its version, and the variables that turn it away from EFA."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kvops.doctor import conditions, manifest
from kvops.doctor.check import failed, in_group, passed, skipped, unknown, warned, worst
from kvops.doctor.facts import UnavailableError
from kvops.doctor.parsers import fi_info, logs, whole_number
from kvops.doctor.parsers.versions import at_least

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvops.doctor.check import Finding
    from kvops.doctor.facts import Facts

check = in_group("libfabric")

REMOVED_VARIABLES = ("FI_EFA_MTU_SIZE", "FI_EFA_TX_IOV_LIMIT", "FI_EFA_RX_IOV_LIMIT")
LEGACY_VARIABLES = (
    "RDMAV_FORK_SAFE",
    "RDMAV_HUGEPAGES_SAFE",
    "IBV_FORK_SAFE",
    "FI_EFA_FORK_SAFE",
    "FI_EFA_SET_CUDA_SYNC_MEMOPS",
)
TRUE, FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
FOUR_KIB_MR_BYTES = 4 << 30
# Where registrations of host memory were reported to fail (libfabric#9739).
HOST_MEMORY_BYTES = 96_000_000_000


@check(
    "LF-01",
    "libfabric's EFA provider answers",
    evidence="fi_info -p efa",
    rule="FAIL if it prints fi_getinfo: -61, or no entry",
    fix="Install libfabric from the EFA bundle and put it first: PATH=/opt/amazon/efa/bin:$PATH",
    sources=("LF-INFO",),
    applies=(conditions.efa,),
    explained_by=("EFA-17", "EFA-07", "EFA-08", "LF-06", "LF-07"),
    quick=True,
)
def provider_answers(facts: Facts) -> Finding:
    """NIXL's LIBFABRIC backend takes tcp when efa does not answer, and says so in an INFO line only."""
    output = facts.output(manifest.FI_INFO_EFA)
    entries = [entry for entry in facts.efa_endpoints if entry.provider.startswith("efa")]
    if not entries:
        return failed("libfabric finds no EFA", (output.stderr.strip() or f"exit status {output.exit}")[:120])
    return passed(f"{len(entries)} endpoints of the EFA provider", f"provider: {entries[0].provider}")


@check(
    "LF-02",
    "libfabric offers a domain for every EFA",
    evidence="fi_info -p efa: distinct domains that end in -rdm",
    rule="FAIL if there are fewer than EFA devices on the bus, or than a container was given (EFA-07)",
    fix="Look at the devices without verbs node or RDMA device (EFA-06, EFA-07)",
    sources=("aws-do-eks#63",),
    applies=(conditions.efa,),
    explained_by=("LF-01", "EFA-07", "EFA-06"),
)
def domains(facts: Facts) -> Finding:
    """An EFA has two or three entries, depending on the version: only the domains can be counted."""
    if not facts.efa_endpoints:
        facts.output(manifest.FI_INFO_EFA)
        return failed("libfabric offers no EFA domain", "fi_info -p efa: no entry")
    found = {entry.domain for entry in facts.efa_endpoints if entry.domain.endswith("-rdm")}
    wanted = len(facts.efa_pci)
    given = len([name for name in facts.names("/dev/infiniband") if name.startswith("uverbs")])
    if found and len(found) == given < wanted and facts.in_container and not facts.neuron_pci:
        return passed(f"{given} EFA domains, as many as this container was given")
    if len(found) < wanted:
        return failed(f"libfabric offers {len(found)} of {wanted} EFA domains", f"first: {min(found, default='none')}")
    return passed(f"{len(found)} EFA domains")


@check(
    "LF-03",
    "The efa-direct fabric is offered",
    evidence="fi_info -p efa: fabric: efa-direct",
    rule="informational; WARN where aws-ofi-nccl 1.15 or later would use it",
    fix="Upgrade libfabric to 2.x with the EFA installer",
    sources=("FIEFA", "OFI-SRC"),
    applies=(conditions.efa,),
    explained_by=("LF-01", "LF-04"),
)
def efa_direct(facts: Facts) -> Finding:
    """efa-direct leaves out libfabric's own protocol and its copies."""
    if not facts.efa_endpoints:
        return unknown("libfabric offers no EFA endpoint")
    if any(entry.fabric == "efa-direct" for entry in facts.efa_endpoints):
        return passed("efa-direct is offered")
    try:
        plugin = facts.libraries("libnccl-net")
    except UnavailableError:
        plugin = []
    fabrics = sorted({entry.fabric for entry in facts.efa_endpoints})
    message = "efa-direct is not offered"
    return warned(message, f"fabric: {fabrics[0]}") if plugin else passed(f"note: {message}", f"fabric: {fabrics[0]}")


@check(
    "LF-04",
    "libfabric is new enough",
    evidence="fi_info --version",
    rule=(
        "FAIL before 1.21 (NIXL) and before 2.5.1 on GB200. WARN before 1.22 (aws-ofi-nccl) and before 2.4 "
        "(CUDA dmabuf is off by default)"
    ),
    fix="EFA installer 1.49 (libfabric 2.4.0amzn5.0) or 1.50 (2.6) and later",
    sources=("NIXL-README", "OFI-SRC", "LF-NEWS", "libfabric#12019"),
    applies=(conditions.efa,),
)
def libfabric_version(facts: Facts) -> Finding:
    """GPU memory over dmabuf, and the API that NIXL uses, came with certain versions."""
    have, evidence = facts.libfabric_version, f"libfabric: {facts.libfabric}"
    if not at_least(have, (1, 21)):
        return failed(f"libfabric {facts.libfabric} is older than 1.21, which NIXL needs", evidence)
    if "gb200" in facts.instance_type and not at_least(have, (2, 5, 1)):
        return failed(f"libfabric {facts.libfabric} cannot register CUDA memory on GB200 (2.5.1)", evidence)
    if not at_least(have, (1, 22)):
        return warned(f"libfabric {facts.libfabric} is older than 1.22, which aws-ofi-nccl needs", evidence)
    if not at_least(have, (2, 4)):
        return warned(f"libfabric {facts.libfabric} leaves CUDA dmabuf off by default (2.4)", evidence)
    return passed(f"libfabric {facts.libfabric}", evidence)


@check(
    "LF-05",
    "There is one libfabric",
    evidence="/proc/<pid>/maps of the engines, ldconfig -p",
    rule="FAIL if a process has mapped two, WARN if the loader knows two",
    fix="LD_LIBRARY_PATH=/opt/amazon/efa/lib (lib64 on Amazon Linux), and remove the copy that a wheel bundles",
    sources=("aws-ofi-nccl#241", "dynamo#12105", "ANYSCALE"),
    applies=(conditions.efa,),
    quick=True,
)
def one_libfabric(facts: Facts) -> Finding:
    """A wheel's own libfabric beside the system's gives crashes, deadlocks or an EFA provider that is not there."""
    for pid in _workers(facts):
        mapped = [path for path in facts.mapped_files(pid) if re.search(r"/libfabric[-.\w]*\.so", path)]
        if len(mapped) > 1:
            return failed(f"process {pid} has mapped {len(mapped)} builds of libfabric", ", ".join(mapped))
    known = list(dict.fromkeys(facts.libraries("libfabric.so")))
    if len(known) > 1:
        return warned(f"the loader knows {len(known)} builds of libfabric", ", ".join(known))
    if not known:
        return unknown("the loader's cache has no libfabric", "ldconfig -p")
    return passed("one libfabric", known[0])


def _workers(facts: Facts) -> list[int]:
    """Return the engines' processes; none where processes were not captured, for the loader tells something too."""
    try:
        return facts.worker_pids
    except UnavailableError:
        return []


@check(
    "LF-06",
    "No variable that makes the EFA provider abort",
    evidence="environment of the engines: FI_EFA_*",
    rule=(
        "FAIL: empty FI_EFA_IFACE, a removed variable, FI_EFA_USE_DEVICE_RDMA that is not a boolean, or on for an EFA "
        "without RDMA read (c5n, p3dn), FI_EFA_TX_MIN_CREDITS of 0 or less"
    ),
    fix="Unset it",
    sources=("LF-ENV",),
    applies=(conditions.efa,),
)
def aborting_variables(facts: Facts) -> Finding:
    """Libfabric stops the process on these, or refuses every endpoint."""
    return worst(_aborting(facts), passed("no variable makes EFA abort"))


def _aborting(facts: Facts) -> Iterator[Finding]:
    for owner, env in facts.environments.items():
        if env.get("FI_EFA_IFACE") == "":
            yield failed(f"{owner} sets FI_EFA_IFACE to nothing", "FI_EFA_IFACE=")
        for name in REMOVED_VARIABLES:
            if name in env:
                yield failed(f"{owner} sets {name}, which libfabric no longer accepts", f"{name}={env[name]}")
        device_rdma = env.get("FI_EFA_USE_DEVICE_RDMA")
        if device_rdma is not None and device_rdma.lower() not in TRUE | FALSE:
            yield failed(f"{owner}: FI_EFA_USE_DEVICE_RDMA is not a boolean", f"FI_EFA_USE_DEVICE_RDMA={device_rdma}")
        profile = conditions.profile_if_known(facts)
        if device_rdma and profile and not profile.device_rdma and device_rdma.lower() in TRUE:
            yield failed(
                f"{owner} asks for RDMA, which the EFA of {profile.name} has not",
                f"FI_EFA_USE_DEVICE_RDMA={device_rdma}",
            )
        credit = env.get("FI_EFA_TX_MIN_CREDITS")
        if credit is not None and not whole_number(credit):
            yield failed(f"{owner}: FI_EFA_TX_MIN_CREDITS must be above 0", f"FI_EFA_TX_MIN_CREDITS={credit}")


@check(
    "LF-07",
    "No variable that turns libfabric away from EFA or from device memory",
    evidence="environment of the engines: FI_PROVIDER, FI_EFA_USE_DEVICE_RDMA, FI_HMEM*",
    rule=(
        "FAIL: FI_PROVIDER without efa, FI_HMEM without the accelerator, FI_HMEM_DISABLE_P2P=1, "
        "FI_HMEM_CUDA_USE_DMABUF=0 without peer memory. WARN: FI_EFA_USE_DEVICE_RDMA=0"
    ),
    fix="Unset it",
    sources=("LF-ENV", "FIEFA"),
    applies=(conditions.efa,),
    quick=True,
)
def downgrading_variables(facts: Facts) -> Finding:
    """Everything still works, over TCP or through host memory."""
    return worst(_downgrading(facts), passed("no variable turns libfabric away from EFA"))


def _downgrading(facts: Facts) -> Iterator[Finding]:
    for owner, env in facts.environments.items():
        provider = env.get("FI_PROVIDER", "efa")
        if provider.startswith("^") == ("efa" in re.split(r"[,;^]", provider)):
            yield failed(f"{owner} keeps libfabric from using EFA", f"FI_PROVIDER={provider}")
        memory = env.get("FI_HMEM")
        wanted = "" if conditions.accelerator(facts) else "neuron" if conditions.nvidia(facts) else "cuda"
        if memory is not None and wanted and wanted not in memory.lower().split(","):
            yield failed(f"{owner} keeps libfabric from {wanted} memory", f"FI_HMEM={memory}")
        if env.get("FI_HMEM_DISABLE_P2P", "0") not in {"0", ""}:
            yield failed(f"{owner} turns peer-to-peer off", f"FI_HMEM_DISABLE_P2P={env['FI_HMEM_DISABLE_P2P']}")
        if env.get("FI_HMEM_CUDA_USE_DMABUF") == "0" and not _has_peer_memory(facts):
            yield failed(f"{owner} turns dmabuf off, and there is no peer memory", "FI_HMEM_CUDA_USE_DMABUF=0")
        if env.get("FI_EFA_USE_DEVICE_RDMA", "").lower() in FALSE:
            yield warned(f"{owner} turns RDMA of the device off", "FI_EFA_USE_DEVICE_RDMA=0")


def _has_peer_memory(facts: Facts) -> bool:
    devices = [device.name for device in facts.efa_rdma]
    providers = [facts.optional(f"/sys/class/infiniband/{name}/device/p2p") or "" for name in devices]
    return any(provider.startswith("NVIDIA") for provider in providers) or "efa_nv_peermem" in facts.modules


@check(
    "LF-08",
    "No legacy or misspelt variable of libfabric",
    evidence="environment of the engines against fi_info -e",
    rule="WARN for a name that has no effect or is advised against",
    fix="Remove it",
    sources=("AWSOME-CHEAT", "LF-INFO"),
    applies=(conditions.efa,),
)
def legacy_variables(facts: Facts) -> Finding:
    """A setting copied from an old guide does nothing, or not what its name says."""
    known = fi_info.parse_variable_names(facts.output(manifest.FI_INFO_VARIABLES).stdout)
    for owner, env in facts.environments.items():
        legacy = [name for name in LEGACY_VARIABLES if name in env]
        if legacy and at_least(facts.kernel, (5, 13)):
            return warned(f"{owner} sets {legacy[0]}, advised against", f"{legacy[0]}={env[legacy[0]]}")
        strange = [name for name in env if name.startswith("FI_EFA_") and known and name not in known]
        if strange and strange[0] not in (*REMOVED_VARIABLES, *LEGACY_VARIABLES):
            return warned(f"{owner} sets {strange[0]}, which libfabric does not know", "not in fi_info -e")
    return passed("no legacy or unknown variable is set") if known else unknown("fi_info -e lists no variable")


@check(
    "LF-09",
    "libfabric offers EFA for device memory",
    evidence="fi_info -p efa -c FI_HMEM",
    rule="FAIL if it answers nothing while fi_info -p efa does",
    fix="Make libcudart or libnrt visible to libfabric, and use a libfabric built for it (the EFA bundle's)",
    sources=("aws-ofi-nccl#889", "Mooncake#3888"),
    applies=(conditions.efa, conditions.accelerator),
    explained_by=("LF-01", "LF-07", "NEU-09"),
)
def device_memory(facts: Facts) -> Finding:
    """A libfabric that cannot load the accelerator's runtime leaves FI_HMEM out without a word."""
    output = facts.output(manifest.FI_INFO_HMEM)
    if "provider: efa" in output.stdout:
        return passed("EFA is offered with FI_HMEM")
    if not facts.efa_endpoints:
        return unknown("libfabric offers no EFA at all")
    return failed("libfabric offers EFA without device memory", (output.stderr.strip() or "no entry")[:120])


@check(
    "LF-10",
    "rdma-core can register dmabuf memory",
    evidence="dpkg-query -W or rpm -qa: rdma-core, libibverbs",
    rule="FAIL before 34, WARN before 38 (fork)",
    fix="Upgrade rdma-core with the EFA installer",
    sources=("LF-ENV", "OFI-SRC"),
    applies=(conditions.efa, conditions.accelerator),
)
def rdma_core(facts: Facts) -> Finding:
    """ibv_reg_dmabuf_mr came with rdma-core 34, safe forks with 38."""
    number = ".".join(map(str, facts.rdma_core))
    if not at_least(facts.rdma_core, (34,)):
        return failed(f"rdma-core {number} has no ibv_reg_dmabuf_mr (34)", f"rdma-core {number}")
    if not at_least(facts.rdma_core, (38,)):
        return warned(f"rdma-core {number} is not safe to fork (38)", f"rdma-core {number}")
    return passed(f"rdma-core {number}", f"rdma-core {number}")


@check(
    "LF-11",
    "The libraries of container and host fit together",
    evidence="the engines' log",
    rule="WARN on an unresolved EFA symbol or an unimplemented call",
    fix="Put one EFA bundle into the image, as new as the host's driver; do not mix host mounts and image",
    sources=("MOONCAKE-EFA", "dynamo#13048"),
    applies=(conditions.efa, conditions.engine),
    explained_by=("LF-05",),
)
def container_libraries(facts: Facts) -> Finding:
    """A library from the host that was mounted into the image misses its own counterpart."""
    pattern = r"undefined (?:reference|symbol).*EFA_\d|fi_ep_bind.*Function not implemented"
    lines = logs.matching(facts.engine_log, pattern)
    if lines:
        return warned("libfabric and the EFA library do not fit together", lines[0][:160])
    return passed("no unresolved EFA symbol in the log")


@check(
    "LF-12",
    "libfabric does not log for debugging",
    evidence="environment of the engines: FI_LOG_LEVEL",
    rule="WARN for debug, trace or info",
    fix="Unset FI_LOG_LEVEL, or set it to warn",
    sources=("ANYSCALE",),
    applies=(conditions.efa,),
)
def debug_logging(facts: Facts) -> Finding:
    """Debug logging took a transfer on p5 from 12 to 0.35 GB/s."""
    for owner, env in facts.environments.items():
        level = env.get("FI_LOG_LEVEL", "")
        if level.lower() in {"debug", "trace", "info"}:
            return warned(f"{owner} makes libfabric log for debugging", f"FI_LOG_LEVEL={level}")
    return passed("FI_LOG_LEVEL is unset or warn")


@check(
    "LF-13",
    "Host KV memory fits a registration",
    evidence="--kv-transfer-config: kv_buffer_device, kv_buffer_size; getconf PAGESIZE",
    rule="WARN for host memory above 4 GiB in one registration with 4 KiB pages, and from 96 GB a host on",
    fix="Use 2 MiB huge pages for the host buffer, or a smaller one",
    sources=("LF-PR10402", "libfabric#9739"),
    applies=(conditions.efa, conditions.libfabric_backend),
)
def registration_size(facts: Facts) -> Finding:
    """EFA takes a million pages per registration: 4 GiB with pages of 4 KiB."""
    configs = {engine.name: engine.kv_config or {} for engine in facts.kv_engines}
    sizes = {name: config.get("kv_buffer_size", 0) for name, config in configs.items() if _in_host_memory(config)}
    if not sizes:
        return skipped("KV stays in device memory")
    known = {name: size for name, size in sizes.items() if isinstance(size, int | float)}
    total = sum(known.values())
    for name, size in known.items():
        if size > FOUR_KIB_MR_BYTES and facts.page_size == 4096:
            return warned(f"{name} registers {size / (1 << 30):.0f} GiB of host memory", f"kv_buffer_size {size}")
    if total >= HOST_MEMORY_BYTES:
        return warned(f"the engines register {total / 1e9:.0f} GB of host memory", f"kv_buffer_size {total} in all")
    return passed("no host buffer above 4 GiB")


def _in_host_memory(config: dict[str, Any]) -> bool:
    return config.get("kv_buffer_device") == "cpu"


@check(
    "LF-14",
    "libfabric's shared-memory path is on where prefill and decode share a host",
    evidence="environment of the engines: FI_EFA_ENABLE_SHM_TRANSFER",
    rule="informational: PASS either way",
    fix="Unset FI_EFA_ENABLE_SHM_TRANSFER",
    sources=("FIEFA",),
    applies=(conditions.efa, conditions.one_host),
)
def shared_memory_path(facts: Facts) -> Finding:
    """Without it, traffic between two engines of a host goes through the NIC."""
    off = [owner for owner, env in facts.environments.items() if env.get("FI_EFA_ENABLE_SHM_TRANSFER") == "0"]
    if off:
        return passed(f"note: {off[0]} sends traffic within the host through EFA", "FI_EFA_ENABLE_SHM_TRANSFER=0")
    return passed("traffic within the host uses shared memory")


CHECKS = (
    provider_answers,
    domains,
    efa_direct,
    libfabric_version,
    one_libfabric,
    aborting_variables,
    downgrading_variables,
    legacy_variables,
    device_memory,
    rdma_core,
    container_libraries,
    debug_logging,
    registration_size,
    shared_memory_path,
)
