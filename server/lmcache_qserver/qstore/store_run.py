"""The way of one store: reserve → copy and prove → commit or fail, until every chunk has an end.

    what lies in the persistent tier, and not in the pool ─────────▶ duplicate
    round:  reserve_write ─┬─ duplicates, no room ──────────────────▶ counted
                           ├─ writes ─▶ lane: copy ─┬─ proven ───────▶ committed, all of them
                           │                        └─ anything else ▶ failed, all of them; no further round
                           └─ shared ─▶ wait ─┬─ the other stored it ▶ duplicate
                                              └─ the other failed ───▶ next round

One's own writes come to their end before one waits for another's, so two stores that share chunks crosswise never wait
for each other. A round fails closed: one wrong row, and nothing of the round is committed. Chunks taken over from a
store that failed are a round of their own.

Every chunk of the store is counted exactly once: stored, duplicate, or refused under a reason.

`begin` goes as far as can be gone at once: as a rule the first copy is in its lane when it returns, which saves large
copies a turn of the event loop. `run` does the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.messages import StoreOutcome
from lmcache_qprotocol.reasons import LossReason, MissReason
from lmcache_qserver.copying import ChunkCopy, Job, LaneError, LaneTimeout, StampFault
from lmcache_qserver.copying.checked_copy import Copied, checked_copy
from lmcache_qserver.copying.checksum import Digest
from lmcache_qserver.log_fields import told
from lmcache_qserver.qstore.index import Index, Reserved, Write
from lmcache_qserver.qstore.instance import Instance
from lmcache_qserver.qstore.persist.persistence import Persistence
from lmcache_qserver.qstore.store_check import CheckedStore, PlannedChunk
from lmcache_qserver.qstore.stored_object import Place, StoredObject

logger = logging.getLogger(__name__)


class _Round(NamedTuple):
    """A round that has begun."""

    reserved: Reserved
    job: Job[Copied] | None
    """The copy of `reserved.writes`; None when there are none, or they have failed already."""


class StoreRun:
    """One store; `begin` it, then `run` it, once.

    Args:
        instance: whose ring it is.
        copy_timeout_s: seconds for one round's copy, counted from its turn in the lane.
        now: seconds, monotonic; when the objects are created.
        committed: told of every object.
        inline_checksums: whether the lane makes them.
        persistence: what it holds is not stored again; None: there is none.

    Attributes:
        copied_bytes, copy_s: what copies that came back have moved, proven or not, and the seconds that they took.
    """

    def __init__(
        self,
        index: Index,
        instance: Instance,
        store: CheckedStore,
        copy_timeout_s: float,
        now: float,
        committed: Callable[[StoredObject], None],
        inline_checksums: bool,
        persistence: Persistence | None = None,
    ) -> None:
        self._index = index
        self._instance = instance
        self._store = store
        self._copy_timeout_s = copy_timeout_s
        self._now = now
        self._committed = committed
        self._inline_checksums = inline_checksums
        self._persistence = persistence
        self._chunks: dict[ObjectKey, PlannedChunk] = {}
        self._times: Counter[ObjectKey] = Counter()
        self._failure: LossReason | None = None
        self._stored = 0
        self._duplicate = 0
        self._refused: Counter[LossReason] = Counter()
        self._message = ""
        self.copied_bytes = 0
        self.copy_s = 0.0
        self._round: _Round | None = None
        self._over = False

    @property
    def outcome(self) -> StoreOutcome:
        """The account; complete when `run` is over."""
        return StoreOutcome(
            stored=self._stored,
            duplicate=self._duplicate,
            refused=dict(self._refused),
            message=self._message,
        )

    def begin(self) -> None:
        """The part that need not wait; call it before `run`. Raises nothing."""
        try:
            if self._instance.lane.hung:
                self._refuse_all(
                    "an earlier copy from this ring hangs: nothing is copied until it ends"
                )
                self._over = True
            elif chain := self._store.told_chain:
                self._plan(chain)
                if not self._held_elsewhere():
                    self._round = self._begin_round(list(self._chunks))
        except Exception as error:  # noqa: BLE001 - logged there
            self._give_up(error)

    async def run(self) -> StoreOutcome:
        """Bring every chunk to its end. Raises nothing but CancelledError."""
        try:
            if self._round is None and not self._over:
                if not self._chunks:
                    self._plan(await self._chain())
                self._round = self._begin_round(await self._not_persisted())
            while self._round is not None:
                todo = await self._end_round(self._round)
                self._round = self._begin_round(todo) if todo else None
        except Exception as error:  # noqa: BLE001 - logged there
            self._give_up(error)
        return self.outcome

    def _give_up(self, error: Exception) -> None:
        if not isinstance(error, LaneError):
            logger.error(
                "a store failed", exc_info=error, extra=told(instance=self._instance.instance_id)
            )
        self._refuse_rest(f"the store failed: {error}")
        self._over = True

    async def _chain(self) -> Sequence[bytes]:
        work = self._store.chain_of_tokens
        return await self._instance.lane.run(work, timeout_s=self._copy_timeout_s)

    def _plan(self, chain: Sequence[bytes]) -> None:
        """A key that occurs twice is written once, and counted as often as it occurs."""
        for chunk in self._store.chunks(chain):
            self._chunks.setdefault(chunk.key, chunk)
            self._times[chunk.key] += 1

    def _held_elsewhere(self) -> list[tuple[ObjectKey, bytes]]:
        """Chunks that are not in the pool and, as far as is known, in the persistent tier; each with its parent."""
        if self._persistence is None:
            return []
        return [
            (key, chunk.parent)
            for key, chunk in self._chunks.items()
            if self._index.get(key) is None and self._persistence.is_held(key, chunk.parent)
        ]

    async def _not_persisted(self) -> list[ObjectKey]:
        """What is to be copied; what the persistent tier says it has is stored already."""
        held = self._held_elsewhere()
        if not held or self._persistence is None:
            return list(self._chunks)
        there = await self._persistence.confirm(held)
        for key in there:
            self._duplicate += self._times[key]
        return [key for key in self._chunks if key not in there]

    def _begin_round(self, keys: list[ObjectKey]) -> _Round:
        reserved = self._index.reserve_write(keys, self._store.object_bytes)
        for key in reserved.duplicates:
            self._duplicate += self._times[key]
        if reserved.no_room:
            self._refuse(
                reserved.no_room, LossReason.POOL_FULL, self._tell_no_room(reserved.no_room)
            )
        job = None
        if reserved.writes:
            try:
                job = self._submit(reserved.writes)
            except Exception as error:  # noqa: BLE001 - said in the outcome
                self._fail_copy(reserved.writes, error, None)
        return _Round(reserved, job)

    async def _end_round(self, this: _Round) -> list[ObjectKey]:
        """Wait for the round's copy, then for the chunks that others write; those that are to be tried again."""
        if this.job is not None:
            await self._end_copy(this.reserved.writes, this.job)
        todo = [
            key for key, outcome in this.reserved.shared if not await self._is_shared(key, outcome)
        ]
        if self._failure is None:
            return todo
        for key in todo:
            self._index.note_miss(key, MissReason(self._failure.value))
        self._refuse(todo, self._failure, self._message)
        return []

    async def _is_shared(self, key: ObjectKey, outcome: asyncio.Future[bool]) -> bool:
        stored = await asyncio.shield(outcome)
        if stored:
            self._duplicate += self._times[key]
        return stored

    async def _end_copy(self, writes: list[Write], job: Job[Copied]) -> None:
        try:
            copied = await job.outcome
        except BaseException as error:
            if isinstance(error, LaneTimeout):
                self._instance.ring.abort()
            self._fail_copy(writes, error, job.over)
            if not isinstance(error, Exception):
                raise
            return
        self.copied_bytes += sum(write.slot.nbytes for write in writes)
        self.copy_s += job.ran_s
        if copied.fault is not None:
            message = self._tell_fault(writes, copied.fault)
            self._fail(writes, LossReason.STAMP_MISMATCH, message)
        elif self._instance.dead:
            self._fail(writes, LossReason.COPY_FAILED, "the instance was released during the copy")
        else:
            self._commit(writes, copied)

    def _fail_copy(
        self, writes: list[Write], error: BaseException, over: asyncio.Future[None] | None
    ) -> None:
        self._fail(writes, LossReason.COPY_FAILED, f"the copy failed: {_describe(error)}", over)

    def _submit(self, writes: list[Write]) -> Job[Copied]:
        copies = []
        first, end = self._store.rows
        layout, block_size = self._store.description.layout, self._store.description.block_size
        for write in writes:
            chunk = self._chunks[write.key]
            target = self._index.pool.view(write.slot)
            copies.append(
                ChunkCopy(
                    chunk.block_ids,
                    chunk.first_stamp,
                    target,
                    skip=first % block_size,
                    rows=end - first,
                    layers=len(layout.layer_ids),
                    digest=Digest() if self._inline_checksums else None,
                    offset=write.slot.offset,
                )
            )
        return self._instance.lane.submit(
            checked_copy,
            self._instance.ring,
            copies,
            self._store.event,
            timeout_s=self._copy_timeout_s,
        )

    def _commit(self, writes: list[Write], copied: Copied) -> None:
        store = self._store
        # Last to first, so that a sequence is evicted from its end: only prefixes are of use.
        for write, checksum in reversed(list(zip(writes, copied.checksums, strict=True))):
            chunk = self._chunks[write.key]
            stored = self._index.commit(
                write,
                store.description,
                store.rows,
                self._now,
                store.content,
                store.claimed,
                Place(chunk.parent, chunk.start - store.rows[0]),
            )
            stored.checksum = checksum
            self._committed(stored)
            self._stored += 1
            self._duplicate += self._times[write.key] - 1

    def _fail(
        self,
        writes: list[Write],
        reason: LossReason,
        message: str,
        over: asyncio.Future[None] | None = None,
    ) -> None:
        self._index.fail(writes, MissReason(reason.value), over)
        self._failure = reason
        self._refuse([write.key for write in writes], reason, message)

    def _refuse(self, keys: Iterable[ObjectKey], reason: LossReason, message: str) -> None:
        for key in keys:
            self._refused[reason] += self._times[key]
            self._message = self._message or message

    def _refuse_all(self, message: str) -> None:
        for chunk in self._store.chunks(self._store.told_chain):
            self._index.note_miss(chunk.key, MissReason.COPY_FAILED)
        self._refuse_rest(message)

    def _refuse_rest(self, message: str) -> None:
        counted = self._stored + self._duplicate + sum(self._refused.values())
        self._refused[LossReason.COPY_FAILED] += self._store.num_chunks - counted
        self._message = self._message or message

    def _tell_no_room(self, keys: Sequence[ObjectKey]) -> str:
        needed = self._store.object_bytes
        capacity = self._index.pool.usage().capacity_bytes
        if needed > capacity:
            return (
                f"one chunk of {needed} bytes is larger than the whole pool of {capacity}: start the server with a "
                "larger --pool-bytes or a smaller --chunk-size"
            )
        return (
            f"the pool has no room for {len(keys)} chunks of {needed} bytes: "
            "everything in it is being written or read"
        )

    def _tell_fault(self, writes: list[Write], fault: StampFault) -> str:
        position = self._chunks[writes[fault.chunk].key].start + fault.row
        return (
            f"the row of position {position} has stamp {fault.found} instead of {fault.expected}: it was not "
            "written, or its ring block was given away before the copy was over"
        )


def _describe(error: BaseException) -> str:
    if isinstance(error, LaneError):
        return str(error)
    return f"{type(error).__name__}: {error}"
