"""vLLM's own NIXL connectors, left unpinned and with a sleeping progress thread, but with nothing else of kvops.

For comparisons on a machine of few cores: as they are, the stock connectors pin every engine of the machine to one core
and keep it busy, which would make whatever is compared with them look good.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import nixl as stock
from vllm.distributed.nixl_utils import NixlWrapper

from kvops_connectors.affinity import kept_affinity
from kvops_connectors.progress import progress_delay
from kvops_connectors.settings import load


class Unpinned:
    """Construction under the two settings."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        delay = load({}).nixl_progress_delay_microseconds
        with progress_delay(NixlWrapper, delay), kept_affinity(wanted=True):
            super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]


class NixlPullConnector(Unpinned, stock.NixlPullConnector):  # type: ignore[misc]
    """The pull connector."""


class NixlPushConnector(Unpinned, stock.NixlPushConnector):  # type: ignore[misc]
    """The push connector."""


NixlConnector = NixlPullConnector
