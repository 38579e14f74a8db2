"""The way of one store: reserve → copy and prove → commit or fail, until every chunk has an end.

    round:  reserve_write ─┬─ duplicates, no room ──────────────────▶ counted
                           ├─ writes ─▶ lane: copy ─┬─ proven ───────▶ committed, all of them
                           │                        └─ anything else ▶ failed, all of them; no further round
                           └─ shared ─▶ wait ─┬─ the other stored it ▶ duplicate
                                              └─ the other failed ───▶ next round

One's own writes come to their end before one waits for another's, so two stores that share chunks crosswise never wait
for each other. A round fails closed: one wrong row, and nothing of the round is committed. Chunks taken over from a
store that failed are a round of their own.

Every chunk of the store is counted exactly once: stored, duplicate, or refused under a reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.messages import StoreOutcome
from lmcache_qprotocol.reasons import LossReason, MissReason
from lmcache_qserver.copying import ChunkCopy, CopyFunction, Job, LaneError, StampFault
from lmcache_qserver.qstore.index import Index, Write
from lmcache_qserver.qstore.instance import Instance
from lmcache_qserver.qstore.store_check import CheckedStore, PlannedChunk

logger = logging.getLogger(__name__)


class StoreRun:
    """One store; `run` it once.

    Args:
        instance: whose ring it is.
        copy: what the lane runs; `copy_chunks` but in tests.
        copy_timeout_s: seconds for one round's copy, counted from its turn in the lane.
        now: seconds, monotonic; when the objects are created.
    """

    def __init__(
        self,
        index: Index,
        instance: Instance,
        store: CheckedStore,
        copy: CopyFunction,
        copy_timeout_s: float,
        now: float,
    ) -> None:
        self._index = index
        self._instance = instance
        self._store = store
        self._copy = copy
        self._copy_timeout_s = copy_timeout_s
        self._now = now
        self._chunks: dict[ObjectKey, PlannedChunk] = {}
        self._times: Counter[ObjectKey] = Counter()
        self._failure: LossReason | None = None
        self._stored = 0
        self._duplicate = 0
        self._refused: Counter[LossReason] = Counter()
        self._message = ""

    @property
    def outcome(self) -> StoreOutcome:
        """The account; complete when `run` is over."""
        return StoreOutcome(
            stored=self._stored,
            duplicate=self._duplicate,
            refused=dict(self._refused),
            message=self._message,
        )

    async def run(self) -> StoreOutcome:
        """Bring every chunk to its end. Raises nothing but CancelledError."""
        try:
            if self._instance.lane.hung:
                self._refuse_all(
                    "an earlier copy from this ring hangs: nothing is copied until it ends"
                )
            else:
                self._plan(await self._hashes())
                await self._store_chunks()
        except LaneError as error:
            self._refuse_rest(f"the store failed: {error}")
        except Exception as error:
            logger.exception("a store of instance %r failed", self._instance.instance_id)
            self._refuse_rest(f"the store failed: {error}")
        return self.outcome

    async def _hashes(self) -> Sequence[bytes]:
        if self._store.key.chunk_hashes:
            return self._store.key.chunk_hashes
        work = self._store.hashes_of_tokens
        return await self._instance.lane.run(work, timeout_s=self._copy_timeout_s)

    def _plan(self, hashes: Sequence[bytes]) -> None:
        """A key that occurs twice is written once, and counted as often as it occurs."""
        for chunk in self._store.chunks(hashes):
            self._chunks.setdefault(chunk.key, chunk)
            self._times[chunk.key] += 1

    async def _store_chunks(self) -> None:
        todo = list(self._chunks)
        while todo:
            reserved = self._index.reserve_write(todo, self._store.object_bytes)
            for key in reserved.duplicates:
                self._duplicate += self._times[key]
            if reserved.no_room:
                self._refuse(
                    reserved.no_room, LossReason.POOL_FULL, self._tell_no_room(reserved.no_room)
                )
            if reserved.writes:
                await self._write(reserved.writes)
            todo = [
                key for key, outcome in reserved.shared if not await self._is_shared(key, outcome)
            ]
            if self._failure is not None:
                for key in todo:
                    self._index.note_miss(key, MissReason(self._failure.value))
                self._refuse(todo, self._failure, self._message)
                return

    async def _is_shared(self, key: ObjectKey, outcome: asyncio.Future[bool]) -> bool:
        stored = await asyncio.shield(outcome)
        if stored:
            self._duplicate += self._times[key]
        return stored

    async def _write(self, writes: list[Write]) -> None:
        job: Job[StampFault | None] | None = None
        try:
            job = self._submit(writes)
            fault = await job.outcome
        except BaseException as error:
            over = None if job is None else job.over
            self._fail(writes, LossReason.COPY_FAILED, f"the copy failed: {_describe(error)}", over)
            if not isinstance(error, Exception):
                raise
            return
        if fault is not None:
            self._fail(writes, LossReason.STAMP_MISMATCH, self._tell_fault(writes, fault))
        elif self._instance.dead:
            self._fail(writes, LossReason.COPY_FAILED, "the instance was released during the copy")
        else:
            self._commit(writes)

    def _submit(self, writes: list[Write]) -> Job[StampFault | None]:
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
                )
            )
        return self._instance.lane.submit(
            self._copy, self._instance.ring, copies, timeout_s=self._copy_timeout_s
        )

    def _commit(self, writes: list[Write]) -> None:
        store = self._store
        # Last to first, so that a sequence is evicted from its end: only prefixes are of use.
        for write in reversed(writes):
            self._index.commit(
                write, store.description, store.rows, self._now, store.content, store.claimed
            )
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
        if self._store.key.chunk_hashes:
            for chunk in self._store.chunks(self._store.key.chunk_hashes):
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
