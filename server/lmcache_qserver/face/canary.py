"""The write-read test behind /readyz: does the pool still take and give back bytes?"""

from __future__ import annotations

import secrets

import numpy as np

from lmcache_qserver.pool import Pool

CANARY_BYTES = 4096


class Canary:
    """Owner of the slot that the test reserves and gives up again."""

    def sing(self, pool: Pool) -> bool:
        """Reserve, write, read back, abort; call it on the loop.

        A pool without a free page is as it should be, and nothing may be evicted for a test: true without writing.
        """
        if pool.usage().free_bytes < CANARY_BYTES:
            return True
        reservation = pool.reserve(CANARY_BYTES, self)
        if reservation.slot is None or reservation.evicted:
            return False
        try:
            expected = np.frombuffer(secrets.token_bytes(CANARY_BYTES), np.uint8)
            pool.view(reservation.slot)[:] = expected
            offset = reservation.slot.offset
            return bool(np.array_equal(pool.memory.array[offset : offset + CANARY_BYTES], expected))
        finally:
            pool.abort(reservation.slot)
