"""Storing: what a worker offers goes through the gate, is copied and proven, and is told about.

    store_q ─▶ store_check (the gate) ─▶ store_run ─▶ index, copying/lane
    begin_upload_q, upload_part_q, end_upload_q ─▶ store_check ─▶ uploads ─▶ index, copying/lane

Every method is called on the event loop. What a caller has begun goes on to its end, whatever becomes of the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from lmcache_qprotocol.errors import RequestError
from lmcache_qprotocol.messages import (
    RangeKey,
    StoreOutcome,
    StoreProof,
    StoreResult,
    UploadReply,
)
from lmcache_qserver.events import EventBus, StoreEnd, StoreStart, StoreSubmitted
from lmcache_qserver.qstore.index import Index
from lmcache_qserver.qstore.instance import Instance, InstanceId, InstanceState
from lmcache_qserver.qstore.persist.persistence import Persistence
from lmcache_qserver.qstore.refusals import check_owner, shutting_down, unknown_instance
from lmcache_qserver.qstore.registry import Registry
from lmcache_qserver.qstore.store_check import CheckedStore, check_store, check_upload
from lmcache_qserver.qstore.store_run import StoreRun
from lmcache_qserver.qstore.stored_object import StoredObject
from lmcache_qserver.qstore.totals import StoreTotals
from lmcache_qserver.qstore.upload import Upload
from lmcache_qserver.qstore.uploads import Uploads


class Stores:
    """All stores of one index, out of rings and in messages.

    Args:
        on_stored: told of every object, after its commit.
        bus: told of every store.
        copy_timeout_s: seconds for one copy.
        inline_checksums: whether a store's answer waits for the checksums of its objects.
        persistence: what it holds is not stored again; None: there is none.
        clock: seconds, monotonic; measures how long stores take.

    Attributes:
        totals: what became of all.
        under_way: stores that are not over, uploads among them.
        draining: nothing new is begun.
    """

    def __init__(
        self,
        index: Index,
        registry: Registry,
        uploads: Uploads,
        totals: StoreTotals,
        under_way: set[asyncio.Future[Any]],
        *,
        on_stored: Callable[[StoredObject], None],
        bus: EventBus,
        chunk_size: int,
        copy_timeout_s: float,
        inline_checksums: bool,
        persistence: Persistence | None,
        clock: Callable[[], float],
    ) -> None:
        self.totals = totals
        self.under_way = under_way
        self.draining = False
        self.uploads = uploads
        self._index = index
        self._registry = registry
        self._on_stored = on_stored
        self._bus = bus
        self._chunk_size = chunk_size
        self._copy_timeout_s = copy_timeout_s
        self._inline_checksums = inline_checksums
        self._persistence = persistence
        self._clock = clock

    async def store_q(
        self,
        client: Hashable,
        key: RangeKey,
        instance_id: InstanceId,
        block_groups: Sequence[Sequence[int]],
        event: bytes,
        proof: StoreProof | None,
        now: float,
    ) -> StoreResult:
        """Copy whole chunks, or a piece of one, out of a ring; returns when the ring's blocks may be reused.

        One exception: after a copy that timed out (`copy_failed`) its thread may still *read* the blocks. What it reads
        then is thrown away, so they may be reused nevertheless.

        Raises:
            RequestError: shutting_down, unknown_instance, not_owner, bad_payload, blocks_not_covering,
                unsupported_transport; nothing was copied then.
        """
        return await asyncio.shield(
            self.begin_store_q(client, key, instance_id, block_groups, event, proof, now)
        )

    def begin_store_q(
        self,
        client: Hashable,
        key: RangeKey,
        instance_id: InstanceId,
        block_groups: Sequence[Sequence[int]],
        event: bytes,
        proof: StoreProof | None,
        now: float,
    ) -> asyncio.Task[StoreResult]:
        """`store_q` for who does not want to wait: what can be done at once is done, the task is the rest.

        Nobody may cancel the task: the store goes on to its end whatever its caller does.

        Raises:
            RequestError: as `store_q`.
        """
        try:
            instance = self._live_instance(client, instance_id)
            store = check_store(instance, key, block_groups, event, proof, self._chunk_size)
        except RequestError as error:
            self.totals.rejected_stores[error.code] += 1
            raise
        instance.last_seen = max(instance.last_seen, now)
        return self._begin_store(instance, store, now)

    def _live_instance(self, client: Hashable, instance_id: InstanceId) -> Instance:
        if self.draining:
            raise shutting_down()
        instance = self._registry.get(instance_id)
        if instance is None or instance.state is not InstanceState.LIVE:
            raise unknown_instance(instance_id)
        check_owner(instance, client)
        return instance

    def _begin_store(
        self, instance: Instance, store: CheckedStore, now: float
    ) -> asyncio.Task[StoreResult]:
        self.totals.submitted_stores += 1
        began = self._clock()
        run = StoreRun(
            self._index,
            instance,
            store,
            self._copy_timeout_s,
            now,
            self._on_stored,
            self._inline_checksums,
            self._persistence,
        )
        run.begin()
        loop = asyncio.get_running_loop()
        # Told while the first copy runs, not before it, and whatever becomes of the task.
        loop.call_soon(self._tell_begin, instance, store)
        task = loop.create_task(self._run_store(run))
        self._note_store(instance, task)
        # Later, so that the answer does not wait for who counts it.
        end = partial(self._end_store, instance, store, run, began)
        task.add_done_callback(lambda _: loop.call_soon(end))
        return task

    async def _run_store(self, run: StoreRun) -> StoreResult:
        return _result(await run.run())

    def _note_store(self, instance: Instance, task: asyncio.Task[StoreResult]) -> None:
        for stores in (self.under_way, instance.stores):
            stores.add(task)
            task.add_done_callback(stores.discard)

    def _tell_begin(self, instance: Instance, store: CheckedStore) -> None:
        for event in (StoreSubmitted, StoreStart):
            self._bus.publish(
                event(
                    session=store.key.request_id,
                    instance_id=instance.instance_id,
                    model_name=store.key.model_name,
                    device=instance.ring.device,
                )
            )

    def _end_store(
        self, instance: Instance, store: CheckedStore, run: StoreRun, began: float
    ) -> None:
        self.totals.copied_bytes += run.copied_bytes
        self.totals.copy_s += run.copy_s
        self._tell_end(instance, store, run.outcome, began)

    def _tell_end(
        self,
        instance: Instance,
        store: CheckedStore,
        outcome: StoreOutcome,
        began: float,
    ) -> None:
        nbytes = outcome.stored * store.object_bytes
        self.totals.add(outcome, nbytes)
        self._bus.publish(
            StoreEnd(
                session=store.key.request_id,
                instance_id=instance.instance_id,
                model_name=store.key.model_name,
                device=instance.ring.device,
                stored=outcome.stored,
                duplicate=outcome.duplicate,
                refused=outcome.refused,
                nbytes=nbytes,
                seconds=self._clock() - began,
            )
        )

    async def begin_upload_q(
        self,
        client: Hashable,
        key: RangeKey,
        instance_id: InstanceId,
        proof: StoreProof,
        now: float,
    ) -> UploadReply:
        """Begin a store of one chunk, or of a piece, whose bytes come by `upload_part_q` and `end_upload_q`.

        Raises:
            RequestError: shutting_down, unknown_instance, not_owner, bad_payload, unsupported_transport, busy.
        """
        try:
            instance = self._live_instance(client, instance_id)
            store = check_upload(instance, key, proof, self._chunk_size)
            instance.last_seen = max(instance.last_seen, now)
            began = self._clock()
            found = await self.uploads.begin(client, instance, store, self._clock)
            if self.draining and isinstance(found, Upload):
                # It has waited for another writer meanwhile, and nobody waits for it any more.
                self.uploads.give_up(found, "the server is shutting down")
                raise shutting_down()
        except RequestError as error:
            self.totals.rejected_stores[error.code] += 1
            raise
        self.totals.submitted_stores += 1
        self._tell_begin(instance, store)
        if isinstance(found, StoreOutcome):
            self._tell_end(instance, store, found, began)
            return UploadReply(result=_result(found))
        self.under_way.add(found.ended)
        found.ended.add_done_callback(self.under_way.discard)
        found.ended.add_done_callback(
            lambda ended: self._tell_end(instance, store, ended.result(), began)
        )
        return UploadReply(upload_id=found.upload_id, nbytes=found.nbytes)

    async def upload_part_q(
        self, client: Hashable, upload_id: int, offset: int, part: memoryview, now: float
    ) -> None:
        """The next bytes of an upload; returns when they are in place.

        Raises:
            RequestError: unknown_upload, bad_payload.
        """
        upload = self.uploads.get(client, upload_id)
        upload.instance.last_seen = max(upload.instance.last_seen, now)
        await self.uploads.part(upload, offset, part)

    def end_upload_q(
        self, client: Hashable, upload_id: int, stamps: memoryview, now: float
    ) -> asyncio.Task[StoreResult]:
        """The stamps of an upload, which prove it. Nobody may cancel the task, see `begin_store_q`.

        Raises:
            RequestError: unknown_upload, bad_payload.
        """
        upload = self.uploads.get(client, upload_id)
        self.uploads.check_complete(upload, stamps)
        task = asyncio.get_running_loop().create_task(self._seal(upload, stamps, now))
        self._note_store(upload.instance, task)
        return task

    async def _seal(self, upload: Upload, stamps: memoryview, now: float) -> StoreResult:
        return _result(await self.uploads.seal(upload, stamps, now))

    def expire_uploads(self, now: float) -> int:
        """Give up the uploads whose time is over; how many there were. Call it every second or so."""
        return self.uploads.expire(now)


def _result(outcome: StoreOutcome) -> StoreResult:
    return StoreResult(b"", not outcome.refused, outcome)
