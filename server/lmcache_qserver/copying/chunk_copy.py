"""The one copy of a store: ring blocks to pool slots, proven by their stamps.

The worker writes rows first and stamps last, and empties a block's stamps before it gives the block away. So rows are
copied first and stamps are looked at second: stamps that are as expected *after* the copy mean that every row was
complete before it and still the same chunk's behind it (stamps.py has the whole argument).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lmcache_qserver.copying.checksum import Digest
from lmcache_qserver.copying.crew import ALONE, Crew, cut


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """One chunk, or rows of one chunk, to copy.

    Attributes:
        block_ids: ring blocks in order of position, all inside the ring.
        first_stamp: the stamp that the first row must have; row i must have `first_stamp + i`.
        target: uint8 `[len(block_ids) * block_bytes]`, writable.
        skip: rows of the first block before the first row.
        rows: how many there are; None for all from `skip` on. Rows of the blocks that are not among them may be
            anybody's, and are 0 in the target.
        layers: of a block, `[layers, block_size, ...]`; only needed where not all rows are copied.
        digest: for the target's checksum. A backend may feed it while it copies, in order, if all rows of the blocks
            are the chunk's; its length tells whether one has.
        offset: of the target in the pool; only needed where another process copies.
    """

    block_ids: tuple[int, ...]
    first_stamp: int
    target: npt.NDArray[np.uint8]
    skip: int = 0
    rows: int | None = None
    layers: int = 1
    digest: Digest | None = None
    offset: int = 0

    def is_whole(self, block_size: int) -> bool:
        """Whether all rows of its blocks are its own."""
        return not self.skip and self.rows in (None, len(self.block_ids) * block_size)


@dataclass(frozen=True, slots=True)
class StampFault:
    """The first row that was not as it must be."""

    chunk: int
    """Index of the chunk among those to copy."""
    row: int
    """Index of the row among those to copy."""
    expected: int
    found: int


class MappedRing(Protocol):
    """A ring that lies in this process's memory.

    Attributes:
        rows: uint8 `[num_blocks, block_bytes]`.
        stamps: int64 `[num_blocks, block_size]`.
    """

    @property
    def rows(self) -> npt.NDArray[np.uint8]: ...

    @property
    def stamps(self) -> npt.NDArray[np.int64]: ...


def copy_chunks(
    ring: MappedRing, chunks: Sequence[ChunkCopy], crew: Crew = ALONE
) -> StampFault | None:
    """Copy chunks in order; stop at the first whose stamps are wrong. The GIL is free while bytes move.

    Args:
        ring: an open ring.
        chunks: their targets may not overlap.
        crew: helps with large chunks.

    Returns:
        None when every row is proven.
    """
    for index, chunk in enumerate(chunks):
        block_size = ring.stamps.shape[1]
        _copy_rows(ring.rows, chunk, block_size, crew)
        clear_others(chunk, block_size)
        found = ring.stamps.take(chunk.block_ids, axis=0).reshape(-1)
        fault = check_stamps(found[chunk.skip :][: chunk.rows], chunk.first_stamp, index)
        if fault is not None:
            return fault
    return None


def neighbour_runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place in `block_ids`, first block, number of blocks) of every run of ids that count up by one."""
    start = 0
    for index in range(1, len(block_ids) + 1):
        if index == len(block_ids) or block_ids[index] != block_ids[index - 1] + 1:
            yield start, block_ids[start], index - start
            start = index


def _copy_rows(rows: npt.NDArray[np.uint8], chunk: ChunkCopy, block_size: int, crew: Crew) -> None:
    size = rows.shape[1]
    segments = [
        segment
        for place, first, count in neighbour_runs(chunk.block_ids)
        for segment in cut(place * size, first * size, count * size)
    ]
    # Foreign rows are cleared behind the copy: then the digest has to wait for that.
    digest = chunk.digest if chunk.is_whole(block_size) else None
    crew.copy(
        chunk.target, rows.reshape(-1), segments, digest.update if digest is not None else None
    )


def clear_others(chunk: ChunkCopy, block_size: int) -> None:
    """Zero the target's rows that are not the chunk's: they lie before it in the first block, behind it in the last."""
    if chunk.is_whole(block_size):
        return
    blocks = chunk.target.reshape(len(chunk.block_ids), chunk.layers, block_size, -1)
    blocks[0, :, : chunk.skip] = 0
    if chunk.rows is not None:
        behind = chunk.skip + chunk.rows - (len(chunk.block_ids) - 1) * block_size
        blocks[-1, :, behind:] = 0


def check_stamps(found: npt.NDArray[np.int64], first_stamp: int, chunk: int) -> StampFault | None:
    """The first row whose stamp is not as expected; None when all are.

    Args:
        found: int64 `[rows]`.
        chunk: index for the fault.
    """
    expected = _row_numbers(found.size) + first_stamp
    if (
        found.tobytes() == expected.tobytes()
    ):  # far cheaper than comparing arrays, and nearly always enough
        return None
    row = int((found != expected).argmax())
    return StampFault(chunk, row, int(expected[row]), int(found[row]))


@lru_cache(maxsize=4)  # a whole chunk, and pieces of some lengths
def _row_numbers(count: int) -> npt.NDArray[np.int64]:
    """0, 1, ...; read-only, because lanes share it."""
    numbers = np.arange(count, dtype=np.int64)
    numbers.flags.writeable = False
    return numbers
