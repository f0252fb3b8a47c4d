"""For each group of checks: edits of a healthy host that must be noticed, and the evidence each check cannot do without."""

from __future__ import annotations

from doctor_tables import efa, gpudirect, host, kubernetes, libfabric, nccl, network, neuron, nixl, ucx, vllm

TABLES = (host, efa, libfabric, gpudirect, neuron, nixl, ucx, nccl, vllm, network, kubernetes)
CASES = tuple(case for table in TABLES for case in table.CASES)
GONE = {check_id: prefixes for table in TABLES for check_id, prefixes in table.GONE.items()}
