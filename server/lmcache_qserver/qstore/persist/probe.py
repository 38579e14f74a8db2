"""Asking a store that can't be read whether it can be again, while no reader does.

Without it a store that is back would count as failing until the next reader comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lmcache_qserver.qstore.persist.breaker import Breaker
from lmcache_qserver.tier import ChunkStore, TierError
from lmcache_qserver.tier.paths import VERSION

NAME = f"{VERSION}/probe"
"""Of no object."""
SHORTEST_PAUSE_S = 0.05


class Probe:
    """Of one breaker; event loop only.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, breaker: Breaker, clock: Callable[[], float]) -> None:
        self._breaker = breaker
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def begin(self, store: ChunkStore) -> None:
        """The breaker has opened: ask whenever it allows that, until it is closed."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(store))

    async def close(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, store: ChunkStore) -> None:
        while self._breaker.is_open:
            await asyncio.sleep(max(SHORTEST_PAUSE_S, self._breaker.wait_s(self._clock())))
            if self._breaker.is_open and self._breaker.allows(self._clock()):
                await self._ask(store)

    async def _ask(self, store: ChunkStore) -> None:
        try:
            await store.head(NAME)
        except TierError:
            self._breaker.failed(self._clock())
        else:
            self._breaker.worked()
