"""The one check that is not read-only: ``kvops doctor --probe`` moves bytes between two NIXL agents of this host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvops.doctor.check import failed, in_group, passed, skipped, unknown, warned
from kvops.doctor.host import LiveHost
from kvops.doctor.sources import HOUSE_RULE
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from kvops.doctor.check import Finding
    from kvops.doctor.facts import Facts

PROBE_BYTES = 64 << 20
PROBE_REPEAT = 3
PROBE_TIMEOUT_SECONDS = 120.0

check = in_group("probe")


@check(
    "PROBE-01",
    "Bytes move between two NIXL agents of this host",
    evidence="64 MiB read and written three times, every byte checked, over the backend that the engines use",
    rule="the verdict of kvops probe",
    fix="Run kvops probe for all of its figures; what keeps it slow or wrong is among the checks above it",
    sources=(HOUSE_RULE,),
    explained_by=("LF-01", "NX-02", "NX-03", "NX-10"),
)
def bytes_move(facts: Facts) -> Finding:
    """Everything else here is inference; this is the transfer itself."""
    if not isinstance(facts.host, LiveHost):
        return skipped("a captured machine moves no bytes")
    from kvops.doctor.probe.errors import ProbeTroubleError  # noqa: PLC0415
    from kvops.doctor.probe.run import Settings, probe_pair  # noqa: PLC0415

    libfabric = any("LIBFABRIC" in engine.backends for engine in facts.kv_engines)
    settings = Settings(
        backend="LIBFABRIC" if libfabric else "UCX",
        memory="vram" if facts.gpu_pci else "dram",
        size_bytes=PROBE_BYTES,
        repeat=PROBE_REPEAT,
        devices=(),
        timeout_seconds=PROBE_TIMEOUT_SECONDS,
    )
    try:
        report = probe_pair(settings, lambda _progress: None)
    except ProbeTroubleError as error:
        return failed(f"the probe failed: {error}")
    except KvopsError as error:
        return unknown(f"the probe could not be done: {error}")
    answer = {"PASS": passed, "WARN": warned, "FAIL": failed}[report.verdict.state]
    evidence = f"{settings.backend}, {settings.memory}, {report.evidence.route}, {report.moved_bytes} bytes checked"
    return answer(report.verdict.headline, evidence)
