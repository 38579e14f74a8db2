"""How fast objects go to a bucket and come back: GB/s (1e9 bytes), through the adapter that the server uses.

    put         header and checksum, one request; until the buffer is the caller's again
    get         into a buffer that is there, in ranges of 16 MiB, and proven by its checksum
    ... four    four at a time, as many as the server writes

Seconds of processor time per GB are this process's, kernel included, not the object store's.
`python -m benchmarks.tier_s3 --l2 s3://BUCKET/PREFIX`, with AWS_* as for the server; what it writes it deletes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.tier import Objects
from lmcache_qserver.tier import ChunkStore, open_store
from lmcache_qserver.tier.paths import name_of

SIZES_MIB = (4, 16, 64)
AT_A_TIME = 4

Work = Callable[[int], Coroutine[Any, Any, None]]


async def timed(work: Work, first: int, count: int, nbytes: int, at_a_time: int) -> dict[str, Any]:
    """Work on objects first, first + 1, ...: GB/s of the median turn, of the slowest, and processor time.

    Args:
        count: turns; each takes `at_a_time` objects of `nbytes`.
    """
    speeds = []
    cpu_s = time.process_time()
    for turn in range(count):
        began = time.perf_counter()
        await asyncio.gather(
            *(work(first + turn * at_a_time + number) for number in range(at_a_time))
        )
        speeds.append(nbytes * at_a_time / 1e9 / (time.perf_counter() - began))
    cpu_s = time.process_time() - cpu_s
    return {
        "gb_per_s": statistics.median(speeds),
        "slowest_gb_per_s": min(speeds),
        "cpu_s_per_gb": cpu_s / (nbytes * at_a_time * count / 1e9),
    }


async def measure(url: str, chunk_mib: int, rounds: int) -> dict[str, Any]:
    """Objects of one size."""
    objects = Objects(chunk_mib, Path())
    readers = [Objects(chunk_mib, Path()) for _ in range(AT_A_TIME)]
    store = await open_store(url)
    total = 1 + rounds * (1 + AT_A_TIME)

    async def put(index: int) -> None:
        await objects.put(store, index)

    async def get(index: int) -> None:
        await readers[index % AT_A_TIME].get(store, index)

    try:
        await put(0)  # connections are made
        await get(0)
        figures: dict[str, Any] = {}
        for what, work in (("put", put), ("get", get)):
            alone = await timed(work, 1, rounds, objects.nbytes, 1)
            four = await timed(work, 1 + rounds, rounds, objects.nbytes, AT_A_TIME)
            figures |= {what: alone, f"{what}_four": four}
    finally:
        await delete(store, objects, total)
        await store.close(10.0)
    return figures


async def delete(store: ChunkStore, objects: Objects, total: int) -> None:
    """What was written."""
    await store.delete([name_of(objects.key(index)) for index in range(total)])


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--l2", required=True, help="s3://BUCKET/PREFIX")
    parser.add_argument("--rounds", type=int, default=8, help="turns per size and kind")
    options = parser.parse_args()
    for chunk_mib in SIZES_MIB:
        loop = uvloop.new_event_loop()
        figures = loop.run_until_complete(measure(options.l2, chunk_mib, options.rounds))
        loop.close()
        print(f"{chunk_mib} MiB", json.dumps(figures, indent=1), flush=True)


if __name__ == "__main__":
    main()
