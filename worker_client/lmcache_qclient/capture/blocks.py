"""Free ring blocks: lowest ids first.

So a chunk's blocks tend to be neighbours, and untouched memory stays untouched.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable
from typing import Protocol

logger = logging.getLogger(__name__)


class Allocator(Protocol):
    """What gives a ring's blocks away."""

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could give now."""

    @property
    def high_water(self) -> int:
        """The most blocks that were ever in use."""

    def allocate(self, n: int) -> list[int] | None:
        """n free ids, or None when fewer are free."""

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back."""


class BlockAllocator:
    """Ids 0 .. num_blocks - 1. Not thread-safe: the engine's thread owns it."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.high_water = 0
        self._heap = list(range(num_blocks))
        self._is_free = bytearray(b"\x01" * num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could give now."""
        return len(self._heap)

    def allocate(self, n: int) -> list[int] | None:
        """n free ids in ascending order, or None when fewer are free (nothing is taken then).

        Raises:
            ValueError: n is negative.
        """
        if n < 0:
            raise ValueError(f"can't allocate {n} blocks: the number must not be negative")
        if n > len(self._heap):
            return None
        ids = [heapq.heappop(self._heap) for _ in range(n)]
        for block_id in ids:
            self._is_free[block_id] = 0
        self.high_water = max(self.high_water, self.num_blocks - len(self._heap))
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back; one that is out of range or free already is logged and skipped."""
        for block_id in ids:
            if not 0 <= block_id < self.num_blocks:
                logger.warning(
                    "ring block %d is not in [0, %d): not freed", block_id, self.num_blocks
                )
            elif self._is_free[block_id]:
                logger.warning("ring block %d is free already: not freed again", block_id)
            else:
                self._is_free[block_id] = 1
                heapq.heappush(self._heap, block_id)
