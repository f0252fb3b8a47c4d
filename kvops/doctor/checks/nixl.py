"""NIXL: the package, its backend plugins, and what its agents logged about rails and topology."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvops.doctor import conditions
from kvops.doctor.check import State, failed, in_group, passed, skipped, unknown, warned
from kvops.doctor.checks import ucx
from kvops.doctor.facts import UnavailableError
from kvops.doctor.host import Gap
from kvops.doctor.parsers import logs, nixlbench, packages

if TYPE_CHECKING:
    from kvops.doctor.check import Finding
    from kvops.doctor.facts import Facts

check = in_group("nixl")

VARIANTS = ("nixl-cu12", "nixl-cu13")
KNOWN_VARIABLES = {
    "NIXL_CONFIG_FILE",
    "NIXL_DEBUG_LOGGING",
    "NIXL_DISABLE_CUDA_ADDR_WA",
    "NIXL_DISABLE_FUNCTION_LOGGING",
    "NIXL_LIBFABRIC_MAX_BW_PER_DRAM_SEG",
    "NIXL_LOG_LEVEL",
    "NIXL_PLUGIN_DIR",
}
KNOWN_FAMILIES = ("NIXL_TELEMETRY_", "NIXL_UCX_", "NIXL_ETCD_")
MISSPELT = {"NIXL_LOGGING_LEVEL": "NIXL_LOG_LEVEL"}
LOUD_LEVELS = {
    "NIXL_LOG_LEVEL": {"debug", "trace"},
    "UCX_LOG_LEVEL": {"debug", "trace", "data", "req"},
    "FI_LOG_LEVEL": {"debug", "trace"},
    "NCCL_DEBUG": {"trace"},
}


def plugin_path(facts: Facts, backend: str) -> str:
    """Return the path of a backend's plugin; empty when it is not there."""
    return facts.nixl_plugins.get(backend, "")


@check(
    "NX-01",
    "One NIXL package, built for the CUDA that PyTorch uses",
    evidence="site-packages of the engines, else pip list: nixl, nixl-cu12, nixl-cu13, torch",
    rule="WARN for two variants of different versions, FAIL if none is of PyTorch's CUDA major",
    fix="pip uninstall nixl nixl-cu12 nixl-cu13, then pip install nixl",
    sources=("NIXL-PLUGIN",),
    applies=(conditions.nixl_engine,),
)
def package(facts: Facts) -> Finding:
    """Each wheel carries its own plugins; nixl takes the one of the CUDA that it finds."""
    installed = facts.python_packages
    variants = [name for name in VARIANTS if name in installed]
    if not variants and "nixl" not in installed:
        return failed("NIXL is not installed", "no distribution nixl")
    if len({installed[name] for name in variants}) > 1:
        shown = ", ".join(f"{name} {installed[name]}" for name in variants)
        return warned("two versions of NIXL are installed", shown)
    cuda = re.search(r"\+cu(\d\d)", installed.get("torch", ""))
    if cuda and variants and not any(name.endswith(cuda[1]) for name in variants):
        return failed(f"{variants[0]} with a PyTorch of CUDA {cuda[1]}", f"torch {installed['torch']}")
    name = variants[0] if variants else "nixl"
    return passed(f"{name} {installed[name]}", f"{name} {installed[name]}")


@check(
    "NX-02",
    "The plugin of every configured backend is there",
    evidence="NIXL_PLUGIN_DIR, else <site-packages>/.nixl_*.mesonpy.libs/plugins: libplugin_<BACKEND>.so",
    rule="FAIL if a configured backend has no plugin",
    fix="Use a NIXL wheel or image that has the backend, or point NIXL_PLUGIN_DIR at its plugins",
    sources=("NIXL-PLUGIN",),
    applies=(conditions.nixl_engine,),
    explained_by=("NX-01",),
    quick=True,
)
def plugin_present(facts: Facts) -> Finding:
    """Without its plugin a backend is unsupported, and the engine does not start."""
    wanted = {backend for engine in facts.kv_engines for backend in engine.backends}
    missing = sorted(backend for backend in wanted if not plugin_path(facts, backend))
    if missing:
        have = ", ".join(sorted(facts.nixl_plugins)) or "none"
        return failed(f"NIXL has no plugin for {', '.join(missing)}", f"plugins: {have}")
    return passed(f"plugins for {', '.join(sorted(wanted))}", plugin_path(facts, min(wanted)))


@check(
    "NX-03",
    "Every library that the LIBFABRIC plugin needs is found",
    evidence="/proc/<pid>/maps of engines that have loaded it, else ldd libplugin_LIBFABRIC.so",
    rule="FAIL on 'not found', WARN if libfabric does not come from /opt/amazon/efa on an EFA host",
    fix="Install the EFA user space in the image, then ldconfig",
    sources=("NIXL-PLUGIN", "vllm#55783"),
    applies=(conditions.libfabric_backend,),
    explained_by=("NX-02",),
    quick=True,
)
def plugin_libraries(facts: Facts) -> Finding:
    """NIXL logs a plugin that does not load at INFO only, which nobody sees."""
    if not facts.planned and "LIBFABRIC" in facts.loaded_plugins:
        return _used_libfabric(facts)
    path = plugin_path(facts, "LIBFABRIC")
    if not path:
        return unknown("there is no LIBFABRIC plugin")
    found = facts.parsed(("ldd", path), packages.parse_ldd)
    # PyTorch has loaded CUDA's libraries, wherever they are, before NIXL loads a plugin.
    missing = [name for name, where in found.items() if not where and not name.startswith("libcud")]
    if missing:
        return failed(f"the LIBFABRIC plugin misses {', '.join(missing)}", f"{missing[0]} => not found")
    return _whose(facts, next((where for name, where in found.items() if name.startswith("libfabric")), ""))


def _used_libfabric(facts: Facts) -> Finding:
    """Judge by what the engines have mapped: a plugin that is loaded has found its libraries."""
    mapped = [path for pid in facts.worker_pids for path in facts.mapped_files(pid)]
    return _whose(facts, next((path for path in mapped if "/libfabric" in path), ""))


def _whose(facts: Facts, libfabric: str) -> Finding:
    if facts.efa_pci and libfabric and "/opt/amazon/efa/" not in libfabric:
        return warned("the LIBFABRIC plugin does not use the EFA bundle's libfabric", f"libfabric => {libfabric}")
    return passed("the LIBFABRIC plugin finds its libraries", f"libfabric => {libfabric}" if libfabric else "")


@check(
    "NX-04",
    "The plugins are of NIXL's own version",
    evidence="the engines' log: Plugin API version mismatch",
    rule="FAIL if the log has it",
    fix="Unset a stale NIXL_PLUGIN_DIR, or point it at the plugins of the installed NIXL",
    sources=("NIXL-PLUGIN",),
    applies=(conditions.nixl_engine,),
)
def plugin_api(facts: Facts) -> Finding:
    """NIXL passes over a plugin of another API version."""
    lines = logs.matching(facts.engine_log, r"Plugin API version mismatch")
    if lines:
        return failed("a NIXL plugin has another API version", lines[0][:160])
    return passed("no mismatch in the log")


@check(
    "NX-05",
    "The configured backend fits the hardware",
    evidence="--kv-transfer-config: kv_connector_extra_config.backends; the engines' log",
    rule="WARN if EFA is present and an engine uses UCX; FAIL if that UCX has no EFA transport (NX-10)",
    fix='On prefill and decode: "kv_connector_extra_config": {"backends": ["LIBFABRIC"]}',
    sources=("NIXL-AGENT", "VLLM-NIXL", "vllm#41814"),
    applies=(conditions.efa, conditions.nixl_engine),
    quick=True,
)
def backend(facts: Facts) -> Finding:
    """UCX is the default of vLLM, and UCX without EFA support takes TCP: 0.3 GB/s instead of tens."""
    for engine in facts.kv_engines:
        if "LIBFABRIC" in engine.backends:
            continue
        chosen = "UCX by default" if "backends" not in engine.extra_config else ", ".join(engine.backends)
        answer = failed if ucx.efa_transport.find(facts).state is State.FAIL else warned
        return answer(
            f"{engine.name} uses {chosen} on a host with {len(facts.efa_pci)} EFA devices",
            f"backends: {engine.extra_config.get('backends', 'not set')}",
        )
    return passed("every engine uses LIBFABRIC", 'backends: ["LIBFABRIC"]')


@check(
    "NX-06",
    "NIXL's LIBFABRIC backend really runs on EFA",
    evidence="the engines' log with NIXL_LOG_LEVEL=INFO: Discovered N ... devices, Created N rails using provider=",
    rule="FAIL if the log names tcp or sockets",
    fix="Mend what keeps libfabric from EFA: LF-01, EFA-17, NX-03; then set NIXL_LOG_LEVEL=INFO once to see it",
    sources=("NIXL-LFC", "NIXL-TOPOCPP"),
    applies=(conditions.efa, conditions.libfabric_backend),
    explained_by=("LF-01", "EFA-17", "NX-03", "EFA-07"),
    quick=True,
)
def provider_in_use(facts: Facts) -> Finding:
    """The fallback from efa to tcp is one INFO line, below the default log level."""
    text = facts.engine_log
    fallback = logs.matching(text, r"\(TCP fallback\)|provider=(?:tcp|sockets)|simplified topology for (?:tcp|sockets)")
    if fallback:
        return failed("NIXL's LIBFABRIC backend runs over TCP", fallback[0][:160])
    proof = logs.matching(text, r"provider=efa|Discovered \d+ EFA devices")
    if proof:
        return passed("NIXL's rails use EFA", proof[0][:160])
    return unknown("the log does not name the provider: set NIXL_LOG_LEVEL=INFO")


@check(
    "NX-07",
    "Both sides have as many rails",
    evidence="the engines' log: Rail count mismatch, Rail Manager created with N rails",
    rule="WARN on a mismatch, FAIL if one side has a single rail and EFA has more",
    fix="Use the same instance type, and give all EFAs to both pods",
    sources=("NIXL-LF",),
    applies=(conditions.libfabric_backend,),
    explained_by=("NX-06", "NW-09", "K8S-02"),
)
def rails(facts: Facts) -> Finding:
    """A side on tcp has one rail, and the pair then has one."""
    text = facts.engine_log
    lines = logs.matching(text, r"Rail count mismatch")
    if lines:
        counts = logs.numbers(lines[0], r"(?:local|remote): (\d{1,6})")
        answer = failed if 1 in counts else warned
        return answer("prefill and decode have different numbers of rails", lines[0][:160])
    created = logs.numbers(text, r"(?:Rail Manager created with|Created) (\d{1,6}) rails")
    if not created:
        return unknown("the log does not name rails: set NIXL_LOG_LEVEL=INFO")
    return passed(f"{created[0]} rails, no mismatch")


@check(
    "NX-08",
    "NIXL knows which EFA is near which accelerator",
    evidence="the engines' log: Topology, Accelerator-PCI; hwloc fallbacks",
    rule="WARN if it falls back to all devices, or the NICs differ in speed",
    fix="Give the container the full /sys, and hwloc 2.10 or later",
    sources=("NIXL-TOPOCPP",),
    applies=(conditions.libfabric_backend, conditions.efa),
    explained_by=("NX-06", "HOST-11"),
)
def topology(facts: Facts) -> Finding:
    """Without the mapping every accelerator uses every NIC, across sockets too."""
    pattern = r"not found in accelerator-EFA mapping|Using fallback: all accelerators|Non-uniform NIC .*speed"
    lines = logs.matching(facts.engine_log, pattern)
    if lines:
        return warned("NIXL does not know which EFA is near which accelerator", lines[0][:160])
    proof = logs.matching(facts.engine_log, r"Topology: \d+ NUMA nodes|Accelerator-PCI ")
    if not proof:
        return unknown("the log does not name the topology: set NIXL_LOG_LEVEL=INFO")
    return passed("NIXL has mapped accelerators to EFAs", proof[0][:160])


@check(
    "NX-09",
    "NIXL sees the accelerator's runtime",
    evidence="the engines' log: System runtime",
    rule="FAIL on accelerator hosts if it sees none",
    fix="Use a NIXL built with CUDA, and put libcudart or libnrt on the loader's path",
    sources=("NIXL-TOPOCPP",),
    applies=(conditions.accelerator, conditions.libfabric_backend),
)
def runtime(facts: Facts) -> Finding:
    """Without it NIXL registers host memory only."""
    pattern = r"SYSTEM \(no accelerators\)|No accelerator runtime, skipping VRAM"
    lines = logs.matching(facts.engine_log, pattern)
    if lines:
        return failed("NIXL sees no accelerator", lines[0][:160])
    proof = logs.matching(facts.engine_log, r"System runtime: (?:CUDA|NEURON)")
    if not proof:
        return unknown("the log does not name the runtime: set NIXL_LOG_LEVEL=INFO")
    return passed("NIXL sees the accelerators", proof[0][:160])


@check(
    "NX-14",
    "No unknown variable of NIXL",
    evidence="environment of the engines: NIXL_*",
    rule="WARN for a name that NIXL does not read",
    fix="Rename or remove it",
    sources=("NIXL-LOG", "ANYSCALE"),
    applies=(conditions.nixl_engine,),
)
def variables(facts: Facts) -> Finding:
    """A public guide sets NIXL_LOGGING_LEVEL; NIXL reads NIXL_LOG_LEVEL."""
    for owner, env in facts.environments.items():
        own = [name for name in env if name.startswith("NIXL_") and not name.startswith(KNOWN_FAMILIES)]
        strange = [name for name in own if name not in KNOWN_VARIABLES]
        if strange:
            meant = MISSPELT.get(strange[0], "")
            hint = f"it is called {meant}" if meant else ""
            return warned(f"{owner} sets {strange[0]}, which has no effect", f"{strange[0]}={env[strange[0]]}", hint)
    return passed("only known variables are set")


@check(
    "NX-15",
    "No transport logs for debugging",
    evidence="environment of the engines: NIXL_LOG_LEVEL, UCX_LOG_LEVEL, FI_LOG_LEVEL, NCCL_DEBUG",
    rule="WARN for debug or trace",
    fix="Unset it",
    sources=("ANYSCALE",),
    applies=(conditions.nixl_engine,),
)
def debug_logging(facts: Facts) -> Finding:
    """A log line per operation costs more than the operation."""
    for owner, env in facts.environments.items():
        for name, levels in LOUD_LEVELS.items():
            if env.get(name, "").lower() in levels:
                return warned(f"{owner} logs for debugging", f"{name}={env[name]}")
    return passed("no debug logging")


@check(
    "NX-16",
    "The engine's processes have loaded the configured backend",
    evidence="/proc/<pid>/maps of the engine cores: libplugin_<BACKEND>.so",
    rule="FAIL if other backends are mapped but not the configured one",
    fix="See NX-02 and NX-03",
    sources=("A-DLC",),
    applies=(conditions.nixl_engine,),
    explained_by=("NX-02", "NX-03"),
)
def backend_mapped(facts: Facts) -> Finding:
    """What a process has mapped is proof, whatever its configuration says."""
    if facts.planned:
        return skipped("the engines are not started yet")
    mapped = [path for pid in facts.worker_pids for path in facts.mapped_files(pid)]
    if not mapped:
        return unknown("the engines' memory maps cannot be read")
    wanted = sorted({backend for engine in facts.kv_engines for backend in engine.backends})
    missing = [backend for backend in wanted if not any(f"libplugin_{backend}.so" in path for path in mapped)]
    loaded = facts.loaded_plugins
    if not loaded:
        return unknown("the engines have loaded no NIXL backend at all, as while they start")
    if missing:
        return failed(f"{', '.join(missing)} is configured and not loaded", f"loaded: {', '.join(loaded)}")
    return passed(f"{', '.join(wanted)} is loaded")


@check(
    "NX-20",
    "EFA libraries come from one source",
    evidence="dpkg-query or rpm: libfabric1 beside libfabric-aws; <site-packages>/nixl*.libs: libfabric, libefa",
    rule="WARN if the distribution's and AWS' packages are both there, or a NIXL wheel bundles its own",
    fix="Keep /opt/amazon/efa, remove the distribution's libfabric and bundled copies",
    sources=("ANYSCALE", "dynamo#12105", "aws-ofi-nccl#1055"),
    applies=(conditions.efa,),
    explained_by=("LF-05",),
)
def one_source(facts: Facts) -> Finding:
    """Two builds of libfabric in one process end in a crash or a deadlock."""
    vanilla = [name for name in ("libfabric1", "libfabric") if name in facts.os_packages]
    from_aws = [name for name in facts.os_packages if name.startswith("libfabric") and "aws" in name]
    if vanilla and from_aws:
        return warned(f"{vanilla[0]} stands beside {from_aws[0]}", f"{vanilla[0]} {facts.os_packages[vanilla[0]]}")
    bundled = [f"{folder}/{name}" for folder in _wheel_folders(facts) for name in _names(facts, folder)]
    own = [path for path in bundled if re.search(r"/lib(?:fabric|efa)[-.]", path)]
    if own and (from_aws or vanilla):
        return warned("a NIXL wheel bundles its own EFA libraries", own[0])
    return passed("one source of libfabric packages", ", ".join(from_aws or vanilla))


def _wheel_folders(facts: Facts) -> list[str]:
    try:
        folders = facts.site_packages
    except UnavailableError:
        return []
    return [f"{f}/{name}" for f in folders for name in _names(facts, f) if re.fullmatch(r"nixl\w*\.libs", name)]


def _names(facts: Facts, folder: str) -> tuple[str, ...]:
    found = facts.host.listdir(folder)
    return () if isinstance(found, Gap) else found


@check(
    "NX-21",
    "The loader looks at EFA's libraries first",
    evidence="environment of the engines: LD_LIBRARY_PATH",
    rule="WARN if /opt/amazon/efa is named after another folder that has libfabric or CUDA's compat folder",
    fix="LD_LIBRARY_PATH=/opt/amazon/efa/lib:$LD_LIBRARY_PATH (lib64 on Amazon Linux)",
    sources=("EC2-CHG",),
    applies=(conditions.efa,),
)
def loader_order(facts: Facts) -> Finding:
    """The first folder with a libfabric.so.1 wins."""
    for owner, env in facts.environments.items():
        folders = [folder for folder in env.get("LD_LIBRARY_PATH", "").split(":") if folder]
        place = next((number for number, folder in enumerate(folders) if "/opt/amazon/efa" in folder), None)
        before = [f for f in folders[:place] if re.search(r"/compat\b|^/usr/lib|^/lib", f)]
        if place and before:
            shown = f"LD_LIBRARY_PATH={env['LD_LIBRARY_PATH']}"
            return warned(f"{owner} looks at {before[0]} before EFA's libraries", shown)
    return passed("nothing stands before EFA's libraries")


@check(
    "NX-22",
    "No limit on rails for host memory",
    evidence="environment of the engines: NIXL_LIBFABRIC_MAX_BW_PER_DRAM_SEG",
    rule="informational: PASS with a note where it is set",
    fix="Unset it",
    sources=("NIXL-README",),
    applies=(conditions.libfabric_backend,),
)
def dram_limit(facts: Facts) -> Finding:
    """It limits the rails of host memory only (in Gbit/s), device memory is not touched."""
    for owner, env in facts.environments.items():
        limit = env.get("NIXL_LIBFABRIC_MAX_BW_PER_DRAM_SEG")
        if limit is not None:
            return passed(f"note: {owner} limits host memory to {limit} Gbit/s a segment")
    return passed("no limit")


@check(
    "NX-23",
    "nixlbench reached what the instance type carries",
    evidence="nixlbench in a snapshot's commands, and the instance type; nixlbench is never run",
    rule=(
        "one pair's B/W against the EFAs near one accelerator, as kvops probe judges it: WARN below 60 %, FAIL below "
        "1.3 GB/s; its own 'Network Util (%)' is of 50 GB/s a pair on every type and is not looked at"
    ),
    fix="Look at what keeps NIXL from EFA (NX-05, NX-06, GDR-02); take kvops probe to measure again",
    sources=("NIXLBENCH",),
    applies=(conditions.efa,),
    explained_by=("NX-05", "NX-06", "GDR-02", "LF-01"),
)
def benchmark(facts: Facts) -> Finding:
    """A percentage of a constant makes p5 look slow, and a p5en with half its rails look well."""
    runs = [argv for argv in facts.host.captured_commands() if argv[0] == "nixlbench"]
    if not runs:
        return skipped("the capture has no output of nixlbench")
    from kvops.doctor.probe.verdict import pair_threshold  # noqa: PLC0415

    measured = facts.parsed(runs[0], nixlbench.parse_nixlbench)
    backend = "LIBFABRIC" if "LIBFABRIC" in runs[0] else "UCX"
    threshold = pair_threshold(facts.instance_type, backend, "vram" if "VRAM" in runs[0] else "dram")
    if threshold is None:
        return unknown("what this instance type carries is not published")
    percentage = measured.network_util_percent
    said = "" if percentage is None else f"; its Network Util of {percentage:.1f} % is of 50 GB/s"
    evidence = f"B/W {measured.gb_per_second:.1f} GB/s of {threshold.line:g} ({backend}){said}"
    if measured.gb_per_second < threshold.fails:
        return failed("nixlbench is slower than this instance can be", evidence)
    if measured.gb_per_second < threshold.passes:
        return warned("nixlbench is slower than to be expected", evidence)
    return passed("nixlbench is as fast as to be expected", evidence)


CHECKS = (
    package,
    plugin_present,
    plugin_libraries,
    plugin_api,
    backend,
    provider_in_use,
    rails,
    topology,
    runtime,
    variables,
    debug_logging,
    backend_mapped,
    one_source,
    loader_order,
    dram_limit,
    benchmark,
)
