"""One object out of the persistent tier into the pool.

    header ─▶ room in the pool ─▶ data, straight into the slot ─▶ proof ─┬─ whole, unchanged, the key's ─▶ committed
                                                                        └─ anything else ─▶ miss, counted, quarantined

A header comes first, because only the object knows its length, and because room must not be made (something else
evicted) for what is not there. Nothing is told to a reader before it is proven. Who wants an object that is on its way
shares the transfer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from lmcache_qprotocol.keys import KeyFamily, ObjectKey
from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.pool import Pool
from lmcache_qserver.qstore.index import Index, Write
from lmcache_qserver.qstore.persist.asking import Asking
from lmcache_qserver.qstore.persist.found import Reasons
from lmcache_qserver.qstore.persist.held import Held
from lmcache_qserver.qstore.persist.l2_search import read_head
from lmcache_qserver.qstore.persist.read_counts import ReadCounts
from lmcache_qserver.qstore.persist.records import content_of_header, description_of, place_of
from lmcache_qserver.qstore.stored_object import StoredObject
from lmcache_qserver.tier import ChunkStore, Corrupt, NotThere, TierError, Transfer
from lmcache_qserver.tier.format import Header, Proof

logger = logging.getLogger(__name__)

Fetched = StoredObject | MissReason | None
"""What has come of a fetch: the object; why not, though it is there or may be; None: it is not there."""


class Fetching:
    """Fetches into one index; event loop only.

    Args:
        committed: told of every object that has come into the pool.
        chunk_size: tokens per chunk of this server.
        ttl_s: age at which an object is not given any more; 0: never.
        wall: seconds since the epoch.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        index: Index,
        held: Held,
        asking: Asking,
        counts: ReadCounts,
        committed: Callable[[StoredObject], None],
        *,
        chunk_size: int,
        ttl_s: float,
        wall: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._held = held
        self._asking = asking
        self._counts = counts
        self._committed = committed
        self._chunk_size = chunk_size
        self._ttl_s = ttl_s
        self._wall = wall
        self._clock = clock
        self._under_way: dict[ObjectKey, asyncio.Task[Fetched]] = {}

    def __len__(self) -> int:
        """Objects that are being brought."""
        return len(self._under_way)

    async def fetch(self, key: ObjectKey, names: Sequence[str]) -> Fetched:
        """The object, in the pool. It is not leased: who wants to keep it does that before anything else.

        Args:
            names: where it may lie, in this order.
        """
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._run(key, names))
            self._under_way[key] = task
            task.add_done_callback(lambda _task: self._under_way.pop(key))
        # Shielded: others may wait for the same object, and a transfer goes on to its end in any case.
        return await asyncio.shield(task)

    async def settle(self, which: Callable[[KeyFamily], bool]) -> None:
        """Wait until none of these is being brought."""
        fetches = [task for key, task in self._under_way.items() if which(key.family)]
        await asyncio.gather(*map(asyncio.shield, fetches), return_exceptions=True)

    @property
    def _pool(self) -> Pool:
        return self._index.pool

    async def _run(self, key: ObjectKey, names: Sequence[str]) -> Fetched:
        reasons: Reasons = {}
        for name in names:
            question = partial(self._load_from, key=key, name=name)
            fetched = await self._asking.ask(question, None, reasons, key)
            if fetched is not None:
                return fetched
            if reasons:
                return reasons[key]
        self._counts.absent += 1
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
        self._counts.brought += 1
        self._counts.brought_bytes += header.data_bytes
        self._held.add(name, header.address, nbytes)
        self._held.describe(header)
        self._committed(stored)
        return stored

    def _miss(self, reason: MissReason) -> MissReason:
        self._counts.missed[reason.value] += 1
        return reason

    async def _put_aside(self, store: ChunkStore, name: str, error: Corrupt) -> None:
        """A store that can't (it is mounted read-only, say) keeps it under its name, and can be read for all that."""
        logger.error("an object of the persistent tier is corrupt, and is put aside: %s", error)
        try:
            await store.quarantine(name)
        except TierError as refused:
            logger.warning("the corrupt object stays where it is: %s", refused)
            return
        self._counts.quarantined += 1
        self._held.forget(name)


def _over(transfer: Transfer[None]) -> asyncio.Future[None] | None:
    """Done when nobody touches the buffer any more; None: nobody does now."""
    if transfer.is_over:
        return None
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    transfer.when_over(lambda: over.set_result(None))
    return over
