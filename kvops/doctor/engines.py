"""vLLM engines as the doctor sees them: what a process was started with."""

from __future__ import annotations

import json
import posixpath
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvops.doctor.parsers import whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvops.doctor.facts import Facts

SIDE_CHANNEL_PORT = 5600
SHORT_OPTIONS = {"--tensor-parallel-size": "-tp", "--data-parallel-size": "-dp", "--pipeline-parallel-size": "-pp"}


@dataclass(frozen=True)
class Engine:
    """One vLLM server: its name for messages, command line and environment; ``pid`` is None for one that is planned."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    pid: int | None = None
    home: Facts | None = field(default=None, compare=False, repr=False)

    def option(self, name: str, default: str = "") -> str:
        """Return the value of a command-line option in any of its spellings; the default when it is not given.

        Of several values the last one counts, as for vLLM's own parser.
        """
        spellings = {name, name.replace("-", "_").replace("__", "--", 1), SHORT_OPTIONS.get(name, name)}
        given = [place for place, word in enumerate(self.argv) if word.partition("=")[0] in spellings]
        if not given:
            return default
        _, equals, value = self.argv[given[-1]].partition("=")
        if equals:
            return value
        following = self.argv[given[-1] + 1 : given[-1] + 2]
        return following[0] if following and not following[0].startswith("--") else "true"

    @cached_property
    def model(self) -> str:
        """Return the model's name or path as it was given."""
        if "serve" in self.argv[:-1]:
            following = self.argv[self.argv.index("serve") + 1]
            if not following.startswith("-"):
                return following
        return self.option("--model")

    @property
    def served_name(self) -> str:
        """Return the name under which the model is served."""
        return self.option("--served-model-name") or self.model

    @cached_property
    def kv_config(self) -> dict[str, Any] | None:
        """Return the parsed ``--kv-transfer-config``; None when there is none, empty when it is not JSON."""
        text = self.option("--kv-transfer-config")
        if not text:
            return None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    @cached_property
    def extra_config(self) -> dict[str, Any]:
        """Return ``kv_connector_extra_config``, empty when there is none."""
        extra = (self.kv_config or {}).get("kv_connector_extra_config")
        return extra if isinstance(extra, dict) else {}

    @property
    def backends(self) -> tuple[str, ...]:
        """Return the NIXL backends in use; vLLM's default is UCX."""
        backends = self.extra_config.get("backends")
        return tuple(map(str, backends)) if isinstance(backends, list) and backends else ("UCX",)

    @property
    def side_channel_host(self) -> str:
        """Return the address that peers are told; vLLM's default is localhost."""
        return self.env.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost")

    @property
    def side_channel_port(self) -> int:
        """Return the base port of the side channel, 0 when it is not a number."""
        text = self.env.get("VLLM_NIXL_SIDE_CHANNEL_PORT", str(SIDE_CHANNEL_PORT))
        return whole_number(text) or 0

    def number(self, name: str, default: int = 1) -> int:
        """Return an integer option, the default when it is not given or not a number."""
        value = whole_number(self.option(name))
        return default if value is None else value

    @property
    def tensor_parallel(self) -> int:
        """Return the tensor-parallel size."""
        return self.number("--tensor-parallel-size")


def is_engine(argv: tuple[str, ...]) -> bool:
    """Tell whether a command line starts a vLLM server."""
    if any(word.startswith("vllm.entrypoints") for word in argv[:6]):
        return True
    names = [posixpath.basename(word) for word in argv[:4]]
    return any(names[place : place + 2] == ["vllm", "serve"] for place in range(len(names) - 1))


def is_worker(argv: tuple[str, ...]) -> bool:
    """Tell whether a process title is one that vLLM gives its engine core and workers."""
    return bool(argv) and argv[0].startswith("VLLM::")


def is_fabric_manager(argv: tuple[str, ...]) -> bool:
    """Tell whether a command line is that of NVIDIA's fabric manager, which GPU operators run without systemd."""
    return bool(argv) and posixpath.basename(argv[0]) == "nv-fabricmanager"
