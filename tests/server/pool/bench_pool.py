"""What the pool's calls cost on the event loop: `python tests/server/pool/bench_pool.py [slots]`.

No bytes are touched. Slots are used in random order, which is the worst for finding neighbours.
"""

import random
import sys
import time
from collections.abc import Callable

from lmcache_qserver.pool import Pool, PoolMemory, Slot

UNIT = 4096


def full_pool(memory: PoolMemory, count: int) -> tuple[Pool, list[Slot]]:
    pool = Pool(memory)
    slots = []
    for owner in range(count):
        slot = pool.reserve(UNIT, owner).slot
        assert slot is not None
        pool.commit(slot)
        slots.append(slot)
    order = slots.copy()
    random.Random(1).shuffle(order)
    for slot in order:
        pool.touch(slot)
    return pool, slots


def measure(what: str, repeat: int, call: Callable[[], object]) -> None:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    times.sort()
    print(f"{what:58} median {times[repeat // 2] * 1e6:9.1f} us  max {times[-1] * 1e6:9.1f} us")


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with PoolMemory(count * UNIT) as memory:
        pool, slots = full_pool(memory, count)
        measure("touch", 10_000, lambda: pool.touch(slots[0]))

        def lease_and_release() -> None:
            pool.lease(slots[1])
            pool.release(slots[1])

        measure("lease + release", 10_000, lease_and_release)

        def replace(units: int) -> Callable[[], None]:
            def call() -> None:
                slot = pool.reserve(units * UNIT, "new").slot
                assert slot is not None
                pool.commit(slot)

            return call

        measure(f"reserve 1 + commit, {count} slots of 1, full", 10_000, replace(1))
        for units in (2, 4, 10):
            pool, slots = full_pool(memory, count)
            measure(f"reserve {units} + commit, {count} slots of 1, full", 100, replace(units))

        pool, slots = full_pool(memory, count)
        for slot in slots[::2]:
            pool.lease(slot)
        measure(
            "refused: half is free for eviction, every other slot leased",
            10,
            lambda: pool.reserve(2 * UNIT, "new"),
        )


if __name__ == "__main__":
    main()
