"""Questions to a store that may not answer: nobody waits for one that has failed too often."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.qstore.persist.breaker import Breaker
from lmcache_qserver.qstore.persist.found import Reasons
from lmcache_qserver.qstore.persist.probe import Probe
from lmcache_qserver.qstore.persist.read_counts import ReadCounts
from lmcache_qserver.tier import ChunkStore, TierError, Unavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Asking:
    """Of one store; event loop only.

    Args:
        clock: seconds, monotonic.

    Attributes:
        breaker: open while nothing is asked.
    """

    def __init__(self, counts: ReadCounts, clock: Callable[[], float]) -> None:
        self.breaker = Breaker()
        self._counts = counts
        self._clock = clock
        self._store: ChunkStore | None = None
        self._probe = Probe(self.breaker, clock)

    def attach(self, store: ChunkStore) -> None:
        """The store is open; until then it does not answer."""
        self._store = store

    async def close(self) -> None:
        """Ask no more."""
        await self._probe.close()

    async def ask(
        self,
        question: Callable[[ChunkStore], Awaitable[T]],
        default: T,
        reasons: Reasons,
        key: ObjectKey | None,
    ) -> T:
        """The store's answer; the default when it can't say, and then the reason under the key."""
        if self._store is not None and self.breaker.allows(self._clock()):
            try:
                answer = await question(self._store)
                self.breaker.worked()
                return answer
            except TierError as error:
                self._note_error(error)
        self._counts.missed["unavailable"] += 1
        if key is not None:
            reasons[key] = MissReason.UNAVAILABLE
        return default

    def note_unanswered(self) -> None:
        """A store has waited for an answer in vain: that concerns readers, too."""
        self._note_error(Unavailable("no answer to a store that asks what is there"))

    def _note_error(self, error: TierError) -> None:
        was_open = self.breaker.is_open
        self.breaker.failed(self._clock())
        if self.breaker.is_open and not was_open:
            logger.error(
                "the persistent tier can't be read: %s; nothing is looked for there for a while",
                error,
            )
            assert self._store is not None
            self._probe.begin(self._store)
