"""Bringing objects out of the persistent tier into the pool, for a reader who asks for them.

    header ─▶ room in the pool ─▶ data, straight into the slot ─▶ proof ─┬─ whole, unchanged, the key's ─▶ committed
                                                                        └─ anything else ─▶ miss, counted, quarantined

A header comes first, because only the object knows its length, and because room must not be made (something else
evicted) for what is not there. Nothing is told to a reader before it is proven.

A query is worked through from its beginning, in waves that grow: a sequence that is not there costs one question, a
long one that is there is fetched many chunks at a time. It ends at the first chunk that is not there whole, however it
is put together: what lies behind a gap is of little use, and is looked for in the pool only.

A reader who may not hold all of it gets as much as he may, and what comes next is brought while he reads.

What a query has found or brought is leased until its answer is given, so that the end of a sequence never evicts its
beginning. Several queries that want one object share one transfer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from lmcache_qprotocol.hashing import NONE_HASH
from lmcache_qprotocol.keys import KeyFamily, ObjectKey
from lmcache_qprotocol.messages import ChunkQuery, PartialChunk
from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.pool import Pool, Slot
from lmcache_qserver.qstore.by_tokens import Candidate, Content, content_of
from lmcache_qserver.qstore.cover import cover
from lmcache_qserver.qstore.index import Index, Write
from lmcache_qserver.qstore.persist.breaker import Breaker
from lmcache_qserver.qstore.persist.found import Elsewhere, Reasons
from lmcache_qserver.qstore.persist.held import Held
from lmcache_qserver.qstore.persist.l2_search import (
    find_by_tokens,
    find_name,
    names_of,
    read_head,
)
from lmcache_qserver.qstore.persist.probe import Probe
from lmcache_qserver.qstore.persist.records import content_of_header, description_of, place_of
from lmcache_qserver.qstore.stored_object import StoredObject
from lmcache_qserver.tier import ChunkStore, Corrupt, NotThere, TierError, Transfer, Unavailable
from lmcache_qserver.tier.format import Header, Proof

logger = logging.getLogger(__name__)

WAVES = (1, 4, 16)
"""Chunks of a query that are looked for at a time; the last for all further ones."""
MISSES = ("corrupt", "expired", "pool_full", "unavailable")
"""Why an object that is, or may be, there is not brought."""

T = TypeVar("T")
Fetched = StoredObject | MissReason | None
"""What has come of a fetch: the object; why not, though it is there or may be; None: it is not there."""


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


@dataclass(frozen=True, slots=True)
class _Place:
    """One chunk of a query.

    Attributes:
        key: of the whole chunk; None where the query is about a part of it.
        partial: the same chunk by its tokens, if the query has it.
    """

    index: int
    key: ObjectKey | None
    parent: bytes
    partial: PartialChunk | None


class ReadThrough:
    """Reads of one index.

    Args:
        committed: told of every object that has come into the pool.
        chunk_size: tokens per chunk of this server.
        ttl_s: age at which an object is not given any more; 0: never.
        wall: seconds since the epoch.
        clock: seconds, monotonic.

    Attributes:
        brought, brought_bytes: objects that came into the pool, and their bytes.
        absent: objects that were asked for and are not there.
        missed: objects by `MISSES`.
        quarantined: objects that were put aside.
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
        self.brought = 0
        self.brought_bytes = 0
        self.absent = 0
        self.missed: Counter[str] = Counter()
        self.quarantined = 0
        self.breaker = Breaker()
        self._index = index
        self._held = held
        self._committed = committed
        self._chunk_size = chunk_size
        self._ttl_s = ttl_s
        self._wall = wall
        self._clock = clock
        self._store: ChunkStore | None = None
        self._prefetching: asyncio.Task[None] | None = None
        self._fetching: dict[ObjectKey, asyncio.Task[Fetched]] = {}
        self._probe = Probe(self.breaker, clock)

    @property
    def _pool(self) -> Pool:
        return self._index.pool

    @property
    def fetching(self) -> int:
        """Objects that are being brought."""
        return len(self._fetching)

    def attach(self, store: ChunkStore) -> None:
        """The store is open."""
        self._store = store

    def is_needed(self, query: ChunkQuery) -> bool:
        """Whether the pool alone can't answer the query."""
        return any(not self._is_whole(place, query.family) for place in _places(query))

    # --- a query ------------------------------------------------------------------------------------------------

    async def bring(self, query: ChunkQuery, room: int) -> Brought:
        """Bring what the query asks for into the pool, and lease it and what is there already.

        Args:
            room: bytes that the reader may hold; one object is brought whatever its size.

        Returns:
            What `release` gives back.
        """
        places = _places(query)
        brought = await self._bring_places(places, query.family, room)
        if brought.stop is not None:
            self._prefetch([place for place in places if place.index >= brought.stop], query, room)
        return brought

    async def _bring_places(
        self, places: Sequence[_Place], family: KeyFamily, room: int
    ) -> Brought:
        brought = Brought()
        try:
            done, sizes = 0, _wave_sizes()
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

    def _note_full(self, place: _Place, brought: Brought, *, is_first: bool) -> None:
        """What finds no room beside what is held already is there for the reader's next question."""
        full = [
            key for key, why in brought.elsewhere.reasons.items() if why is MissReason.POOL_FULL
        ]
        if full and not is_first:
            brought.stop = place.index
            for key in full:
                del brought.elsewhere.reasons[key]

    def _prefetch(self, places: Sequence[_Place], query: ChunkQuery, room: int) -> None:
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
        fetches = [task for key, task in self._fetching.items() if which(key.family)]
        await asyncio.gather(*map(asyncio.shield, fetches), return_exceptions=True)

    async def close(self) -> None:
        """Ask for nothing of its own accord any more."""
        await self._probe.close()

    async def look(self, query: ChunkQuery) -> Elsewhere:
        """What of the query is there and not in the pool; brings nothing."""
        elsewhere = Elsewhere()
        places = _places(query)
        for wave in _waves(places):
            whole = await asyncio.gather(
                *(self._look_for(place, query.family, elsewhere) for place in wave)
            )
            if not all(whole):
                _note_unasked(places, wave[-1].index, elsewhere)
                break
        return elsewhere

    def _is_whole(self, place: _Place, family: KeyFamily) -> bool:
        """Whether the pool holds all of a chunk that is asked for."""
        if place.key is not None and self._index.get(place.key) is not None:
            return True
        if place.partial is None:
            return False
        return not self._index.cover(family, _content(place.partial)).gaps

    def _present(self, place: _Place, family: KeyFamily) -> list[StoredObject]:
        """What the pool has of a chunk."""
        keys = [] if place.key is None else [place.key]
        if place.partial is not None and (place.key is None or self._index.get(place.key) is None):
            chosen = self._index.cover(family, _content(place.partial)).chosen
            keys += [candidate.key for candidate in chosen]
        found = [self._index.get(key) for key in keys]
        return [stored for stored in found if stored is not None]

    def _hold(self, objects: Sequence[StoredObject], brought: Brought) -> None:
        for stored in objects:
            self._pool.lease(stored.slot)
            brought.slots.append(stored.slot)
            brought.nbytes += stored.slot.span

    async def _bring_place(self, place: _Place, family: KeyFamily, brought: Brought) -> bool:
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
        found = await self._ask(question, None, {}, None)
        if found is None:
            elsewhere.unavailable.add(asked.index)
            found = []
        names.update({candidate.key: name for candidate, name in found})
        here = self._index.candidates(family, _content(asked))
        there = [candidate for candidate, _ in found]
        return cover([*here, *there], len(asked.tokens)).chosen

    async def _look_for(self, place: _Place, family: KeyFamily, elsewhere: Elsewhere) -> bool:
        if self._is_whole(place, family):
            return True
        if place.key is not None:
            find = partial(find_name, key=place.key, parent=place.parent)
            if await self._ask(find, None, elsewhere.reasons, place.key) is not None:
                elsewhere.keys.add(place.key)
                return True
        if place.partial is None or _is_unavailable(place, elsewhere):
            return False
        names = dict[ObjectKey, str]()
        chosen = await self._best(place.partial, family, names, elsewhere)
        elsewhere.candidates[place.index] = [one for one in chosen if one.key in names]
        return not cover(chosen, len(place.partial.tokens)).gaps

    async def _ask(
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
        self.missed["unavailable"] += 1
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

    # --- an object ----------------------------------------------------------------------------------------------

    async def _bring_key(self, key: ObjectKey, names: Sequence[str], brought: Brought) -> bool:
        """Whether the object is in the pool now; held then."""
        task = self._fetching.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._fetch(key, names))
            self._fetching[key] = task
            task.add_done_callback(lambda _task: self._fetching.pop(key))
        # Shielded: others may wait for the same object, and a transfer goes on to its end in any case.
        fetched = await asyncio.shield(task)
        if isinstance(fetched, StoredObject) and self._index.get(key) is fetched:
            self._hold([fetched], brought)
            return True
        if fetched is not None:
            why = fetched if isinstance(fetched, MissReason) else MissReason.POOL_FULL
            brought.elsewhere.reasons[key] = why
        return False

    async def _fetch(self, key: ObjectKey, names: Sequence[str]) -> Fetched:
        reasons: Reasons = {}
        for name in names:
            question = partial(self._load_from, key=key, name=name)
            fetched = await self._ask(question, None, reasons, key)
            if fetched is not None:
                return fetched
            if reasons:
                return reasons[key]
        self.absent += 1
        return None

    async def _load_from(self, store: ChunkStore, key: ObjectKey, name: str) -> Fetched:
        """The object under this name. What is corrupt is read twice: it may have been replaced meanwhile."""
        for last in (False, True):
            try:
                header, head = await read_head(store, name)
                return await self._load(store, key, name, header, head)
            except NotThere:
                return None
            except Corrupt as error:
                if last:
                    await self._put_aside(store, name, error)
        # Who asks again, after the object is gone, is told the same.
        self._index.note_miss(key, MissReason.CORRUPT)
        return self._miss(MissReason.CORRUPT)

    async def _load(
        self, store: ChunkStore, key: ObjectKey, name: str, header: Header, head: bytes
    ) -> Fetched:
        if header.chunk_size != self._chunk_size or (header.piece and not header.tokens):
            return None  # not of this server's making; its own would have another name, or tokens
        if self._ttl_s and header.created + self._ttl_s < self._wall():
            return self._miss(MissReason.EXPIRED)
        before = self._index.miss_reason(key)
        reserved = self._index.reserve_write([key], header.data_bytes)
        if reserved.no_room:
            return self._miss(MissReason.POOL_FULL)
        if reserved.shared:
            await asyncio.shield(reserved.shared[0][1])
            return self._index.get(key)
        if reserved.duplicates:
            return self._index.get(key)
        (write,) = reserved.writes
        view = memoryview(self._pool.view(write.slot))  # type: ignore[arg-type]  # numpy's stubs, Python 3.10
        proof = Proof(memoryview(head), key)
        getting = store.get_into(name, [view], offset=len(head), observe=proof.update)
        try:
            await getting
            proof.finish()
        except BaseException:
            self._index.fail([write], before, _over(getting))
            raise
        return self._commit(write, name, header, head)

    def _commit(self, write: Write, name: str, header: Header, head: bytes) -> StoredObject:
        age = max(0.0, self._wall() - header.created)
        stored = self._index.commit(
            write,
            description_of(header),
            header.rows,
            self._clock() - age,
            content_of_header(header),
            place=place_of(header),
        )
        stored.persisted = True
        nbytes = len(head) + header.data_bytes
        self.brought += 1
        self.brought_bytes += header.data_bytes
        self._held.add(name, header.address, nbytes)
        self._held.describe(header)
        self._committed(stored)
        return stored

    def _miss(self, reason: MissReason) -> MissReason:
        self.missed[reason.value] += 1
        return reason

    async def _put_aside(self, store: ChunkStore, name: str, error: Corrupt) -> None:
        """A store that can't (it is mounted read-only, say) keeps it under its name, and can be read for all that."""
        logger.error("an object of the persistent tier is corrupt, and is put aside: %s", error)
        try:
            await store.quarantine(name)
        except TierError as refused:
            logger.warning("the corrupt object stays where it is: %s", refused)
            return
        self.quarantined += 1
        self._held.forget(name)


def _places(query: ChunkQuery) -> list[_Place]:
    """All chunks of a query, in order."""
    partials = {one.index: one for one in query.partials}
    parent = query.parent_hash or NONE_HASH
    places = []
    for index, name in enumerate(query.chunk_hashes):
        key = ObjectKey(family=query.family, chunk_hash=name)
        places.append(_Place(index, key, parent, partials.pop(index, None)))
        parent = name
    places += [_Place(index, None, one.parent_hash, one) for index, one in partials.items()]
    return places


def _wave_sizes() -> Iterator[int]:
    return itertools.chain(WAVES, itertools.repeat(WAVES[-1]))


def _waves(places: Sequence[_Place]) -> Iterator[Sequence[_Place]]:
    first = 0
    for size in _wave_sizes():
        if first >= len(places):
            return
        yield places[first : first + size]
        first += size


async def _all_ended(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, or the first error, but not before all have ended: none takes a lease behind that."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[T]", results)


def _is_unavailable(place: _Place, elsewhere: Elsewhere) -> bool:
    """Whether the store did not answer for the whole chunk: it is not asked for its parts, too."""
    if place.key is None or elsewhere.reasons.get(place.key) is not MissReason.UNAVAILABLE:
        return False
    elsewhere.unavailable.add(place.index)
    return True


def _note_unasked(places: Sequence[_Place], last: int, elsewhere: Elsewhere) -> None:
    """What lies behind a chunk that could not be asked for was not asked for either, and may be there.

    Args:
        last: the place up to which the query has come.
    """
    if not elsewhere.unavailable and MissReason.UNAVAILABLE not in elsewhere.reasons.values():
        return
    for place in places:
        if place.index > last:
            elsewhere.unavailable.add(place.index)


def _content(asked: PartialChunk) -> Content:
    return content_of(asked.parent_hash, asked.tokens, asked.items)


def _over(transfer: Transfer[None]) -> asyncio.Future[None] | None:
    """Done when nobody touches the buffer any more; None: nobody does now."""
    if transfer.is_over:
        return None
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    transfer.when_over(lambda: over.set_result(None))
    return over
