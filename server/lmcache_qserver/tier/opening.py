"""Opening a store that may not answer yet.

A store that says no (rights, credentials, no such bucket) at the first attempt is an operator's mistake, and told as
such. One that does not answer is tried again, for as long as it takes. Later no answer ends the attempts: a bucket may
be made, and rights given, while the server serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from lmcache_qserver.tier.chunk_store import ChunkStore
from lmcache_qserver.tier.default_url import default_l2_url
from lmcache_qserver.tier.errors import Refused, TierError
from lmcache_qserver.tier.open_store import open_store
from lmcache_qserver.tier.url import check_url, file_path

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


def prepare_url(url: str) -> str:
    """The URL of the store, its default if it is empty; the default's parent folder is made.

    Raises:
        OSError: it can't be.
        Refused: there is no default.
    """
    if url:
        return url
    default = default_l2_url()
    Path(file_path(default)).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return default


class TierOpening:
    """See the head of this file.

    Args:
        timeout_s: longest time until an operation of the store is answered.
        clock: seconds, monotonic.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock

    async def open(self, url: str, attach: Callable[[ChunkStore], None]) -> None:
        """Open the store and hand it over; ends only then.

        Raises:
            Refused: the first answer was no.
            ValueError: not such a URL.
        """
        # Around the page cache: the pool is the cache already, and copying into another one costs the stores that run
        # beside it more than the disk does (benchmarks/tier_stores.py).
        is_file = check_url(url) == "file"
        began = self._clock()
        pause_s = FIRST_PAUSE_S
        attempts = 0
        while True:
            attempts += 1
            try:
                attach(await open_store(url, timeout_s=self._timeout_s, direct=is_file))
                break
            except TierError as error:
                if isinstance(error, Refused) and attempts == 1:
                    raise
                logger.warning(
                    "the persistent tier can't be opened; tried again in %g s: %s", pause_s, error
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        logger.info("the persistent tier %s is open after %.2f s", url, self._clock() - began)
