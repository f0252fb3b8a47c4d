"""Where the pieces of the KV cache lie: the descriptor lists that vLLM gives to NIXL.

vLLM registers one region per layer for K and one for V, and posts one descriptor per block and region; the same block
ids are used in every region (nixl/base_worker.py of vLLM, ``_build_fa_local``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvops.doctor.probe.shape import BLOCK_BYTES, REGIONS, UNIT_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the pieces of a byte stream lie in a buffer: piece i is at ``order[i] * piece_bytes``."""

    piece_bytes: int
    order: NDArray[np.int64]

    @property
    def size_bytes(self) -> int:
        """Return the length of the stream."""
        return self.piece_bytes * len(self.order)


@dataclass(frozen=True, slots=True)
class Pattern:
    """One descriptor list. On the peer, descriptor i is piece i; on the initiator it lies where ``layout`` says."""

    name: str
    layout: Layout


def in_order(size_bytes: int) -> Layout:
    """Return the layout of a buffer that holds its stream from the first byte to the last.

    Args:
        size_bytes: a multiple of ``UNIT_BYTES``.
    """
    return Layout(UNIT_BYTES, np.arange(size_bytes // UNIT_BYTES, dtype=np.int64))


def make_patterns(size_bytes: int, seed: int) -> list[Pattern]:
    """Return the three patterns that tell one cause of slowness from another.

    ``blocks``: block ids none of which follows its neighbour, as in a pool that has served for a while; nothing can
    be merged.
    ``merged``: consecutive block ids, as in a fresh pool; NIXL joins each region's blocks into one descriptor.
    ``buffer``: one descriptor over everything; what the wire can do.

    Args:
        size_bytes: how much each pattern moves, a multiple of ``UNIT_BYTES``.
        seed: of the block ids.
    """
    blocks = size_bytes // UNIT_BYTES
    consecutive = np.arange(blocks, dtype=np.int64)
    return [
        Pattern("blocks", Layout(BLOCK_BYTES, _same_ids_in_every_region(_scattered(blocks, seed)))),
        Pattern("merged", Layout(BLOCK_BYTES, _same_ids_in_every_region(consecutive))),
        Pattern("buffer", Layout(size_bytes, np.zeros(1, dtype=np.int64))),
    ]


def _scattered(blocks: int, seed: int) -> NDArray[np.int64]:
    random = np.random.Generator(np.random.PCG64(seed))
    # All odd ids, then all even ones: no id is followed by the next one but where the two halves meet.
    odd = random.permutation(np.arange(1, blocks, 2, dtype=np.int64))
    even = random.permutation(np.arange(0, blocks, 2, dtype=np.int64))
    if len(odd) and even[0] == odd[-1] + 1:
        even = np.roll(even, 1)
    return np.concatenate([odd, even])


def _same_ids_in_every_region(block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    # The regions lie the other way round than on the peer: vLLM's layers are separate allocations, so a descriptor
    # never goes on into the next region.
    first_of_region = np.arange(REGIONS, dtype=np.int64)[::-1] * len(block_ids)
    return (first_of_region[:, None] + block_ids[None, :]).ravel()


def descriptors(base_address: int, device: int, layout: Layout) -> NDArray[np.uint64]:
    """Return the (address, length, device) rows of a layout, as NIXL takes them."""
    rows = np.empty((len(layout.order), 3), dtype=np.uint64)
    rows[:, 0] = np.uint64(base_address) + layout.order.astype(np.uint64) * np.uint64(layout.piece_bytes)
    rows[:, 1] = layout.piece_bytes
    rows[:, 2] = device
    return rows
