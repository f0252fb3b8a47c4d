"""Settings of the connectors, from ``kv_connector_extra_config: {"kvops": {...}}`` or the environment.

An environment variable is the name of the setting in capitals with ``KVOPS_`` in front; the extra config wins. A bad
value is reported in the log and replaced by the default: a typo in an instrument's setting must not keep an engine
down.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvops_connectors.catalogue import PEER_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger("vllm.kvops")


@dataclass(frozen=True)
class Settings:
    """What can be set.

    Attributes:
        engine_name: name of the engine in the journal; empty means ``host:port`` of its side channel.
        role: prefill, decode or both; empty means as ``kv_role`` says.
        journal_dir: folder of the journal; empty means no journal.
        journal_max_bytes: size at which a journal file is rotated, in bytes.
        journal_files: rotated files that are kept besides the current one.
        journal_queue: records that may wait for the writer before some are dropped.
        peer_limit: peers with a label of their own; the rest count as ``other``.
        token_truth: put digests into decode's handles, and use only the part of a handle that matches the prompt.
        expired_readback: a readback that cannot work ends in recompute.
        single_load: never offer a second load to a request that had its one.
        valid_handle: drop a malformed handle before it reaches vLLM.
        push_timeout: give up a push registration after ``push_registration_timeout``.
        push_retry: begin a write again whose handshake with decode has failed.
        reconnect: shake hands again with a peer whose connection has ended.
        cpu_affinity: leave a CPU engine unpinned where it asks for that.
        push_cancel_grace_seconds: time between telling prefill to forget a registration and giving up its blocks.
        nixl_progress_delay_microseconds: longest sleep of NIXL's progress thread; 0 leaves it busy, as NIXL does.
    """

    engine_name: str = ""
    role: str = ""
    journal_dir: str = ""
    journal_max_bytes: int = 64 * 2**20
    journal_files: int = 8
    journal_queue: int = 10_000
    peer_limit: int = PEER_LIMIT
    token_truth: bool = True
    expired_readback: bool = True
    single_load: bool = True
    valid_handle: bool = True
    push_timeout: bool = True
    push_retry: bool = True
    reconnect: bool = True
    cpu_affinity: bool = True
    push_cancel_grace_seconds: float = 2.0
    nixl_progress_delay_microseconds: int = 0

    @property
    def mends(self) -> tuple[str, ...]:
        """Return the names of the mends that are switched on."""
        return tuple(field.name for field in fields(self) if field.default is True and getattr(self, field.name))


ROLES = ("", "prefill", "decode", "both")
_LEAST: dict[str, float] = {
    "journal_max_bytes": 1024,
    "journal_files": 0,
    "journal_queue": 1,
    "peer_limit": 0,
    "push_cancel_grace_seconds": 0,
    "nixl_progress_delay_microseconds": 0,
}


def load(extra_config: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of one connector; never raises.

    Args:
        extra_config: vLLM's ``kv_connector_extra_config``.
        environment: the process's environment.
    """
    given = extra_config.get("kvops") or {}
    if not isinstance(given, dict):
        logger.warning("kvops: kv_connector_extra_config['kvops'] is %r, not an object; ignored", given)
        given = {}
    values: dict[str, Any] = {}
    for field in fields(Settings):
        value = given.get(field.name, environment.get(f"KVOPS_{field.name.upper()}"))
        if value is not None:
            _take(values, field.name, value)
    for name in sorted(set(given) - {field.name for field in fields(Settings)}):
        logger.warning("kvops: unknown setting %r in kv_connector_extra_config['kvops']; ignored", name)
    return Settings(**values)


def _take(values: dict[str, Any], name: str, value: Any) -> None:
    default = getattr(Settings, name)
    try:
        values[name] = _within(name, _PARSERS[type(default)](value))
    except (TypeError, ValueError) as error:
        logger.warning("kvops: setting %s=%r is not usable (%s); using %r", name, value, error, default)


def _within(name: str, value: Any) -> Any:
    if name in _LEAST and not value >= _LEAST[name]:
        raise ValueError(f"must be at least {_LEAST[name]}")
    if name == "role" and value not in ROLES:
        raise ValueError("must be prefill, decode or both")
    return value


def _switch(value: Any) -> bool:
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError("must be on or off")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("must be text")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool | float):
        raise TypeError("must be a whole number")
    return int(value)


_PARSERS: dict[type, Callable[[Any], Any]] = {bool: _switch, str: _text, int: _whole, float: float}
