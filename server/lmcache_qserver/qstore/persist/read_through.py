"""What readers ask for and the pool has not: out of the persistent tier into the pool, or looked for there.

A query is worked through from its beginning, in waves that grow: a sequence that is not there costs one question, a
long one that is there is fetched many chunks at a time. It ends at the first chunk that is not there whole, however it
is put together: what lies behind a gap is of little use, and is looked for in the pool only.

A reader who may not hold all of it gets as much as he may, and what comes next is brought while he reads.

What a query has found or brought is leased until its answer is given, so that the end of a sequence never evicts its
beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from lmcache_qprotocol.keys import KeyFamily, ObjectKey
from lmcache_qprotocol.messages import ChunkQuery, PartialChunk
from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.pool import Pool, Slot
from lmcache_qserver.qstore.by_tokens import Candidate
from lmcache_qserver.qstore.cover import cover
from lmcache_qserver.qstore.index import Index
from lmcache_qserver.qstore.persist.asking import Asking
from lmcache_qserver.qstore.persist.fetching import Fetching
from lmcache_qserver.qstore.persist.found import Elsewhere
from lmcache_qserver.qstore.persist.held import Held
from lmcache_qserver.qstore.persist.l2_search import (
    find_by_tokens,
    find_name,
    names_of,
)
from lmcache_qserver.qstore.persist.query_places import (
    QueryPlace,
    content_asked,
    places_of,
    wave_sizes,
    waves,
)
from lmcache_qserver.qstore.persist.read_counts import ReadCounts
from lmcache_qserver.qstore.stored_object import StoredObject
from lmcache_qserver.tier import ChunkStore

T = TypeVar("T")


@dataclass(slots=True)
class Brought:
    """What a query holds until it is answered.

    Attributes:
        slots: leased.
        nbytes: their spans.
        stop: the first place of the query that the reader has no room for; None: none.
        elsewhere: why what is there was not brought.
    """

    slots: list[Slot] = field(default_factory=list)
    nbytes: int = 0
    stop: int | None = None
    elsewhere: Elsewhere = field(default_factory=Elsewhere)


class ReadThrough:
    """Reads of one index.

    Args:
        committed: told of every object that has come into the pool.
        chunk_size: tokens per chunk of this server.
        ttl_s: age at which an object is not given any more; 0: never.
        wall: seconds since the epoch.
        clock: seconds, monotonic.

    Attributes:
        counts: what came of it.
    """

    def __init__(
        self,
        index: Index,
        held: Held,
        committed: Callable[[StoredObject], None],
        *,
        chunk_size: int,
        ttl_s: float,
        wall: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self.counts = ReadCounts()
        self._index = index
        self._chunk_size = chunk_size
        self._asking = Asking(self.counts, clock)
        self._fetching = Fetching(
            index,
            held,
            self._asking,
            self.counts,
            committed,
            chunk_size=chunk_size,
            ttl_s=ttl_s,
            wall=wall,
            clock=clock,
        )
        self._prefetching: asyncio.Task[None] | None = None

    @property
    def _pool(self) -> Pool:
        return self._index.pool

    @property
    def fetching(self) -> int:
        """Objects that are being brought."""
        return len(self._fetching)

    @property
    def is_failing(self) -> bool:
        """Whether the store is not asked, because it did not answer."""
        return self._asking.breaker.is_open

    def attach(self, store: ChunkStore) -> None:
        """The store is open."""
        self._asking.attach(store)

    def note_unanswered(self) -> None:
        """A store has waited for an answer in vain: that concerns readers, too."""
        self._asking.note_unanswered()

    def is_needed(self, query: ChunkQuery) -> bool:
        """Whether the pool alone can't answer the query."""
        return any(not self._is_whole(place, query.family) for place in places_of(query))

    # --- a query ------------------------------------------------------------------------------------------------

    async def bring(self, query: ChunkQuery, room: int) -> Brought:
        """Bring what the query asks for into the pool, and lease it and what is there already.

        Args:
            room: bytes that the reader may hold; one object is brought whatever its size.

        Returns:
            What `release` gives back.
        """
        places = places_of(query)
        brought = await self._bring_places(places, query.family, room)
        if brought.stop is not None:
            self._prefetch([place for place in places if place.index >= brought.stop], query, room)
        return brought

    async def _bring_places(
        self, places: Sequence[QueryPlace], family: KeyFamily, room: int
    ) -> Brought:
        brought = Brought()
        try:
            done, sizes = 0, wave_sizes()
            while done < len(places):
                if done and brought.nbytes >= room:
                    brought.stop = places[done].index
                    break
                most = max(1, (room - brought.nbytes) * done // max(1, brought.nbytes))
                wave = places[done : done + min(next(sizes), most)]
                for place in wave:
                    self._hold(self._present(place, family), brought)
                whole = await _all_ended(
                    self._bring_place(place, family, brought) for place in wave
                )
                if not all(whole):
                    self._note_full(wave[whole.index(False)], brought, is_first=not done)
                    _note_unasked(places, wave[-1].index, brought.elsewhere)
                    break
                done += len(wave)
        except BaseException:
            self.release(brought)
            raise
        return brought

    def _note_full(self, place: QueryPlace, brought: Brought, *, is_first: bool) -> None:
        """What finds no room beside what is held already is there for the reader's next question."""
        full = [
            key for key, why in brought.elsewhere.reasons.items() if why is MissReason.POOL_FULL
        ]
        if full and not is_first:
            brought.stop = place.index
            for key in full:
                del brought.elsewhere.reasons[key]

    def _prefetch(self, places: Sequence[QueryPlace], query: ChunkQuery, room: int) -> None:
        """Bring what the reader will ask for next, while it reads; one such run at a time."""
        if self._prefetching is None or self._prefetching.done():
            bringing = self._bring_places(places, query.family, room)
            self._prefetching = asyncio.get_running_loop().create_task(self._run_prefetch(bringing))

    async def _run_prefetch(self, bringing: Awaitable[Brought]) -> None:
        self.release(await bringing)

    def release(self, brought: Brought) -> None:
        """End the leases of a query; the beginning of a sequence becomes the most recently used."""
        for slot in reversed(brought.slots):
            self._pool.release(slot)
        brought.slots.clear()

    async def settle(self, which: Callable[[KeyFamily], bool]) -> None:
        """Wait until none of these is being brought."""
        await self._fetching.settle(which)

    async def close(self) -> None:
        """Ask no more."""
        await self._asking.close()

    async def look(self, query: ChunkQuery) -> Elsewhere:
        """What of the query is there and not in the pool; brings nothing."""
        elsewhere = Elsewhere()
        places = places_of(query)
        for wave in waves(places):
            whole = await asyncio.gather(
                *(self._look_for(place, query.family, elsewhere) for place in wave)
            )
            if not all(whole):
                _note_unasked(places, wave[-1].index, elsewhere)
                break
        return elsewhere

    def _is_whole(self, place: QueryPlace, family: KeyFamily) -> bool:
        """Whether the pool holds all of a chunk that is asked for."""
        if place.key is not None and self._index.get(place.key) is not None:
            return True
        if place.partial is None:
            return False
        return not self._index.cover(family, content_asked(place.partial)).gaps

    def _present(self, place: QueryPlace, family: KeyFamily) -> list[StoredObject]:
        """What the pool has of a chunk."""
        keys = [] if place.key is None else [place.key]
        if place.partial is not None and (place.key is None or self._index.get(place.key) is None):
            chosen = self._index.cover(family, content_asked(place.partial)).chosen
            keys += [candidate.key for candidate in chosen]
        found = [self._index.get(key) for key in keys]
        return [stored for stored in found if stored is not None]

    def _hold(self, objects: Sequence[StoredObject], brought: Brought) -> None:
        for stored in objects:
            self._pool.lease(stored.slot)
            brought.slots.append(stored.slot)
            brought.nbytes += stored.slot.span

    async def _bring_place(self, place: QueryPlace, family: KeyFamily, brought: Brought) -> bool:
        """Whether all that is asked of this chunk is in the pool now."""
        if self._is_whole(place, family):
            return True
        if place.key is not None and await self._bring_key(
            place.key, names_of(place.key, place.parent), brought
        ):
            return True
        if place.partial is None or _is_unavailable(place, brought.elsewhere):
            return False
        names = dict[ObjectKey, str]()
        for candidate in await self._best(place.partial, family, names, brought.elsewhere):
            if self._index.get(candidate.key) is None:
                await self._bring_key(candidate.key, (names[candidate.key],), brought)
        return self._is_whole(place, family)

    async def _best(
        self,
        asked: PartialChunk,
        family: KeyFamily,
        names: dict[ObjectKey, str],
        elsewhere: Elsewhere,
    ) -> Sequence[Candidate]:
        """The objects, here or there, that together hold most of the asked rows.

        Args:
            names: is filled with those of the objects there.
            elsewhere: is told when the store can't say.
        """
        question = partial(find_by_tokens, family=family, asked=asked, chunk_size=self._chunk_size)
        found = await self._asking.ask(question, None, {}, None)
        if found is None:
            elsewhere.unavailable.add(asked.index)
            found = []
        names.update({candidate.key: name for candidate, name in found})
        here = self._index.candidates(family, content_asked(asked))
        there = [candidate for candidate, _ in found]
        return cover([*here, *there], len(asked.tokens)).chosen

    async def _look_for(self, place: QueryPlace, family: KeyFamily, elsewhere: Elsewhere) -> bool:
        if self._is_whole(place, family):
            return True
        if place.key is not None:
            find = partial(find_name, key=place.key, parent=place.parent)
            if await self._asking.ask(find, None, elsewhere.reasons, place.key) is not None:
                elsewhere.keys.add(place.key)
                return True
        if place.partial is None or _is_unavailable(place, elsewhere):
            return False
        names = dict[ObjectKey, str]()
        chosen = await self._best(place.partial, family, names, elsewhere)
        elsewhere.candidates[place.index] = [one for one in chosen if one.key in names]
        return not cover(chosen, len(place.partial.tokens)).gaps

    async def _bring_key(self, key: ObjectKey, names: Sequence[str], brought: Brought) -> bool:
        """Whether the object is in the pool now; held then."""
        fetched = await self._fetching.fetch(key, names)
        if isinstance(fetched, StoredObject) and self._index.get(key) is fetched:
            self._hold([fetched], brought)
            return True
        if fetched is not None:
            why = fetched if isinstance(fetched, MissReason) else MissReason.POOL_FULL
            brought.elsewhere.reasons[key] = why
        return False


async def _all_ended(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, or the first error, but not before all have ended: none takes a lease behind that."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[T]", results)


def _is_unavailable(place: QueryPlace, elsewhere: Elsewhere) -> bool:
    """Whether the store did not answer for the whole chunk: it is not asked for its parts, too."""
    if place.key is None or elsewhere.reasons.get(place.key) is not MissReason.UNAVAILABLE:
        return False
    elsewhere.unavailable.add(place.index)
    return True


def _note_unasked(places: Sequence[QueryPlace], last: int, elsewhere: Elsewhere) -> None:
    """What lies behind a chunk that could not be asked for was not asked for either, and may be there.

    Args:
        last: the place up to which the query has come.
    """
    if not elsewhere.unavailable and MissReason.UNAVAILABLE not in elsewhere.reasons.values():
        return
    for place in places:
        if place.index > last:
            elsewhere.unavailable.add(place.index)
