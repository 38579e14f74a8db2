"""The ring: logical tensors over block-major shared memory, one trash row, stamps beside the rows."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qprotocol.stamps import EMPTY

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8]
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def memory(ring: QRingBuffer) -> mmap.mmap:
    """What another process sees of the ring."""
    assert ring.memory is not None
    return mmap.mmap(ring.memory.fd, ring.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)


def rows_of(ring: QRingBuffer) -> np.ndarray:
    """The rows' bits as the server reads them: `[num_blocks, num_layers, block_size, hidden_dim]`."""
    shape = (ring.num_blocks, ring.num_layers, ring.block_size, ring.hidden_dim)
    bits = BITS[ring.dtype.itemsize]
    return np.frombuffer(memory(ring), bits, count=int(np.prod(shape))).reshape(shape)


def stamps_of(ring: QRingBuffer) -> np.ndarray:
    """Stamps as the server reads them: int64 `[num_blocks, block_size]`."""
    count = ring.num_blocks * ring.block_size
    return np.frombuffer(memory(ring), np.int64, count=count, offset=ring.stamps_offset).reshape(
        ring.num_blocks, ring.block_size
    )


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """The same bits as unsigned integers."""
    as_bytes: np.ndarray = tensor.contiguous().view(torch.uint8).numpy()
    return as_bytes.view(BITS[tensor.element_size()])


# --- shape and memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["num_layers", "num_blocks", "block_size", "hidden_dim"])
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_must_be_positive_and_are_named(name: str, value: int) -> None:
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "num_blocks": 2,
        "block_size": 2,
        "hidden_dim": 2,
        name: value,
    }
    with pytest.raises(ValueError, match=name):
        QRingBuffer(**sizes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_views_of_block_major_memory(dtype: torch.dtype) -> None:
    ring = QRingBuffer(3, 4, 2, 5, dtype)
    assert list(ring.tensors) == ["lmcache_q_layer_0", "lmcache_q_layer_1", "lmcache_q_layer_2"]
    for layer, tensor in enumerate(ring.tensors.values()):
        assert tensor.shape == (4, 2, 5)
        assert tensor.dtype == dtype
        for block in range(4):
            tensor[block] = torch.full((2, 5), layer * 10 + block).to(dtype)
    seen = rows_of(ring)
    for layer in range(3):
        for block in range(4):
            expected = bits_of(torch.full((2, 5), layer * 10 + block).to(dtype))
            assert np.array_equal(seen[block, layer], expected)


def test_stamps_lie_on_a_page_of_their_own_behind_the_trash_row() -> None:
    ring = QRingBuffer(3, 4, 2, 5, torch.float32)
    assert ring.stamps_offset % 4096 == 0
    assert ring.stamps_offset >= (3 * 4 * 2 + 1) * 5 * 4
    assert ring.nbytes >= ring.stamps_offset + 4 * 2 * 8
    assert (stamps_of(ring) == EMPTY).all()


def test_the_memory_cannot_change_its_size() -> None:
    ring = QRingBuffer(1, 1, 1, 1)
    assert ring.memory is not None
    seals = fcntl.fcntl(ring.memory.fd, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_SEAL
    assert os.fstat(ring.memory.fd).st_size == ring.nbytes
    for size in (0, ring.nbytes - 1, ring.nbytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(ring.memory.fd, size)
    assert not os.get_inheritable(ring.memory.fd)


def test_close_gives_the_descriptor_back_and_keeps_the_tensors() -> None:
    ring = QRingBuffer(1, 2, 2, 3, torch.float32)
    assert ring.memory is not None
    fd = ring.memory.fd
    ring.close()
    ring.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)
    ring.tensors["lmcache_q_layer_0"][0, 0] = 4.0
    assert ring.tensors["lmcache_q_layer_0"][0, 0, 0] == 4.0


@pytest.mark.parametrize("blocks", [0, 1, 4, 999])
def test_populate_changes_nothing(blocks: int) -> None:
    ring = QRingBuffer(3, 4, 2, 5, torch.float32)
    ring.tensors["lmcache_q_layer_2"][3] = 7.0
    ring.populate(blocks)
    assert (ring.tensors["lmcache_q_layer_2"][3] == 7.0).all()
    assert (ring.tensors["lmcache_q_layer_2"][2] == 0.0).all()


def test_usage_counts_blocks(caplog: pytest.LogCaptureFixture) -> None:
    ring = QRingBuffer(1, 4, 2, 3)
    ids = ring.allocate(3)
    assert ids == [0, 1, 2]
    assert ring.allocate(2) is None
    assert ring.allocate(0) == []
    with pytest.raises(ValueError, match="negative"):
        ring.allocate(-1)
    ring.free([1, 2])
    with caplog.at_level(logging.WARNING):
        ring.free([2, 99])
    assert len(caplog.records) == 2
    assert ring.num_free_blocks() == 3
    assert ring.usage() == (4, 3, 1, 3)


def as_on_a_device(ring: QRingBuffer) -> None:
    """Write by torch alone, as on a device that NumPy can't reach."""
    ring._host_bits = None


# --- rows -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from(DTYPES),
    st.sampled_from(["same", torch.float32, torch.bfloat16]),
    st.integers(1, 4),
)
def test_scatter_equals_the_naive_loop_on_the_host_and_as_on_a_device(
    seed: int, dtype: torch.dtype, source: Any, block_size: int
) -> None:
    random = Random(seed)
    layers, blocks, heads, head_dim, rows = 3, 5, 2, 3, random.randint(0, 12)
    free = random.sample(range(blocks * block_size), min(rows, blocks * block_size))
    slots = [free.pop() if free and random.random() < 0.7 else -1 for _ in range(rows)]
    if random.random() < 0.3:
        slots.sort()
    values = torch.tensor([random.randint(-100, 100) for _ in range(rows * heads * head_dim)])
    query = values.reshape(rows, heads, head_dim).to(torch.float32)
    query = query.to(dtype if source == "same" else source)
    layer = random.randrange(layers)

    expected = torch.zeros(blocks, layers, block_size, heads * head_dim).to(dtype)
    for row, slot in enumerate(slots):
        if slot >= 0:
            cast = query[row].reshape(-1).to(dtype)
            expected[slot // block_size, layer, slot % block_size] = cast
    for way in ("host", "device"):
        ring = QRingBuffer(layers, blocks, block_size, heads * head_dim, dtype)
        if way == "device":
            as_on_a_device(ring)
        ring.scatter(layer, query, torch.tensor(slots, dtype=torch.int64))
        assert np.array_equal(rows_of(ring), bits_of(expected)), way
        ring.close()


def test_nan_payloads_and_negative_zero_keep_their_bits() -> None:
    """C23: bits are moved, not values."""
    bits = torch.tensor([[0x3E25, -0x8000, 0x7FC1, 0x0001]], dtype=torch.int16)
    for way in ("host", "device"):
        ring = QRingBuffer(1, 1, 1, 4, torch.bfloat16)
        if way == "device":
            as_on_a_device(ring)
        ring.scatter(0, bits.view(torch.bfloat16), torch.tensor([0]))
        assert rows_of(ring)[0, 0, 0].tolist() == [0x3E25, 0x8000, 0x7FC1, 0x0001]


def test_dropped_rows_reach_no_real_row_of_any_layer() -> None:
    ring = QRingBuffer(3, 2, 2, 4, torch.float32)
    for layer in range(3):
        ring.scatter(layer, torch.full((5, 4), 9.0), torch.full((5,), -1))
    assert not rows_of(ring).any()


@pytest.mark.parametrize("slot", [4, 5, 100])
def test_a_slot_beyond_the_ring_reaches_no_real_row(slot: int) -> None:
    ring = QRingBuffer(3, 2, 2, 4, torch.float32)
    ring.scatter(0, torch.full((1, 4), 9.0), torch.tensor([slot]))
    assert not rows_of(ring).any()
    assert (stamps_of(ring) == EMPTY).all()


def test_a_query_that_is_no_contiguous_tensor_and_wants_gradients() -> None:
    wide = torch.arange(48, dtype=torch.float32).reshape(4, 12).requires_grad_()
    query = wide.as_strided((4, 2, 3), (12, 3, 1), 3)
    for way in ("host", "device"):
        ring = QRingBuffer(1, 4, 1, 6, torch.float32)
        if way == "device":
            as_on_a_device(ring)
        ring.scatter(0, query, torch.arange(4))
        stored = ring.tensors["lmcache_q_layer_0"]
        assert torch.equal(stored[:, 0], wide.detach()[:, 3:9])
        assert not stored.requires_grad


@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 5), (2, 7), (2, 1)])
def test_a_wrong_width_says_what_to_check(shape: tuple[int, ...]) -> None:
    ring = QRingBuffer(1, 2, 2, 6, torch.float32)
    with pytest.raises(ValueError, match=r"head count.*head size"):
        ring.scatter(0, torch.ones(shape), torch.tensor([0, 1]))
    assert not rows_of(ring).any()


@pytest.mark.parametrize("layer", [-1, 2, 99])
def test_a_wrong_layer_index(layer: int) -> None:
    ring = QRingBuffer(2, 2, 2, 6)
    with pytest.raises(ValueError, match="layer index"):
        ring.scatter(layer, torch.ones(1, 6), torch.tensor([0]))


# --- stamps ---------------------------------------------------------------------------------------


def test_stamps_go_to_their_slots_and_dropped_ones_nowhere() -> None:
    ring = QRingBuffer(2, 3, 2, 4)
    ring.stamp(torch.tensor([5, -1, 0]), torch.tensor([50, 99, 10]))
    assert stamps_of(ring).tolist() == [[10, EMPTY], [EMPTY, EMPTY], [EMPTY, 50]]


def test_clearing_blocks_and_rows() -> None:
    ring = QRingBuffer(2, 3, 2, 4)
    ring.stamp(torch.arange(6), torch.arange(6))
    ring.clear_blocks([])
    ring.clear_blocks([2])
    ring.clear_rows(1, 1)
    assert stamps_of(ring).tolist() == [[0, EMPTY], [2, 3], [EMPTY, EMPTY]]


def test_another_device_gets_a_plain_allocation() -> None:
    ring = QRingBuffer(2, 3, 2, 4, device="meta")
    assert ring.memory is None
    ring.populate(1)
    ring.close()
