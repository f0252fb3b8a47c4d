"""Every check, in the order of the stack. The tuples are explicit: importing a module registers nothing."""

from __future__ import annotations

from kvops.doctor.checks import efa, gpudirect, host, kubernetes, libfabric, nccl, network, neuron, nixl, ucx, vllm

CHECKS = (
    *host.CHECKS,
    *efa.CHECKS,
    *libfabric.CHECKS,
    *gpudirect.CHECKS,
    *neuron.CHECKS,
    *nixl.CHECKS,
    *ucx.CHECKS,
    *nccl.CHECKS,
    *vllm.CHECKS,
    *network.CHECKS,
    *kubernetes.CHECKS,
)
