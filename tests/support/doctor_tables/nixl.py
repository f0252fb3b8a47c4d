"""What must be noticed about NIXL."""

from __future__ import annotations

from doctor_cases import FAIL, NIXLBENCH, PASS, SKIP, UNKNOWN, WARN, Case, Scene, add_nixlbench, alone, set_config
from doctor_hosts import LOG, SITE, WORKER_PID, rpm

RPM = ("rpm", "-qa", "--qf", "%{NAME}\t%{VERSION}-%{RELEASE}\n")
PLUGINS = f"{SITE}/.nixl_cu12.mesonpy.libs/plugins"
LDD = f"ldd {PLUGINS}/libplugin_LIBFABRIC.so"


def say(line: str):
    return lambda scene: scene.host.log(line + "\n")


def swap_package(old: str, new: str):
    return lambda s: s.host.listings[SITE].__setitem__(s.host.listings[SITE].index(old), new)


def use_ucx_by_default(scene: Scene) -> None:
    set_config(scene.host, backends=None)


def use_ucx_without_efa(scene: Scene) -> None:
    use_ucx_by_default(scene)
    scene.host.listing(f"{SITE}/nixl_cu12.libs/ucx", "libuct_ib.so.0.0.0", "libuct_cma.so.0.0.0")


def before_it_is_loaded(ldd: str):
    """What ldd says of the plugin while no engine has it mapped."""
    return lambda s: s.host.file("/proc/4311/maps", "\n").command(LDD, ldd)


CASES = (
    Case("NX-01", FAIL, "not installed", lambda s: s.host.listing(SITE, "torch-2.9.0+cu128.dist-info")),
    Case(
        "NX-01",
        WARN,
        "nixl-cu13 1.4.0",
        lambda s: s.host.listings[SITE].append("nixl_cu13-1.4.0.dist-info"),
    ),
    Case("NX-01", FAIL, "CUDA 13", swap_package("torch-2.9.0+cu128.dist-info", "torch-2.9.0+cu130.dist-info")),
    Case("NX-02", FAIL, "plugins: UCX", lambda s: s.host.listing(PLUGINS, "libplugin_UCX.so")),
    Case("NX-03", FAIL, "libhwloc.so.15", before_it_is_loaded("\tlibhwloc.so.15 => not found\n")),
    Case("NX-03", PASS, "finds its libraries", before_it_is_loaded("\tlibcudart.so.12 => not found\n")),
    Case("NX-03", PASS, "finds its libraries", lambda s: s.host.command(LDD, "\tlibhwloc.so.15 => not found\n")),
    Case(
        "NX-03",
        WARN,
        "/lib64/libfabric.so.1",
        before_it_is_loaded("\tlibfabric.so.1 => /lib64/libfabric.so.1 (0x0)\n"),
    ),
    Case(
        "NX-04",
        FAIL,
        "API version",
        say("E nixl_plugin_manager.cpp:77] Plugin API version mismatch for x: expected 2, got 1"),
    ),
    Case("NX-05", WARN, "UCX by default on a host with 16 EFA devices", use_ucx_by_default),
    Case("NX-05", FAIL, "UCX by default", use_ucx_without_efa),
    Case("NX-06", FAIL, "over TCP", say("I1101 libfabric_common.cpp:145] Discovered 1 tcp devices (TCP fallback)")),
    Case("NX-06", FAIL, "over TCP", say("I1101 libfabric_rail_manager.cpp:44] Created 1 rails using provider=tcp")),
    Case("NX-06", UNKNOWN, "NIXL_LOG_LEVEL=INFO", say("I1101 Backend LIBFABRIC was instantiated")),
    Case(
        "NX-07", FAIL, "different numbers", say("W libfabric_backend.cpp:9] Rail count mismatch (local: 16, remote: 1)")
    ),
    Case(
        "NX-07", WARN, "different numbers", say("W libfabric_backend.cpp:9] Rail count mismatch (local: 16, remote: 8)")
    ),
    Case("NX-08", WARN, "near which", say("W Using fallback: all accelerators will use all available EFA devices")),
    Case("NX-09", FAIL, "no accelerator", say("I libfabric_topology.cpp:60] System runtime: SYSTEM (no accelerators)")),
    Case("NX-14", WARN, "NIXL_LOG_LEVEL", lambda s: s.host.env(NIXL_LOGGING_LEVEL="INFO")),
    Case("NX-14", PASS, "known", lambda s: s.host.env(NIXL_TELEMETRY_ENABLE="1", NIXL_LOG_LEVEL="INFO")),
    Case("NX-15", WARN, "NIXL_LOG_LEVEL=TRACE", lambda s: s.host.env(NIXL_LOG_LEVEL="TRACE")),
    Case(
        "NX-16",
        FAIL,
        "loaded: UCX",
        lambda s: s.host.file(f"/proc/{WORKER_PID}/maps", "0-1 r-xp 00 0:0 0 /x/libplugin_UCX.so\n"),
    ),
    Case(
        "NX-20",
        WARN,
        "libfabric-7f3a.so",
        lambda s: s.host.listing(f"{SITE}/nixl_cu12.libs", "ucx", "libibverbs-1de1.so.1", "libfabric-7f3a.so.1.30.0"),
    ),
    Case(
        "NX-20",
        WARN,
        "libfabric1 stands beside",
        lambda s: s.host.commands.update({RPM: (rpm({"libfabric1": "1.17", "libfabric-aws": "2.6"}), "", 0)}),
    ),
    Case(
        "NX-21",
        WARN,
        "/usr/local/cuda/compat",
        lambda s: s.host.env(LD_LIBRARY_PATH="/usr/local/cuda/compat:/opt/amazon/efa/lib"),
    ),
    Case("NX-23", WARN, "Network Util of 90.2 % is of 50 GB/s", lambda s: add_nixlbench(s.host, 45.1)),
    Case("NX-23", FAIL, "slower than this instance", lambda s: add_nixlbench(s.host, 0.3)),
    Case("NX-23", UNKNOWN, "no column", lambda s: s.host.command(NIXLBENCH, "Segmentation fault\n")),
    Case("NX-23", SKIP, "no output of nixlbench", lambda s: None, alone),
    Case("NX-22", PASS, "note", lambda s: s.host.env(NIXL_LIBFABRIC_MAX_BW_PER_DRAM_SEG="50")),
    Case("NX-05", PASS, "LIBFABRIC", lambda s: None, alone),
)

ENVIRON = ("/proc/4242/environ",)
GONE = {
    "NX-01": (SITE, "/proc/4242/maps"),
    "NX-02": (PLUGINS,),
    "NX-03": ("ldd", "/proc/4311/maps"),
    "NX-04": (LOG,),
    "NX-05": ("/sys/bus/pci", "/sys/devices/virtual/dmi", "lspci"),
    "NX-06": (LOG,),
    "NX-07": (LOG,),
    "NX-08": (LOG,),
    "NX-09": (LOG,),
    "NX-14": ENVIRON,
    "NX-15": ENVIRON,
    "NX-16": ("/proc/4242/maps", "/proc/4311/maps"),
    "NX-20": ("rpm",),
    "NX-21": ENVIRON,
    "NX-22": ENVIRON,
    "NX-23": ("/sys/devices/virtual/dmi",),
}
