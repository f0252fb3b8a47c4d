"""The cores that a CPU engine's worker may run on.

vLLM's NIXL worker pins its main thread to the last core of each NUMA node on CPU, also where
``VLLM_CPU_OMP_THREADS_BIND=nobind`` asks for no pinning (``NixlBaseConnectorWorker.__init__``, vLLM 0.32). All engines
of a machine then share one core, on which the idle loop of one leaves the others next to nothing.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def kept_affinity(wanted: bool) -> Iterator[None]:
    """Give this thread back the cores that it had before the block, if wanted and the engine asks for no pinning."""
    if not wanted or os.environ.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind" or not hasattr(os, "sched_getaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
