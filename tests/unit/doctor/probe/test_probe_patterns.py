"""The descriptor patterns that a probe moves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvops.doctor.probe.patterns import descriptors, in_order, make_patterns
from kvops.doctor.probe.shape import BLOCK_BYTES, REGIONS, UNIT_BYTES

BLOCKS = st.integers(1, 40)
SEEDS = st.integers(0, 2**32)


@given(BLOCKS, SEEDS)
@settings(deadline=None)
def test_every_pattern_covers_every_byte_once(blocks: int, seed: int) -> None:
    size_bytes = blocks * UNIT_BYTES
    for pattern in make_patterns(size_bytes, seed):
        rows = descriptors(0, 0, pattern.layout)
        starts = np.sort(rows[:, 0].astype(np.int64))
        assert starts[0] == 0
        assert pattern.layout.size_bytes == size_bytes
        assert (np.diff(starts) == pattern.layout.piece_bytes).all()


@given(BLOCKS, SEEDS)
@settings(deadline=None)
def test_no_descriptor_of_scattered_blocks_continues_the_one_before(blocks: int, seed: int) -> None:
    scattered = make_patterns(blocks * UNIT_BYTES, seed)[0]
    assert not (np.diff(scattered.layout.order) == 1).any()


@given(BLOCKS, SEEDS)
@settings(deadline=None)
def test_merged_blocks_make_one_run_a_region(blocks: int, seed: int) -> None:
    merged = make_patterns(blocks * UNIT_BYTES, seed)[1]
    assert (np.diff(merged.layout.order) != 1).sum() + 1 == REGIONS


def test_the_same_block_ids_are_used_in_every_region() -> None:
    blocks = 8
    order = make_patterns(blocks * UNIT_BYTES, seed=3)[0].layout.order.reshape(REGIONS, blocks)
    assert (order % blocks == order[0] % blocks).all()


def test_one_block_is_what_vllm_registers_for_sixteen_tokens_of_qwen3_32b() -> None:
    assert BLOCK_BYTES == 32 * 1024
    assert UNIT_BYTES == 4 * 2**20


@pytest.mark.parametrize("base", [0x7F00_0000_0000, 2**63])
def test_descriptors_hold_addresses_above_the_signed_range(base: int) -> None:
    rows = descriptors(base, 1, in_order(2 * UNIT_BYTES))
    assert rows.tolist() == [[base, UNIT_BYTES, 1], [base + UNIT_BYTES, UNIT_BYTES, 1]]
