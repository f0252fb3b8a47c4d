"""Where the pieces of the KV cache lie: the descriptor lists that vLLM gives to NIXL.

vLLM registers one region per layer for K and one for V, and posts one descriptor per block and region; the same block
ids are used in every region (nixl/base_worker.py of vLLM, ``_build_fa_local``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The shape of Qwen3-32B in bf16 without tensor parallelism, with vLLM's default block size on GPUs.
TOKENS_PER_BLOCK = 16
KV_HEADS = 8
HEAD_DIM = 128
ELEMENT_BYTES = 2
LAYERS = 64

BLOCK_BYTES = TOKENS_PER_BLOCK * KV_HEADS * HEAD_DIM * ELEMENT_BYTES
REGIONS = 2 * LAYERS
# One block in every region: sizes are multiples of this, so that every pattern covers the buffer to its last byte.
UNIT_BYTES = REGIONS * BLOCK_BYTES


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

    ``blocks``: block ids without any order, as in a pool that has served for a while; nothing can be merged.
    ``merged``: consecutive block ids, as in a fresh pool; NIXL joins each region's blocks into one descriptor.
    ``buffer``: one descriptor over everything; what the wire can do.

    Args:
        size_bytes: how much each pattern moves, a multiple of ``UNIT_BYTES``.
        seed: of the block ids.
    """
    blocks = size_bytes // UNIT_BYTES
    consecutive = np.arange(blocks, dtype=np.int64)
    scattered = np.random.Generator(np.random.PCG64(seed)).permutation(consecutive)
    return [
        Pattern("blocks", Layout(BLOCK_BYTES, _same_ids_in_every_region(scattered))),
        Pattern("merged", Layout(BLOCK_BYTES, _same_ids_in_every_region(consecutive))),
        Pattern("buffer", Layout(size_bytes, np.zeros(1, dtype=np.int64))),
    ]


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
