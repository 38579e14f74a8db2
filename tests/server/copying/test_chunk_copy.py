"""The copy moves the right blocks, and believes stamps only."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_qprotocol.stamps import EMPTY, first_stamp
from lmcache_qserver.copying import ChunkCopy, RingGeometry, RingMemory, copy_chunks
from lmcache_qserver.copying.chunk_copy import neighbour_runs

NUM_BLOCKS, BLOCK_BYTES, BLOCK_SIZE = 8, 48, 3
OFFSET = NUM_BLOCKS * BLOCK_BYTES
NBYTES = OFFSET + NUM_BLOCKS * BLOCK_SIZE * 8


@pytest.fixture
def ring() -> Iterator[SimpleNamespace]:
    """An open ring, and its bytes as the worker writes them."""
    fd = os.memfd_create("ring", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    os.pwrite(fd, np.arange(OFFSET, dtype=np.uint8).tobytes(), 0)

    def stamp(block: int, stamps: list[int]) -> None:
        os.pwrite(worker, np.array(stamps, np.int64).tobytes(), OFFSET + block * BLOCK_SIZE * 8)

    worker = os.dup(fd)
    for block in range(NUM_BLOCKS):
        stamp(block, [EMPTY] * BLOCK_SIZE)
    memory = RingMemory(fd, NBYTES)
    memory.open(RingGeometry(NUM_BLOCKS, BLOCK_BYTES, BLOCK_SIZE, OFFSET))
    yield SimpleNamespace(memory=memory, stamp=stamp)
    memory.close()
    os.close(worker)


def chunk(block_ids: tuple[int, ...], nonce: int, start: int) -> ChunkCopy:
    return ChunkCopy(
        block_ids, first_stamp(nonce, start), np.zeros(len(block_ids) * BLOCK_BYTES, np.uint8)
    )


def test_blocks_are_copied_in_the_order_of_their_ids(ring: SimpleNamespace) -> None:
    one, two = chunk((5, 6, 1), 3, 30), chunk((2, 0, 7), 4, 39)
    for index, block in enumerate((5, 6, 1)):
        ring.stamp(block, [first_stamp(3, 30 + index * 3 + row) for row in range(3)])
    for index, block in enumerate((2, 0, 7)):
        ring.stamp(block, [first_stamp(4, 39 + index * 3 + row) for row in range(3)])
    assert copy_chunks(ring.memory, [one, two]) is None
    rows = ring.memory.rows
    assert one.target.tobytes() == rows[[5, 6, 1]].tobytes()
    assert two.target.tobytes() == rows[[2, 0, 7]].tobytes()
    del rows


@pytest.mark.parametrize("row", [0, 4, 8])
@pytest.mark.parametrize("wrong", [EMPTY, 0, first_stamp(3, 31 << 10), first_stamp(9, 34)])
def test_one_wrong_stamp_is_found(ring: SimpleNamespace, row: int, wrong: int) -> None:
    stamps = [first_stamp(3, 30 + index) for index in range(9)]
    expected, stamps[row] = stamps[row], wrong
    for index, block in enumerate((5, 6, 1)):
        ring.stamp(block, stamps[index * 3 : index * 3 + 3])
    fault = copy_chunks(ring.memory, [chunk((), 1, 0), chunk((5, 6, 1), 3, 30)])
    assert fault is not None
    assert (fault.chunk, fault.row, fault.expected, fault.found) == (1, row, expected, wrong)


def test_stamps_are_looked_at_behind_the_copy_of_the_rows(ring: SimpleNamespace) -> None:
    class GivenAway:
        """The worker gives the block away while its rows are copied."""

        stamps = ring.memory.stamps

        @property
        def rows(self) -> Any:
            ring.stamp(2, [EMPTY] * 3)
            return ring.memory.rows

    ring.stamp(2, [first_stamp(3, 30 + row) for row in range(3)])
    racing = GivenAway()
    assert copy_chunks(racing, [chunk((2,), 3, 30)]) is not None
    del GivenAway.stamps


def test_the_largest_stamp_does_not_overflow(ring: SimpleNamespace) -> None:
    nonce, start = (1 << 31) - 1, (1 << 31) - 3
    ring.stamp(0, [first_stamp(nonce, start + row) for row in range(3)])
    assert copy_chunks(ring.memory, [chunk((0,), nonce, start)]) is None


@given(st.lists(st.integers(0, 6), max_size=40))
def test_runs_are_the_ids_again_and_as_long_as_can_be(block_ids: list[int]) -> None:
    runs = list(neighbour_runs(block_ids))
    assert [first + step for _, first, count in runs for step in range(count)] == block_ids
    assert [place for place, _, _ in runs] == [
        sum(count for _, _, count in runs[:index]) for index in range(len(runs))
    ]
    for (_, first, count), (_, following, _) in itertools.pairwise(runs):
        assert first + count != following
