"""Every check, in the order of the stack. The tuples are explicit: importing a module registers nothing."""

from __future__ import annotations

from kvops.doctor.checks import efa, gpudirect, host, libfabric

CHECKS = (*host.CHECKS, *efa.CHECKS, *libfabric.CHECKS, *gpudirect.CHECKS)
