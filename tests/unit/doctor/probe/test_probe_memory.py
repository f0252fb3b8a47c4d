"""The seeded bytes of a probe, and finding the ones that are wrong."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from kvops.doctor.probe.memory import DeviceBuffer, HostBuffer, allocate, check, fill
from kvops.doctor.probe.patterns import Layout, in_order, make_patterns
from kvops.doctor.probe.shape import UNIT_BYTES
from kvops.errors import KvopsError

SIZE_BYTES = 2 * UNIT_BYTES


def torch_that_takes_the_cpu_for_cuda() -> SimpleNamespace:
    """The calls that a DeviceBuffer makes, with torch's CPU tensors under them."""
    runtime = SimpleNamespace(
        set_device=lambda device: None, synchronize=lambda: None, get_device_name=lambda device: "NVIDIA H200"
    )

    class OnCpu(torch.Tensor):
        pass

    return SimpleNamespace(
        cuda=runtime,
        uint8=torch.uint8,
        zeros=lambda size, dtype, device: torch.zeros(size, dtype=dtype),
        from_numpy=lambda array: SimpleNamespace(to=lambda device: torch.from_numpy(array.copy())),
    )


@pytest.fixture(params=["host", "device"])
def buffer(request: pytest.FixtureRequest) -> HostBuffer | DeviceBuffer:
    if request.param == "host":
        return HostBuffer(SIZE_BYTES)
    return DeviceBuffer(SIZE_BYTES, torch_that_takes_the_cpu_for_cuda(), "cuda", 0)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_was_filled_is_found_right(buffer: HostBuffer | DeviceBuffer, number: int) -> None:
    layout = make_patterns(SIZE_BYTES, seed=1)[number].layout
    fill(buffer, 7, layout)
    assert check(buffer, 7, layout) == (0, 0)


def test_one_flipped_byte_is_found_where_it_is(buffer: HostBuffer | DeviceBuffer) -> None:
    layout = in_order(SIZE_BYTES)
    fill(buffer, 7, layout)
    piece = buffer.get(np.array([5_000_001 // 4096]), 4096)
    piece[0, 5_000_001 % 4096] ^= 1
    buffer.put(np.array([5_000_001 // 4096]), piece)
    assert check(buffer, 7, layout) == (1, 5_000_001)


def test_two_blocks_in_each_others_place_are_found(buffer: HostBuffer | DeviceBuffer) -> None:
    layout = in_order(SIZE_BYTES)
    fill(buffer, 7, layout)
    buffer.put(np.array([3, 9]), buffer.get(np.array([9, 3]), 32768))
    wrong, first = check(buffer, 7, layout)
    assert wrong > 2 * 32768 * 0.9
    assert 3 * 32768 <= first < 3 * 32768 + 16


def test_a_buffer_that_nothing_reached_is_all_wrong(buffer: HostBuffer | DeviceBuffer) -> None:
    layout = in_order(SIZE_BYTES)
    fill(buffer, 7, layout)
    buffer.clear()
    wrong, first = check(buffer, 7, layout)
    assert wrong > SIZE_BYTES * 0.99
    assert first < 16


def test_a_scattered_layout_holds_the_same_stream_as_one_in_order() -> None:
    buffer = HostBuffer(SIZE_BYTES)
    layout = make_patterns(SIZE_BYTES, seed=1)[0].layout
    fill(buffer, 7, layout)
    stream = buffer.get(layout.order, layout.piece_bytes)
    fill(buffer, 7, Layout(layout.piece_bytes, np.arange(len(layout.order))))
    assert (buffer.get(np.arange(len(layout.order)), layout.piece_bytes) == stream).all()


def test_a_size_that_does_not_fit_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=6 * 2**30))
    with pytest.raises(KvopsError, match=r"4.00 GiB on each side is more than this host has free \(6.00 GiB\)"):
        allocate(4 * 2**30, "dram", None, 0)


def test_vram_without_an_accelerator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KvopsError, match="sees no CUDA device"):
        allocate(UNIT_BYTES, "vram", None, 0)


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(KvopsError, match=r"there is no cuda:2 here, only 2 cuda device\(s\)"):
        allocate(UNIT_BYTES, "vram", 2, 0)


def test_memory_that_a_device_does_not_give_is_one_sentence() -> None:
    def out_of_memory(size: int, dtype: object, device: str) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 64.00 GiB.\nmore")

    without = torch_that_takes_the_cpu_for_cuda()
    without.zeros = out_of_memory
    with pytest.raises(KvopsError, match=r"cuda:0 did not give .* CUDA out of memory. Tried to allocate 64.00 GiB.;"):
        DeviceBuffer(UNIT_BYTES, without, "cuda", 0)
