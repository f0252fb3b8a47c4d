"""The sizes of the KV blocks that are moved."""

from __future__ import annotations

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
