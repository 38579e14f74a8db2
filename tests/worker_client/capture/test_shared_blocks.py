"""Blocks of several rings at once: taken in all of them, free again when each has given them back."""

from __future__ import annotations

import pytest

from lmcache_qclient.capture.shared_blocks import SharedBlocks


def test_a_block_is_free_when_every_ring_has_given_it_back() -> None:
    shared = SharedBlocks(2, 3)
    assert shared.allocate(2) == [0, 1]
    assert shared.allocate(1) is None
    for ring in shared.ring[:2]:
        ring.free([0, 1])
        assert shared.allocate(1) is None
    shared.ring[2].free([1])
    assert [ring.num_free for ring in shared.ring] == [1, 1, 1]
    assert shared.allocate(1) == [1]
    assert shared.ring[0].high_water == 2


def test_all_rings_at_once() -> None:
    shared = SharedBlocks(2, 2)
    shared.allocate(2)
    shared.free([0, 1])
    assert shared.allocate(2) == [0, 1]


@pytest.mark.parametrize("block", [-1, 2, 0])
def test_what_is_not_in_use_is_not_freed(block: int, caplog: pytest.LogCaptureFixture) -> None:
    shared = SharedBlocks(2, 2)
    shared.allocate(1)
    shared.ring[0].free([0])
    shared.ring[0].free([block])
    assert "not freed" in caplog.text
    assert shared.allocator.num_free == 1
    shared.ring[1].free([0])
    assert shared.allocator.num_free == 2
