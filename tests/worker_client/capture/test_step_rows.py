"""Rows found on the host and as on a device: the same rows, in the same places; what is doubtful gets no stamp."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qclient.capture.step_plan import Run
from lmcache_qclient.capture.step_rows import DeviceRows, HostRows
from lmcache_qprotocol.stamps import EMPTY

LAYERS, BLOCKS, BLOCK, WIDTH = 2, 8, 4, 3
Kind = type[HostRows] | type[DeviceRows]
KINDS: list[Kind] = [HostRows, DeviceRows]


def written(kind: Kind, slots: list[int], runs: list[Run]) -> tuple[np.ndarray, ...]:
    """Rows `[blocks, layers, block, width]` and stamps `[blocks, block]` of a ring after one step."""
    ring = QRingBuffer(LAYERS, BLOCKS, BLOCK, WIDTH, torch.float32)
    if kind is DeviceRows:
        ring._host_bits = None
    rows = kind(ring, torch.tensor(slots, dtype=torch.int64), runs)
    for layer in range(LAYERS):
        query = torch.arange(len(slots) + 2.0)[:, None] * 10 + layer  # two rows of padding
        rows.write(layer, query.expand(-1, WIDTH))
    rows.stamp()
    shape = (BLOCKS, LAYERS, BLOCK, WIDTH)
    both = ring.flat[:-1].view(shape).numpy().copy(), ring._stamps.numpy().copy()
    ring.close()
    return both


runs_of_requests = st.lists(st.integers(1, 4), min_size=1, max_size=BLOCKS).map(
    lambda lengths: [
        Run(f"r{number % 3}", 100 * number + 5, number * BLOCK, 1000 * (number + 1), length)
        for number, length in enumerate(lengths)
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    runs_of_requests, st.randoms(use_true_random=False), st.sampled_from(["none", "lost", "twice"])
)
def test_a_stamped_row_is_right_and_all_of_a_request_without_fault_are_there(
    runs: list[Run], random: np.random.Generator, fault: str
) -> None:
    wanted = [
        (run.engine_slot + at, run.ring_slot + at, run.stamp + at, run.request_id)
        for run in runs
        for at in range(run.length)
    ]
    slots = [slot for slot, *_ in wanted] + [-1, 9999]
    victim = random.choice(wanted)
    if fault == "lost":
        slots.remove(victim[0])
    elif fault == "twice":
        slots.append(victim[0])
    random.shuffle(slots)
    for kind in KINDS:
        rows, stamps = written(kind, slots, runs)
        for slot, ring_slot, stamp, request_id in wanted:
            block, at = divmod(ring_slot, BLOCK)
            if fault != "none" and slot == victim[0]:
                assert stamps[block, at] == EMPTY, kind
            elif fault == "none" or request_id != victim[3]:
                assert stamps[block, at] == stamp, kind
            if stamps[block, at] != EMPTY:
                assert stamps[block, at] == stamp
                for layer in range(LAYERS):
                    expected = slots.index(slot) * 10 + layer
                    assert rows[block, layer, at].tolist() == [expected] * WIDTH, kind
        assert np.count_nonzero(stamps != EMPTY) <= len(wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_that_two_want_is_nobodys(kind: Kind) -> None:
    runs = [Run("a", 8, 0, 100, 2), Run("b", 9, 4, 200, 2), Run("c", 20, 8, 300, 1)]
    _, stamps = written(kind, [8, 9, 10, 20], runs)
    assert stamps[0, 1] == EMPTY, "a's second"
    assert stamps[1, 0] == EMPTY, "b's first"
    assert stamps[2, 0] == 300


def test_only_the_host_knows_who_is_left_out() -> None:
    ring = QRingBuffer(LAYERS, BLOCKS, BLOCK, WIDTH, torch.float32)
    wanted = [Run("a", 8, 0, 100, 2), Run("b", 20, 4, 200, 1)]
    slots = torch.tensor([8, 20])
    assert HostRows(ring, slots, wanted).unmatched == ("a",)
    assert DeviceRows(ring, slots, wanted).unmatched == ()


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_with_fewer_rows_than_the_first(kind: Kind) -> None:
    ring = QRingBuffer(LAYERS, BLOCKS, BLOCK, WIDTH, torch.float32)
    rows = kind(ring, torch.tensor([8, 9]), [Run("a", 8, 0, 100, 2)])
    with pytest.raises(ValueError, match="brought 1 rows, the step's first one 2"):
        rows.write(1, torch.ones(1, WIDTH))
