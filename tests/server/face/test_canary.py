from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmcache_qserver.face.canary import Canary
from lmcache_qserver.pool import Pool, PoolMemory, Slot


def test_the_canary_gives_its_page_back_and_evicts_nothing() -> None:
    with PoolMemory(3 * 4096) as memory:
        pool = Pool(memory)
        assert Canary().sing(pool)
        assert pool.usage().free_bytes == 3 * 4096
        slot = pool.reserve(3 * 4096, "object").slot
        assert slot is not None
        pool.commit(slot)
        assert Canary().sing(pool), "a full pool is as it should be"
        assert pool.usage().evictions == 0


def test_a_pool_that_does_not_keep_what_is_written_is_noticed() -> None:
    class Forgetful(Pool):
        def view(self, slot: Slot) -> npt.NDArray[np.uint8]:
            return np.array(super().view(slot))

    with PoolMemory(4096) as memory:
        pool = Forgetful(memory)
        assert not Canary().sing(pool)
        assert pool.usage().free_bytes == 4096
