"""Free blocks: what `QRingBuffer.allocate` and `free` promise."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_qclient.capture.blocks import BlockAllocator


def test_lowest_ids_first_and_all_or_nothing() -> None:
    blocks = BlockAllocator(4)
    assert blocks.allocate(0) == []
    assert blocks.allocate(3) == [0, 1, 2]
    assert blocks.allocate(2) is None
    assert blocks.num_free == 1, "a refused allocation takes nothing"
    blocks.free([1])
    assert blocks.allocate(2) == [1, 3]
    assert blocks.high_water == 4


def test_a_negative_number_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="negative"):
        BlockAllocator(4).allocate(-1)


@pytest.mark.parametrize("bad", [-1, 4, 1 << 40])
def test_an_id_out_of_range_is_a_warning_and_the_others_are_freed(
    bad: int, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = BlockAllocator(4)
    blocks.allocate(2)
    with caplog.at_level(logging.WARNING):
        blocks.free([0, bad, 1])
    assert blocks.num_free == 4
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(bad) in caplog.text


def test_freeing_twice_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    blocks = BlockAllocator(4)
    ids = blocks.allocate(1)
    assert ids is not None
    blocks.free([*ids, *ids])
    assert "free already" in caplog.text
    assert blocks.num_free == 4
    assert blocks.allocate(4) == [0, 1, 2, 3], "no id is there twice"


@given(st.lists(st.integers(-2, 6), max_size=40))
def test_no_block_has_two_owners(moves: list[int]) -> None:
    """A number n >= 0 allocates n, a negative one frees what was given out longest ago."""
    blocks = BlockAllocator(9)
    held: list[int] = []
    for move in moves:
        if move >= 0:
            ids = blocks.allocate(move)
            assert (ids is None) == (move > 9 - len(held))
            held += ids or []
        else:
            blocks.free(held[:-move])
            del held[:-move]
        assert len(set(held)) == len(held) == 9 - blocks.num_free
