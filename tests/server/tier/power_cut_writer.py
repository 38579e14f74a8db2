"""Puts objects until it is killed, and prints the index of each that has been acknowledged."""

from __future__ import annotations

import asyncio
import sys

from lmcache_qserver.tier import open_store
from tests.server.tier.power_cut_objects import object_parts

WIDTH = 4
"""Puts under way at a time."""


async def main(url: str, direct: bool) -> None:
    store = await open_store(url, direct=direct)

    async def write(first: int) -> None:
        for index in range(first, 1 << 20, WIDTH):
            name, parts = object_parts(index)
            await store.put(name, parts)
            print(index, flush=True)

    await asyncio.gather(*(write(first) for first in range(WIDTH)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] == "direct"))
