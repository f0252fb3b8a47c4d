"""The buffers that are moved, and the seeded bytes in them."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvops.doctor.probe.patterns import Layout, in_order
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Ids = NDArray[np.int64]

_CHUNK_BYTES = 4 * 2**20


class Buffer(Protocol):
    """Memory that NIXL can register. ``segment`` is NIXL's name for its kind."""

    segment: str
    address: int
    device: int
    name: str
    size_bytes: int

    def put(self, ids: Ids, pieces: Bytes) -> None:
        """Store row i of ``pieces`` (count x bytes) at piece ``ids[i]``."""

    def get(self, ids: Ids, piece_bytes: int) -> Bytes:
        """Return the pieces ``ids`` as rows (count x bytes)."""

    def clear(self) -> None:
        """Set every byte to zero."""


class HostBuffer:
    """Anonymous pages of this process."""

    segment = "DRAM"
    device = 0
    name = "host memory"

    def __init__(self, size_bytes: int) -> None:
        self._pages = mmap.mmap(-1, size_bytes)
        self._bytes: Bytes = np.frombuffer(self._pages, dtype=np.uint8)
        self.size_bytes = size_bytes
        self.address = int(self._bytes.ctypes.data)

    def put(self, ids: Ids, pieces: Bytes) -> None:
        """Store row i of ``pieces`` at piece ``ids[i]``."""
        self._bytes.reshape(-1, pieces.shape[1])[ids] = pieces

    def get(self, ids: Ids, piece_bytes: int) -> Bytes:
        """Return the pieces ``ids`` as rows."""
        rows: Bytes = self._bytes.reshape(-1, piece_bytes)[ids]
        return rows

    def clear(self) -> None:
        """Set every byte to zero."""
        self._bytes[:] = 0


class DeviceBuffer:
    """Memory of an accelerator, allocated by torch.

    Args:
        size_bytes: how much.
        torch: the imported module.
        kind: torch's name of the device type, "cuda" or "neuron".
        device: the device's index.

    Raises:
        KvopsError: the memory could not be had, or has no address that NIXL could register.
    """

    segment = "VRAM"

    def __init__(self, size_bytes: int, torch: Any, kind: str, device: int) -> None:
        self._torch = torch
        self._on = f"{kind}:{device}"
        self.device = device
        self.size_bytes = size_bytes
        self._runtime = getattr(torch, kind)
        self._runtime.set_device(device)
        try:
            self._tensor = torch.zeros(size_bytes, dtype=torch.uint8, device=self._on)
        except RuntimeError as error:
            raise KvopsError(
                f"{self._on} did not give {size_bytes / 2**30:.2f} GiB: {str(error).splitlines()[0]}",
                "lower --bytes or choose another device with --devices",
            ) from error
        self.address = int(self._tensor.data_ptr())
        if not self.address:
            raise KvopsError(f"{self._on} gives its memory no address", "the probe needs a torch with eager tensors")
        get_name = getattr(self._runtime, "get_device_name", None)
        self.name = f"{get_name(device)} ({self._on})" if get_name else self._on
        self._runtime.synchronize()

    def put(self, ids: Ids, pieces: Bytes) -> None:
        """Store row i of ``pieces`` at piece ``ids[i]``."""
        rows = self._torch.from_numpy(pieces).to(self._on)
        self._tensor.view(-1, pieces.shape[1])[self._torch.from_numpy(ids).to(self._on)] = rows
        self._runtime.synchronize()

    def get(self, ids: Ids, piece_bytes: int) -> Bytes:
        """Return the pieces ``ids`` as rows."""
        rows: Bytes = self._tensor.view(-1, piece_bytes)[self._torch.from_numpy(ids).to(self._on)].cpu().numpy()
        return rows

    def clear(self) -> None:
        """Set every byte to zero."""
        self._tensor.zero_()
        self._runtime.synchronize()


def allocate(size_bytes: int, memory: str, device: int | None, preferred_device: int) -> Buffer:
    """Return a zeroed buffer.

    Args:
        size_bytes: a multiple of ``shape.UNIT_BYTES``.
        memory: "dram" or "vram".
        device: the accelerator that was asked for.
        preferred_device: the one to take if none was asked for; the last one where there are fewer.

    Raises:
        KvopsError: this host does not have that memory.
    """
    if memory == "dram":
        _refuse_what_does_not_fit(size_bytes)
        return HostBuffer(size_bytes)
    torch, kind = _accelerator()
    count = getattr(torch, kind).device_count()
    if device is None:
        device = min(preferred_device, count - 1)
    if device >= count:
        raise KvopsError(f"there is no {kind}:{device} here, only {count} {kind} device(s)", "correct --devices")
    return DeviceBuffer(size_bytes, torch, kind, device)


def _refuse_what_does_not_fit(size_bytes: int) -> None:
    import psutil  # noqa: PLC0415

    available = psutil.virtual_memory().available
    # Half of it, because the other side may be a process of the same host.
    if size_bytes > available // 2:
        raise KvopsError(
            f"{size_bytes / 2**30:.2f} GiB on each side is more than this host has free ({available / 2**30:.2f} GiB)",
            "lower --bytes",
        )


def _accelerator() -> tuple[Any, str]:
    """Return torch and its name of the accelerator here.

    Raises:
        KvopsError: there is none that torch can use.
    """
    try:
        import torch  # noqa: PLC0415
    except ImportError as error:
        raise KvopsError(f"--memory vram needs torch, which is not here ({error})", "use --memory dram") from error
    if torch.cuda.is_available():
        return torch, "cuda"
    try:
        import torch_neuronx  # type: ignore[import-not-found]  # noqa: F401, PLC0415
    except ImportError as error:
        raise KvopsError(
            f"torch {torch.__version__} sees no CUDA device, and torch_neuronx is not here", "use --memory dram"
        ) from error
    # Tensors of torch_xla have no device address; the ones of Neuron's eager device "neuron" do.
    if not hasattr(torch, "neuron"):
        raise KvopsError("this torch_neuronx has XLA tensors only, which NIXL cannot register", "use --memory dram")
    return torch, "neuron"


def fill(buffer: Buffer, seed: int, layout: Layout) -> None:
    """Write the bytes of ``seed`` into ``buffer``, its pieces where ``layout`` says."""
    for ids, pieces in _chunks(seed, layout):
        buffer.put(ids, pieces)


def check(buffer: Buffer, seed: int, layout: Layout) -> tuple[int, int]:
    """Compare ``buffer`` with the bytes of ``seed``.

    Returns:
        How many bytes differ, and the offset in the stream of the first that does (0 if none).
    """
    wrong, first, offset = 0, 0, 0
    for ids, pieces in _chunks(seed, layout):
        found = buffer.get(ids, pieces.shape[1])
        if not np.array_equal(found.view(np.uint64), pieces.view(np.uint64)):
            differing = np.flatnonzero(found != pieces)
            first = first if wrong else offset + int(differing[0])
            wrong += len(differing)
        offset += pieces.size
    return wrong, first


def _chunks(seed: int, layout: Layout) -> Iterator[tuple[Ids, Bytes]]:
    if layout.piece_bytes > _CHUNK_BYTES:
        layout = in_order(layout.size_bytes)
    # Random words: a block that landed in another block's place is as wrong as one that never came.
    words = np.random.SFC64(seed)
    step = _CHUNK_BYTES // layout.piece_bytes
    for start in range(0, len(layout.order), step):
        ids = layout.order[start : start + step]
        stream = np.asarray(words.random_raw(len(ids) * layout.piece_bytes // 8), dtype=np.uint64)
        yield ids, stream.view(np.uint8).reshape(len(ids), layout.piece_bytes)
