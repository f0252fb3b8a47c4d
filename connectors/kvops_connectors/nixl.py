"""vLLM's NIXL connectors under their own names, so that vLLM's checks on the connector's name keep working."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector, NixlPullConnector, NixlPushConnector

__all__ = ["NixlConnector", "NixlPullConnector", "NixlPushConnector"]
