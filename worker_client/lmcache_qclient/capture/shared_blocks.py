"""Ring blocks that mean the same in several rings: one ledger gives a block away in all of them at once.

A block is free again when every ring has given it back: a store of one feature may still be under way when another's
has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from lmcache_qclient.capture.blocks import BlockAllocator

logger = logging.getLogger(__name__)


class SharedBlocks:
    """Blocks 0 .. num_blocks - 1 of `rings` rings. Not thread-safe: the engine's thread owns it.

    Attributes:
        ring: one for each ring, what it takes for its allocator.
    """

    def __init__(self, num_blocks: int, rings: int) -> None:
        self.num_blocks = num_blocks
        self.ring = tuple(RingBlocksView(self, 1 << index) for index in range(rings))
        self.allocator = BlockAllocator(num_blocks)
        self._all = (1 << rings) - 1
        self._held = [0] * num_blocks  # a bit for each ring that has not given the block back

    def allocate(self, n: int) -> list[int] | None:
        """As `BlockAllocator.allocate`; the blocks are taken in every ring."""
        ids = self.allocator.allocate(n)
        for block_id in ids or ():
            self._held[block_id] = self._all
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back in every ring."""
        self.free_in(self._all, ids)

    def free_in(self, rings: int, ids: Iterable[int]) -> None:
        """Give blocks back in some rings; one that is out of range or free there already is logged and skipped.

        Args:
            rings: a bit for each.
        """
        for block_id in ids:
            if not 0 <= block_id < self.num_blocks or self._held[block_id] & rings != rings:
                logger.warning("ring block %d is not in use there: not freed", block_id)
                continue
            self._held[block_id] &= ~rings
            if not self._held[block_id]:
                self.allocator.free((block_id,))


class RingBlocksView:
    """One ring's side of shared blocks; used as a `BlockAllocator`."""

    def __init__(self, shared: SharedBlocks, bit: int) -> None:
        self._shared = shared
        self._bit = bit

    @property
    def num_free(self) -> int:
        """See `BlockAllocator`."""
        return self._shared.allocator.num_free

    @property
    def high_water(self) -> int:
        """See `BlockAllocator`."""
        return self._shared.allocator.high_water

    def allocate(self, n: int) -> list[int] | None:
        """Taken in every ring: who allocates for one ring alone would give its blocks two meanings."""
        return self._shared.allocate(n)

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back in this ring."""
        self._shared.free_in(self._bit, ids)
