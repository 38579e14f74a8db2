"""Reading: who asks finds what the pool and the persistent tier hold, and leases it.

    lookup_q, identities_q, retrieve_q, fetch_q, release_q ─▶ reading ─▶ index, leases
    look_in_tier, bring_from_tier ─▶ persist/read_through, before the first two of them where the pool is not enough

Every method is called on the event loop and answers at once, but for the awaitables of the last two.
"""

from __future__ import annotations

from collections.abc import Awaitable, Hashable, Iterable

from lmcache_qprotocol.messages import (
    ChunkQuery,
    IdentitiesReply,
    IdentityQuery,
    LookupReply,
    RetrieveReply,
)
from lmcache_qserver.pool import Pool
from lmcache_qserver.qstore import reading
from lmcache_qserver.qstore.index import Index
from lmcache_qserver.qstore.leases import Leases
from lmcache_qserver.qstore.persist.found import NOWHERE_ELSE, Elsewhere
from lmcache_qserver.qstore.persist.persistence import Persistence
from lmcache_qserver.qstore.persist.read_through import Brought
from lmcache_qserver.qstore.read_totals import ReadTotals


class Reads:
    """All reads of one index.

    Args:
        persistence: where what is not in the pool may be; None: nowhere.

    Attributes:
        totals: what was found, and missed.
    """

    def __init__(
        self,
        index: Index,
        pool: Pool,
        leases: Leases,
        chunk_size: int,
        persistence: Persistence | None,
    ) -> None:
        self.totals = ReadTotals()
        self._index = index
        self._pool = pool
        self._leases = leases
        self._chunk_size = chunk_size
        self._persistence = persistence

    def look_in_tier(self, query: ChunkQuery) -> Awaitable[Elsewhere] | None:
        """What the persistent tier has of a query; await it before `lookup_q`. None: the pool alone answers.

        Raises:
            RequestError: bad_payload.
        """
        reading.check(query, self._chunk_size)
        if self._persistence is None or not self._persistence.reads.is_needed(query):
            return None
        return self._persistence.reads.look(query)

    def lookup_q(self, query: ChunkQuery, elsewhere: Elsewhere = NOWHERE_ELSE) -> LookupReply:
        """Which chunks are there, and why the others are not.

        Args:
            elsewhere: out of `look_in_tier`.
        """
        return reading.lookup(self._index, self.totals, query, self._chunk_size, elsewhere)

    def identities_q(self, query: IdentityQuery) -> IdentitiesReply:
        """Under which identities the asked tokens are stored, as their writers told."""
        return reading.identities(self._index, query, self._chunk_size)

    def bring_from_tier(self, client: Hashable, query: ChunkQuery) -> Awaitable[Brought] | None:
        """Bring into the pool what the persistent tier has of a query; await it before `retrieve_q`.

        None: the pool alone answers. What has been brought is leased until `retrieve_q`, or `let_go`, is told of it.

        Raises:
            RequestError: bad_payload.
        """
        reading.check(query, self._chunk_size)
        if self._persistence is None or not self._persistence.reads.is_needed(query):
            return None
        return self._persistence.reads.bring(query, self._leases.room(client))

    def let_go(self, brought: Brought) -> None:
        """Nobody retrieves what was brought."""
        if self._persistence is not None:
            self._persistence.reads.release(brought)

    def retrieve_q(
        self, client: Hashable, query: ChunkQuery, now: float, brought: Brought | None = None
    ) -> RetrieveReply:
        """Lease the chunks that are there to a client, up to its cap.

        Args:
            brought: out of `bring_from_tier`; let go by this call.
        """
        try:
            return reading.retrieve(
                self._index,
                self._leases,
                self.totals,
                client,
                query,
                self._chunk_size,
                now,
                brought,
            )
        finally:
            if brought is not None:
                self.let_go(brought)

    def fetch_q(
        self, client: Hashable, lease_id: int, place: int, part: tuple[int, int], now: float
    ) -> reading.PinnedBytes:
        """Bytes [a, b) of a leased chunk, pinned for as long as they are being sent.

        Raises:
            RequestError: unknown_lease, bad_payload.
        """
        return reading.fetch(self._pool, self._leases, client, lease_id, place, part, now)

    def release_q(self, client: Hashable, lease_ids: Iterable[int]) -> None:
        """Give leases back.

        Raises:
            RequestError(unknown_lease): some are over, or are not this client's; the others are released.
        """
        self._leases.release(client, lease_ids)

    def expire_leases(self, now: float) -> int:
        """End the leases whose time is over; how many there were. Call it every few seconds."""
        return self._leases.expire(now)
