"""A NIXL agent that is set up and used the way vLLM does it, with a clock beside it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvops.doctor.probe.patterns import descriptors
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvops.doctor.probe.memory import Buffer
    from kvops.doctor.probe.messages import Ready
    from kvops.doctor.probe.patterns import Pattern

# vLLM's default for UCX (num_threads in nixl/base_worker.py); other backends get none.
_UCX_THREADS = 4
_LOOK_AT_PEER_SECONDS = 0.05

Operation = Literal["READ", "WRITE"]


class TransferError(Exception):
    """NIXL reported that a transfer failed."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One transfer. ``wire_descriptors`` is None where NIXL gave no telemetry."""

    prepare_seconds: float
    post_seconds: float
    total_seconds: float
    wire_descriptors: int | None


class ProbeAgent:
    """One NIXL agent with one registered buffer.

    Args:
        backend: the name of the NIXL backend.
        buffer: what to register; it must outlive the agent.

    Raises:
        KvopsError: NIXL, or this backend of it, cannot be loaded.
    """

    def __init__(self, backend: str, buffer: Buffer) -> None:
        api = _import_nixl()
        threads = _UCX_THREADS if backend == "UCX" else 0
        config = api.nixl_agent_config(backends=[], capture_telemetry=True)
        self._nixl = api.nixl_agent(f"kvops-probe-{uuid.uuid4()}", config)
        self.plugins = sorted(self._nixl.get_plugin_list())
        self.backend = backend
        self._create_backend({"num_threads": str(threads)} if threads else {})
        self._buffer = buffer
        try:
            self._registered = self._nixl.register_memory(
                [(buffer.address, buffer.size_bytes, buffer.device, "")], buffer.segment, [backend]
            )
        except Exception as error:
            raise KvopsError(
                f"{backend} cannot register {buffer.name}: {describe(error)}",
                "check the memlock limit, and GPUDirect for vram: kvops doctor --only gpudirect",
            ) from error

    @property
    def metadata(self) -> bytes:
        """Return what the other agent needs to reach this one's buffer."""
        data: bytes = self._nixl.get_agent_metadata()
        return data

    def connect(self, peer: Ready) -> str:
        """Load the peer's metadata and return its agent name.

        Raises:
            KvopsError: the two agents have nothing in common.
        """
        try:
            name = self._nixl.add_remote_agent(peer.metadata)
        except Exception as error:
            raise KvopsError(
                f"NIXL cannot use the peer's metadata: {describe(error)}",
                "give both sides the same NIXL version and --backend",
            ) from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def mover(
        self, peer: Ready, peer_name: str, pattern: Pattern, keep_going: Callable[[], None]
    ) -> Callable[[Operation], Timing]:
        """Return a function that moves one pattern once, READ from the peer or WRITE to it.

        Args:
            peer: where the peer's buffer is.
            peer_name: what ``connect`` returned.
            pattern: the descriptors of both sides, prepared here once as vLLM does at its handshake.
            keep_going: called while the transfer runs; raises what ends it.
        """
        buffer, nixl = self._buffer, self._nixl
        count = len(pattern.layout.order)
        in_order = type(pattern.layout)(pattern.layout.piece_bytes, np.arange(count, dtype=np.int64))
        here = descriptors(buffer.address, buffer.device, pattern.layout)
        there = descriptors(int(peer.address, 16), peer.device, in_order)
        local = nixl.prep_xfer_dlist("NIXL_INIT_AGENT", here, buffer.segment, [self.backend])
        remote = nixl.prep_xfer_dlist(peer_name, there, buffer.segment, [self.backend])
        every = np.arange(count, dtype=np.int32)

        def move(operation: Operation) -> Timing:
            start = time.perf_counter()
            handle = nixl.make_prepped_xfer(operation, local, every, remote, every, b"", [self.backend])
            prepared = time.perf_counter()
            try:
                return self._transfer(handle, prepared - start, keep_going)
            finally:
                nixl.release_xfer_handle(handle)

        return move

    def close(self) -> None:
        """Give the registration back."""
        with contextlib.suppress(Exception):
            self._nixl.deregister_memory(self._registered, [self.backend])

    def _create_backend(self, parameters: dict[str, str]) -> None:
        others = ", ".join(plugin for plugin in self.plugins if plugin in ("UCX", "LIBFABRIC", "UCCL", "MOONCAKE"))
        if self.backend not in self.plugins:
            raise KvopsError(
                f"NIXL has no plugin {self.backend} here",
                f"use --backend with one of {others}, or an image whose NIXL brings {self.backend}",
            )
        try:
            self._nixl.create_backend(self.backend, parameters)
        except Exception as error:
            raise KvopsError(
                f"NIXL's backend {self.backend} did not start: {_why_not_loaded(self.backend) or describe(error)}",
                f"install what {self.backend} needs (kvops doctor --only nixl), or choose another --backend",
            ) from error

    def _transfer(self, handle: Any, prepare_seconds: float, keep_going: Callable[[], None]) -> Timing:
        nixl = self._nixl
        start = time.perf_counter()
        state = nixl.transfer(handle)
        posted = time.perf_counter()
        look_at = posted + _LOOK_AT_PEER_SECONDS
        while state == "PROC":
            state = nixl.check_xfer_state(handle)
            if state == "PROC" and time.perf_counter() > look_at:
                keep_going()
                look_at = time.perf_counter() + _LOOK_AT_PEER_SECONDS
        ended = time.perf_counter()
        if state != "DONE":
            raise TransferError(f"NIXL reported state {state}")
        try:
            seen = nixl.get_xfer_telemetry(handle)
        except Exception:  # NIXL before 0.7.1, or built without telemetry
            return Timing(prepare_seconds, posted - start, ended - start, None)
        return Timing(prepare_seconds, seen.postDuration / 1e6, seen.xferDuration / 1e6, seen.descCount)


def describe(error: BaseException) -> str:
    """Return an exception of NIXL in a few words: its message is often only the name of a status."""
    text = str(error).strip().splitlines()
    return text[0][:160] if text else type(error).__name__


def _why_not_loaded(backend: str) -> str:
    """Return the loader's own words about a plugin it cannot load, naming the library that is missing.

    NIXL keeps them to itself. An empty string where the plugin loads, or is not where NIXL's wheels have it.
    """
    import nixl  # noqa: PLC0415

    package = Path(getattr(nixl, "_pkg", nixl).__file__ or "").parent
    folders = [os.environ.get("NIXL_PLUGIN_DIR", ""), str(package.parent / f".{package.name}.mesonpy.libs/plugins")]
    for folder in filter(None, folders):
        plugin = Path(folder) / f"libplugin_{backend}.so"
        if plugin.exists():
            try:
                ctypes.CDLL(str(plugin))
            except OSError as error:
                return describe(error)
    return ""


def nixl_version() -> str:
    """Return the version of the installed NIXL, or an empty string."""
    for name in ("nixl", "nixl-cu13", "nixl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def _import_nixl() -> Any:
    try:
        from nixl import _api  # noqa: PLC0415
    except ImportError as error:
        raise KvopsError(
            f"NIXL cannot be imported: {describe(error)}", "pip install nixl, or run the probe in the engines' image"
        ) from error
    return _api
