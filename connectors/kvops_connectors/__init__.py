"""Instrumented NIXL connectors for vLLM, chosen with ``kv_connector_module_path: kvops_connectors``.

Importing the package touches neither vLLM nor kvops: it must load from a plain ``PYTHONPATH`` inside any vLLM image,
and the metric catalogue must be readable where no vLLM is installed. The connector classes appear on first use.
"""

from __future__ import annotations

from typing import Any

CONNECTORS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")


def __getattr__(name: str) -> Any:
    """Return a connector class; vLLM's factory looks them up by name.

    Raises:
        AttributeError: the name is none of ``CONNECTORS``.
    """
    if name not in CONNECTORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvops_connectors import nixl  # noqa: PLC0415

    return getattr(nixl, name)
