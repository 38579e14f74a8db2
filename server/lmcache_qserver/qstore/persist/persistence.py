"""The persistent tier as the store's front sees it: what is written to it, read from it, and known of it.

    commit ─▶ note_stored ─▶ write_behind ─▶ the store            lookup, retrieve ─▶ read_through ─▶ the store
    a store of what is not in the pool ─▶ is_held, confirm        at the start ─▶ survey
    every few minutes, and when it is too full ─▶ sweep

The server begins without a store and serves; `attach` comes when it is open. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.messages import FlushReply
from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.qstore.index import Index
from lmcache_qserver.qstore.inventory import Kind, kind_of_report, report_of
from lmcache_qserver.qstore.persist.held import Held, Holding
from lmcache_qserver.qstore.persist.l2_search import find_name, names_of
from lmcache_qserver.qstore.persist.purging import Purge
from lmcache_qserver.qstore.persist.read_counts import MISSES
from lmcache_qserver.qstore.persist.read_through import ReadThrough
from lmcache_qserver.qstore.persist.records import name_of_stored
from lmcache_qserver.qstore.persist.survey import learn_layouts
from lmcache_qserver.qstore.persist.sweep import Swept, inspect, sweep
from lmcache_qserver.qstore.persist.write_behind import ERRORS, LOST, UNWANTED, WriteBehind
from lmcache_qserver.qstore.stored_object import StoredObject
from lmcache_qserver.status_report import ModelReport, TierReport
from lmcache_qserver.tier import ChunkStore, PutOutcome, TierError
from lmcache_qserver.tier.threads import Threads
from lmcache_qserver.upkeep.purge import purge

logger = logging.getLogger(__name__)

PROVING_THREADS = 2
CONFIRM_S = 1.0
"""How long a store waits for the answer whether the tier has its chunks; then they are copied."""
PIN_SHARE = 0.25
"""Of the pool: what may wait to be written and can't be evicted meanwhile."""
PIN_COUNT = 1024
LOCAL = "file:"


@dataclass(frozen=True, kw_only=True)
class PersistSettings:
    """What a server's operator decides.

    Attributes:
        url: of the store, for people.
        timeout_s: longest time until an operation of the store is answered.
        max_bytes: what a store of files may hold; 0: no limit.
        ttl_s: age at which objects go, here and there; 0: never.
    """

    url: str
    timeout_s: float = 60.0
    max_bytes: int = 0
    ttl_s: float = 0.0


class Persistence:
    """One store behind one index.

    Args:
        is_busy: whether stores are under way.
        committed: told of every object that has come into the pool from the store.
        drop_corrupt: forgets an object whose bytes have changed in memory.
        wall: seconds since the epoch.
        clock: seconds, monotonic.

    Attributes:
        surveyed, survey_s: whether what lay there at the start is known, and the seconds that this took.
        foreign: names found there that no key has.
    """

    def __init__(
        self,
        index: Index,
        settings: PersistSettings,
        *,
        chunk_size: int,
        is_busy: Callable[[], bool],
        committed: Callable[[StoredObject], None],
        drop_corrupt: Callable[[StoredObject], None],
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.held = Held()
        self.swept = Swept()
        self.surveyed = False
        self.survey_s = 0.0
        self.foreign = 0
        self.writes = WriteBehind(
            index,
            self.held,
            is_busy,
            drop_corrupt,
            pin_bytes=int(index.pool.usage().capacity_bytes * PIN_SHARE),
            pin_count=PIN_COUNT,
            wall=wall,
            clock=clock,
        )
        self.reads = ReadThrough(
            index,
            self.held,
            committed,
            chunk_size=chunk_size,
            ttl_s=settings.ttl_s,
            wall=wall,
            clock=clock,
        )
        self._index = index
        self._clock = clock
        self._wall = wall
        self._store: ChunkStore | None = None
        self._threads: Threads | None = None
        self._surveying: asyncio.Task[None] | None = None
        self._learnt = asyncio.Event()

    @property
    def state(self) -> str:
        """opening, ready, or failing."""
        if self._store is None:
            return "opening"
        return "failing" if self.writes.is_failing or self.reads.is_failing else "ready"

    @property
    def is_local(self) -> bool:
        """Whether its objects are files."""
        return self.settings.url.startswith(LOCAL)

    def attach(self, store: ChunkStore) -> None:
        """The store is open; closed by `close`."""
        self._store = store
        self._threads = Threads("l2-proofs", PROVING_THREADS, self.settings.timeout_s)
        self.writes.attach(store, self._threads)
        self.reads.attach(store)
        self._surveying = asyncio.get_running_loop().create_task(self._survey(store))

    async def learnt(self) -> None:
        """Wait until readers can be told which models the store has, or that this can't be found out now."""
        await self._learnt.wait()

    # --- storing ------------------------------------------------------------------------------------------------

    def note_stored(self, stored: StoredObject) -> None:
        """A store has committed an object."""
        self.writes.note(stored)

    def forgotten(self, stored: StoredObject, reason: MissReason) -> None:
        """An object has left the index."""
        self.writes.forgotten(stored, reason)

    def is_held(self, key: ObjectKey, parent: bytes) -> bool:
        """Whether the store has it, as far as is known: a hint for `confirm`."""
        return any(name in self.held for name in names_of(key, parent))

    async def confirm(self, wanted: Iterable[tuple[ObjectKey, bytes]]) -> set[ObjectKey]:
        """Which of these (key, hash of the chunk before) the store has, for sure; none if it does not say so soon."""
        store, items = self._store, list(wanted)
        if store is None or self.reads.is_failing:
            return set()
        questions = [find_name(store, key, parent) for key, parent in items]
        try:
            names = await asyncio.wait_for(
                asyncio.gather(*questions, return_exceptions=True), CONFIRM_S
            )
        except asyncio.TimeoutError:
            self.reads.note_unanswered()
            return set()
        for (key, parent), name in zip(items, names, strict=True):
            if name is None:
                for gone in names_of(key, parent):
                    self.held.forget(gone)
        return {key for (key, _), name in zip(items, names, strict=True) if isinstance(name, str)}

    async def flush(self, timeout_s: float) -> FlushReply:
        """Wait until everything stored is written. What is lost already can't be: that is said beside it."""
        persisted = await self.writes.drain(timeout_s)
        waiting = self.writes.waiting + self.writes.writing
        lost = sum(self.writes.lost[reason] for reason in UNWANTED)
        if persisted:
            return FlushReply(persisted=True, waiting=0, lost=lost)
        if self.state == "ready":
            why = f"not all was written in {timeout_s:g} s"
        else:
            why = f"the persistent tier is {self.state}: see l2 in /status, and the server's log"
        return FlushReply(persisted=False, waiting=waiting, message=why, lost=lost)

    async def settle(self, what: Purge) -> None:
        """Wait until nothing of this is being written or read; what waits to be written went with its object."""
        await asyncio.gather(self.writes.settle(what.is_family), self.reads.settle(what.is_family))

    async def purge(self, what: Purge) -> tuple[int, int, str]:
        """Delete it in the store, in quarantine, too: objects, bytes, and what went wrong."""
        if self._store is None:
            return 0, 0, "the persistent tier is not open yet: purge again when it is"
        try:
            counts = await purge(self._store, what.model_name, what.salt)
        except TierError as error:
            return 0, 0, f"the persistent tier: {error}; some may be left, purge again"
        await self.go_through()
        nbytes = counts.nbytes + counts.quarantined_bytes
        return counts.objects + counts.quarantined, nbytes, ""

    # --- the whole ----------------------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> bool:
        """At the end: wait until everything stored is written; False when something is left, the log says how much."""
        writes = self.writes
        try:
            return await writes.drain(timeout_s)
        finally:  # whoever is in a hurry cancels this
            if writes.waiting or writes.writing:
                logger.warning(
                    "%d objects (%d bytes) were not written to the persistent tier in time and will be gone; "
                    "%d are being written",
                    writes.waiting,
                    writes.waiting_bytes,
                    writes.writing,
                )

    async def close(self, timeout_s: float) -> bool:
        """End everything; call it last. False: something still runs, and touches the pool's memory."""
        if self._surveying is not None:
            self._surveying.cancel()
            await asyncio.gather(self._surveying, return_exceptions=True)
        await self.reads.close()
        ended = await self.writes.close(timeout_s)
        if self._threads is not None:
            ended = await self._threads.close(timeout_s) and ended
        if self._store is not None:
            ended = await self._store.close(timeout_s) and ended
        return ended

    def models(self, here: Sequence[ModelReport]) -> list[ModelReport]:
        """What is stored, in the pool or in the store.

        Args:
            here: what the pool holds.
        """
        kinds = self.held.kinds()
        reports = {kind_of_report(report): report for report in here}
        for kind, holding in kinds.items():
            report = reports.get(kind) or _only_there(kind, holding)
            known = kind in reports or holding.objects or not self.is_local or not self.surveyed
            if report is not None and known:
                reports[kind] = msgspec.structs.replace(
                    report, persisted=holding.objects, persisted_bytes=holding.nbytes
                )
        return [reports[kind] for kind in sorted(reports)]

    def summary(self) -> TierReport:
        """For `/status`."""
        writes, reads = self.writes, self.reads
        return TierReport(
            url=self.settings.url,
            state=self.state,
            submitted=writes.submitted,
            written=writes.outcomes[PutOutcome.WRITTEN],
            written_bytes=writes.written_bytes,
            already_there=writes.outcomes[PutOutcome.ALREADY_THERE],
            waiting=writes.waiting,
            waiting_bytes=writes.waiting_bytes,
            writing=writes.writing,
            pinned_bytes=writes.pinned_bytes,
            lost={reason: writes.lost[reason] for reason in LOST},
            errors={code: writes.errors[code] for code in ERRORS},
            brought=reads.counts.brought,
            brought_bytes=reads.counts.brought_bytes,
            fetching=reads.fetching,
            absent=reads.counts.absent,
            missed={reason: reads.counts.missed[reason] for reason in MISSES},
            quarantined=reads.counts.quarantined,
            objects=len(self.held),
            bytes=self.held.nbytes,
            indexing=self._store is not None and not self.surveyed,
            index_s=self.survey_s,
            foreign=self.foreign,
            swept={"expired": self.swept.expired, "surplus": self.swept.surplus},
            swept_bytes=self.swept.nbytes,
        )

    async def go_through(self) -> None:
        """See what lies there, and delete what is too old or too much. Call it every few minutes.

        Of files all; of a bucket nothing: who shares it gives it lifecycle rules.
        """
        if self._store is None or not self.is_local:
            return
        settings = self.settings
        try:
            keep = bool(settings.ttl_s) or self.is_too_full()
            inspected = await inspect(self._store, self.held, keep_entries=keep)
            if not keep and self.is_too_full():
                # Seldom, but for the first time: entries take memory, which is not needed to count.
                inspected = await inspect(self._store, self.held, keep_entries=True)
            self.foreign = inspected.foreign
            gone = await sweep(
                self._store,
                self.held,
                inspected,
                max_bytes=settings.max_bytes,
                ttl_s=settings.ttl_s,
                wall=self._wall(),
                swept=self.swept,
            )
        except TierError as error:
            logger.warning("the persistent tier could not be gone through: %s", error)
            return
        if gone:
            for stored in self._index.objects():
                stored.persisted = stored.persisted and name_of_stored(stored) not in gone

    def is_too_full(self) -> bool:
        """Whether it holds more than it may."""
        limit = self.settings.max_bytes
        return self.is_local and bool(limit) and self.held.nbytes > limit

    async def _survey(self, store: ChunkStore) -> None:
        began = self._clock()
        try:
            await learn_layouts(store, self.held)
        except TierError as error:
            logger.warning("the persistent tier could not be looked through: %s", error)
        finally:
            self._learnt.set()
        await self.go_through()
        self.surveyed = True
        self.survey_s = self._clock() - began


def _only_there(kind: Kind, holding: Holding) -> ModelReport | None:
    """A model of which the pool holds nothing."""
    if holding.description is None:
        return None
    return report_of(kind, holding.description, chunks=0, pieces=0, nbytes=0)
