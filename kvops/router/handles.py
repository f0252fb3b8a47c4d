"""KV handles: what an engine says about blocks that it keeps for another one, checked before it is passed on.

A handle travels as vLLM's ``kv_transfer_params``. vLLM validates nothing of it: one missing key ends the engine core or
leaves the request waiting for ever, so a handle that is not whole never leaves the router.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Any

import msgspec

from kvops.router.bodies import is_null

Params = dict[str, msgspec.Raw]

# The one key that kvops adds: from an engine digests and lifetime of the blocks, from the router who is asking.
_KVOPS = "kvops"
_encode = msgspec.json.Encoder().encode
_TRUE, _FALSE = msgspec.Raw(b"true"), msgspec.Raw(b"false")
# Asks P to keep the finished prompt's KV and to say where it lies.
_KEEP_FOR_DECODE: Params = {
    "do_remote_decode": _TRUE,
    "do_remote_prefill": _FALSE,
    "remote_engine_id": msgspec.Raw(b"null"),
    "remote_block_ids": msgspec.Raw(b"null"),
    "remote_host": msgspec.Raw(b"null"),
    "remote_port": msgspec.Raw(b"null"),
}


class HandleError(ValueError):
    """What an engine returned as KV handle cannot be used; the text says what is wrong with it."""


class Context(msgspec.Struct, frozen=True):
    """What the engines' journals should know of a request; goes along in every ``kv_transfer_params``."""

    router_id: str
    attempt: int
    conversation: str | None = None
    turn: int | None = None


class Identity(msgspec.Struct, frozen=True):
    """Where the NIXL side of an engine lives, which push needs before the engine has answered."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    pp_size: int = 1


class Fields(msgspec.Struct, frozen=True):
    """The fields of a handle that its reader cannot do without, and those that the router looks at."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    remote_block_ids: list[list[int]]
    pp_size: int = 1
    remote_num_tokens: int = 0
    transfer_mode: str | None = None
    kvops: Params | None = None


class Handle:
    """Blocks that one engine holds, whole and ready to be given to a reader once."""

    def __init__(self, params: Params, fields: Fields) -> None:
        """Keep the raw dict and its decoded fields."""
        self.params = params
        self.fields = fields

    def encoded(self) -> bytes:
        """Return its JSON, from which ``read`` makes it again."""
        return _encode(self.params)

    @property
    def identity(self) -> Identity:
        """Return the identity of the engine that holds the blocks."""
        fields = self.fields
        return Identity(fields.remote_engine_id, fields.remote_host, fields.remote_port, fields.tp_size, fields.pp_size)

    @property
    def has_digests(self) -> bool:
        """Return whether its reader can tell how many of the tokens are those of its own prompt."""
        return "prefix" in (self.fields.kvops or {})

    @property
    def ttl_seconds(self) -> float | None:
        """Return how long the holder keeps the blocks, None where it does not say."""
        raw = (self.fields.kvops or {}).get("ttl_seconds")
        value: Any = None if raw is None else msgspec.json.decode(raw)
        return float(value) if isinstance(value, int | float) else None


def read(raw: msgspec.Raw | None, engine_host: str) -> Handle:
    """Return the handle in an engine's answer.

    Args:
        raw: the answer's ``kv_transfer_params``.
        engine_host: host of the engine's URL; it replaces an address at which only the engine itself can be reached.

    Raises:
        HandleError: there is none, or it is not whole.
    """
    if raw is None or is_null(raw):
        raise HandleError("it returned no kv_transfer_params; does it run with a NIXL connector?")
    try:
        params = msgspec.json.decode(raw, type=Params)
        fields = msgspec.json.decode(raw, type=Fields)
    except msgspec.DecodeError as error:
        raise HandleError(f"its handle is malformed: {error}") from None
    if not any(fields.remote_block_ids):
        raise HandleError("its handle names no KV blocks")
    if not (fields.remote_engine_id and fields.remote_request_id and 0 < fields.remote_port < 65536):
        raise HandleError("its handle has an empty engine id or request id, or an impossible port")
    if fields.tp_size < 1 or fields.pp_size < 1:
        raise HandleError("its handle names a parallel size below 1")
    if (host := _reachable(fields.remote_host, engine_host)) != fields.remote_host:
        params = params | {"remote_host": msgspec.Raw(_encode(host))}
        fields = msgspec.structs.replace(fields, remote_host=host)
    return Handle(params, fields)


def for_prefill(context: Context) -> msgspec.Raw:
    """Return the params that make P keep the prompt's KV."""
    return _raw(_KEEP_FOR_DECODE, context)


def for_readback(handle: Handle, context: Context) -> msgspec.Raw:
    """Return the params that make P read D's blocks, compute the rest, and keep it all for D."""
    return _raw(handle.params | {"do_remote_decode": _TRUE, "do_remote_prefill": _FALSE}, context)


def for_decode(handle: Handle, context: Context, prompt_token_ids: msgspec.Raw | None = None) -> msgspec.Raw:
    """Return the params that make D read P's blocks.

    Args:
        handle: P's.
        context: who asks.
        prompt_token_ids: the prompt as P tokenized it, so that D need not do it again.
    """
    params = handle.params | {"do_remote_decode": _FALSE, "do_remote_prefill": _TRUE}
    if prompt_token_ids is not None:
        params["prompt_token_ids"] = prompt_token_ids
    return _raw(params, context)


def for_release(handle: Handle, context: Context) -> msgspec.Raw:
    """Return the params with which an engine that rejects the request tells the holder to free its blocks."""
    return for_decode(handle, context)


def for_push_prefill(transfer_id: str, context: Context) -> msgspec.Raw:
    """Return P's params in push mode."""
    return _raw(_KEEP_FOR_DECODE | {"transfer_id": msgspec.Raw(_encode(transfer_id))}, context)


def for_push_decode(identity: Identity, transfer_id: str, context: Context) -> msgspec.Raw:
    """Return the params that make D register its blocks with P and wait for P to write them.

    vLLM 0.32 pairs the legs by request id, later versions by ``transfer_id``; each ignores what it does not know.
    There are no block ids: those would make a pull connector read.
    """
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": identity.engine_id,
        "remote_request_id": transfer_id,
        "remote_host": identity.host,
        "remote_port": identity.port,
        "tp_size": identity.tp_size,
        "pp_size": identity.pp_size,
        "transfer_id": transfer_id,
    }
    return _raw({key: msgspec.Raw(_encode(value)) for key, value in params.items()}, context)


def _raw(params: Params, context: Context) -> msgspec.Raw:
    ours = {key: value for key, value in msgspec.structs.asdict(context).items() if value is not None}
    theirs = msgspec.json.decode(params[_KVOPS], type=Params) if _KVOPS in params else {}
    return msgspec.Raw(_encode(params | {_KVOPS: theirs | ours}))


def _reachable(advertised: str, engine_host: str) -> str:
    """Return ``engine_host`` for an address that means "myself", unless the engine is on the router's own machine."""
    return engine_host if _means_self(advertised) and not _means_self(engine_host) else advertised


@lru_cache(maxsize=4096)
def _means_self(host: str) -> bool:
    if host in ("localhost", ""):
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
