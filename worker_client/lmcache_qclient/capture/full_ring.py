"""`lmcache.q.on_full=wait`: a full ring makes the engine wait a bounded time, instead of losing rows at once.

It waits only for stores that are under way: their end frees blocks. When none is, nothing will be freed in this step,
and waiting would be in vain.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from lmcache_qclient.capture.adapter import QRingBufferAdapter
from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qclient.capture.shared_blocks import SharedBlocks


class WaitForRoom:
    """Allocates ring blocks with patience.

    Args:
        blocks: of one ring, or of several at once.
        adapters: whose stores; one for each ring. The account of the one that was waited for counts it.
        wait_s: most seconds that one step waits in all; 0 never waits.
    """

    def __init__(
        self,
        blocks: QRingBuffer | SharedBlocks,
        adapters: Sequence[QRingBufferAdapter],
        wait_s: float,
    ) -> None:
        self._blocks = blocks
        self._adapters = tuple(adapters)
        self._wait_s = wait_s
        self._left_s = wait_s

    def step_begins(self) -> None:
        """The step's patience is whole again."""
        self._left_s = self._wait_s

    def allocate(self, n: int) -> list[int] | None:
        """As `QRingBuffer.allocate`, but waits for stores under way before it gives up."""
        blocks = self._blocks.allocate(n)
        while blocks is None and self._may_wait(n):
            began = time.monotonic()
            busy = next(adapter for adapter in self._adapters if adapter.stores_under_way)
            busy.wait_for_any_store(self._left_s)
            for adapter in self._adapters:
                adapter.reclaim_finished_q_stores()
            taken = time.monotonic() - began
            self._left_s -= taken
            busy.account.waited_s += taken
            blocks = self._blocks.allocate(n)
        return blocks

    def _may_wait(self, n: int) -> bool:
        if self._left_s <= 0 or n > self._blocks.num_blocks:
            return False
        return any(adapter.stores_under_way for adapter in self._adapters)
