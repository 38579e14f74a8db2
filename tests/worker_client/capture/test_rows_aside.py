"""Few rows wait aside, many go straight into the ring: each arrives where its slot says, in every layer."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qclient.capture.rows_aside import FEW
from lmcache_qclient.capture.step_plan import Run
from lmcache_qclient.capture.step_rows import HostRows
from lmcache_qprotocol.stamps import EMPTY

LAYERS, BLOCKS, BLOCK, HEADS, HEAD_DIM = 3, 8, 16, 2, 3
HIDDEN = HEADS * HEAD_DIM
SLOTS = BLOCKS * BLOCK
ROWS = (1, 3, FEW, FEW + 1, 2 * FEW)


def ring_of(dtype: torch.dtype = torch.float32) -> QRingBuffer:
    """A ring of zeros."""
    return QRingBuffer(LAYERS, BLOCKS, BLOCK, HIDDEN, dtype)


def step(ring: QRingBuffer, wanted: dict[int, int], mapping: list[int]) -> HostRows:
    """A step whose rows have the cache slots `mapping`; wanted: cache slot → ring slot."""
    runs = [Run("r", cache, slot, 1000 + cache, 1) for cache, slot in wanted.items()]
    return HostRows(ring, torch.tensor(mapping, dtype=torch.int64), runs)


def query(random: Random, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """`[rows, heads, head_dim]`, a view into a wider tensor, as an engine cuts it out of its QKV product."""
    values = [random.randint(-100, 100) for _ in range(rows * 4 * HIDDEN)]
    wide = torch.tensor(values, dtype=torch.float32).reshape(rows, 4 * HIDDEN).to(dtype)
    return wide[:, HIDDEN : 2 * HIDDEN].reshape(rows, HEADS, HEAD_DIM)


def logical(ring: QRingBuffer) -> torch.Tensor:
    """What the ring holds, `[layers, slots, hidden]`."""
    return torch.stack([tensor.flatten(0, 1) for tensor in ring.tensors.values()])


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn]),
    st.booleans(),
    st.sampled_from(ROWS),
)
def test_steps_one_after_the_other_equal_the_naive_loop(
    seed: int, dtype: torch.dtype, cast: bool, most: int
) -> None:
    random = Random(seed)
    ring = ring_of(dtype)
    expected = torch.zeros(LAYERS, SLOTS, HIDDEN).to(dtype)
    stamps = torch.full((SLOTS,), EMPTY)
    for _ in range(3):
        mapping = random.sample(range(1000), random.randint(1, most))
        kept = [cache for cache in mapping if random.random() < 0.8] or mapping[:1]
        wanted = dict(zip(kept, random.sample(range(SLOTS), len(kept)), strict=True))
        rows = step(ring, wanted, mapping)
        for layer in random.sample(range(LAYERS), LAYERS):
            padding = random.choice([0, 0, 3])
            brought = query(random, len(mapping) + padding, torch.float32 if cast else dtype)
            rows.write(layer, brought.flatten(1) if random.random() < 0.2 else brought)
            for cache, slot in wanted.items():
                expected[layer, slot] = brought[mapping.index(cache)].reshape(-1).to(dtype)
        rows.stamp()
        for cache, slot in wanted.items():
            stamps[slot] = 1000 + cache
        assert torch.equal(logical(ring).view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(ring.flat_stamps[:-1], stamps)


@pytest.mark.parametrize("rows", [2, FEW + 1], ids=["few", "many"])
@pytest.mark.parametrize("first", [True, False], ids=["first layer", "later layer"])
@pytest.mark.parametrize(
    "shape", [(1, HEADS, HEAD_DIM), (64, 1, HEAD_DIM), (64, HEADS, 1), (64, 7), (64, 1)]
)
def test_what_does_not_fit_is_refused_not_broadcast(
    rows: int, first: bool, shape: tuple[int, ...]
) -> None:
    ring = ring_of()
    writer = step(ring, {slot: slot for slot in range(rows)}, list(range(rows)))
    if not first:
        writer.write(0, torch.ones(64, HEADS, HEAD_DIM))
    before = logical(ring).clone()
    with pytest.raises(ValueError, match=r"rows|head count"):
        writer.write(1, torch.ones(shape))
    assert torch.equal(logical(ring), before)


@pytest.mark.parametrize("rows", ROWS)
def test_a_wrong_layer_is_refused(rows: int) -> None:
    writer = step(ring_of(), {slot: slot for slot in range(rows)}, list(range(rows)))
    with pytest.raises(ValueError, match="layer index"):
        writer.write(LAYERS, torch.ones(rows, HEADS, HEAD_DIM))


@pytest.mark.parametrize("rows", ROWS)
def test_a_query_that_wants_gradients_leaves_the_ring_without(rows: int) -> None:
    ring = ring_of()
    for value in (1.0, 2.0):
        writer = step(ring, {slot: slot for slot in range(rows)}, list(range(rows)))
        for layer in range(LAYERS):
            writer.write(
                layer, torch.full((rows, HEADS, HEAD_DIM), value * 10 + layer, requires_grad=True)
            )
        writer.stamp()
        for layer in range(LAYERS):
            assert (logical(ring)[layer, :rows] == value * 10 + layer).all()
    assert ring.aside is not None
    assert not ring.aside.rows.requires_grad


@pytest.mark.parametrize("rows", ROWS)
def test_bits_are_moved_not_values(rows: int) -> None:
    """C23, and payloads of NaN."""
    bits = torch.tensor([0x3E25, -0x8000, 0x7FC1, 0x0001, 0, -1], dtype=torch.int16)
    ring = ring_of(torch.bfloat16)
    writer = step(ring, {slot: slot for slot in range(rows)}, list(range(rows)))
    for layer in range(LAYERS):
        writer.write(layer, bits.repeat(rows, 1).view(torch.bfloat16))
    writer.stamp()
    stored = logical(ring)[:, :rows].view(torch.int16).numpy()
    assert np.array_equal(stored, np.broadcast_to(bits.numpy(), stored.shape))


@pytest.mark.parametrize(("rows", "aside"), [(1, True), (FEW, True), (FEW + 1, False)])
def test_only_few_rows_wait(rows: int, aside: bool) -> None:
    ring = ring_of()
    writer = step(ring, {slot: slot for slot in range(rows)}, list(range(rows)))
    writer.write(0, torch.ones(rows, HEADS, HEAD_DIM))
    assert bool(logical(ring).any()) is not aside
