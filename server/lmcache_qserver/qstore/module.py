"""The store's front: everything that the wire and the daemon call.

    register, unregister, reap, client_gone ─▶ lifecycle ─▶ registry
    store_q ─▶ store_check (the gate) ─▶ store_run ─▶ index, copying/lane
    begin_upload_q, upload_part_q, end_upload_q ─▶ store_check ─▶ uploads ─▶ index, copying/lane
    lookup_q, identities_q, retrieve_q, fetch_q, release_q ─▶ reading ─▶ index, leases

Every method is called on the event loop. Those that are not `async` decide and answer at once. Those that are may be
cancelled by their caller at any time: what they have begun goes on to its end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.keys import FEATURE_SUFFIX
from lmcache_qprotocol.messages import (
    ChunkQuery,
    FlushReply,
    IdentitiesReply,
    IdentityQuery,
    LookupReply,
    PurgeReply,
    RangeKey,
    RetrieveReply,
    RingDescription,
    StoreOutcome,
    StoreProof,
    StoreResult,
    UploadReply,
    VerifyReply,
    WorkerReport,
)
from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.copying import RingSource
from lmcache_qserver.events import EventBus, StoreEnd, StoreStart, StoreSubmitted
from lmcache_qserver.pool import Pool
from lmcache_qserver.qstore import reading
from lmcache_qserver.qstore.checksums import Checksums
from lmcache_qserver.qstore.coverage import Coverage
from lmcache_qserver.qstore.index import Index
from lmcache_qserver.qstore.instance import Instance, InstanceId, InstanceState
from lmcache_qserver.qstore.leases import Leases
from lmcache_qserver.qstore.lifecycle import Lifecycle
from lmcache_qserver.qstore.persist.found import NOWHERE_ELSE, Elsewhere
from lmcache_qserver.qstore.persist.persistence import Persistence, PersistSettings
from lmcache_qserver.qstore.persist.purging import Purge
from lmcache_qserver.qstore.persist.read_through import Brought
from lmcache_qserver.qstore.read_totals import ReadTotals
from lmcache_qserver.qstore.registry import Registry
from lmcache_qserver.qstore.release_cause import ReleaseCause
from lmcache_qserver.qstore.ring_use import ring_use
from lmcache_qserver.qstore.store_check import CheckedStore, check_store, check_upload
from lmcache_qserver.qstore.store_run import StoreRun
from lmcache_qserver.qstore.stored_object import StoredObject
from lmcache_qserver.qstore.totals import StoreTotals
from lmcache_qserver.qstore.upload import Upload
from lmcache_qserver.qstore.uploads import Uploads
from lmcache_qserver.status_report import (
    InstanceReport,
    LanesReport,
    ModelReport,
    PoolReport,
    RingLayoutReport,
    StoreReport,
)

TTL_SHARE = 0.1
"""Of the age at which objects go: how much later they may."""
GO_THROUGH_S = 600.0
"""How often it is looked what lies in the persistent tier: other servers, and people, write and delete there, too."""


class QStoreModule:
    """All state of the store; every method is called on the event loop.

    Args:
        pool: where objects lie; the module is its only user.
        bus: told about every store.
        chunk_size: tokens per chunk.
        features: what is stored.
        reap_timeout_s, registration_grace_s: see `Registry`.
        copy_timeout_s: seconds for one copy, and for a release to wait for the lane.
        lease_timeout_s: seconds after which a lease ends by itself.
        inline_checksums: whether a store's answer waits for the checksums of its objects (checksums.py).
        max_lease_share: part of the pool that one client may lease, in (0, 1]; and reserve by unfinished uploads.
        upload_timeout_s: seconds after which an upload that is not complete is given up.
        ttl_s: age at which objects go; 0: never.
        persist: the persistent tier; None: there is none. `persistence.attach` opens it.
        clock: seconds, monotonic; measures how long stores take.
        wall: seconds since the epoch.

    Raises:
        ValueError: a feature is unknown, or a number is out of range.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        bus: EventBus,
        chunk_size: int,
        features: tuple[str, ...] = ("transfer_query",),
        reap_timeout_s: float = 120.0,
        registration_grace_s: float = 3600.0,
        copy_timeout_s: float = 30.0,
        lease_timeout_s: float = 60.0,
        max_lease_share: float = 0.25,
        inline_checksums: bool = False,
        upload_timeout_s: float = 60.0,
        persist: PersistSettings | None = None,
        ttl_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        _check_settings(chunk_size, features, copy_timeout_s, lease_timeout_s, max_lease_share)
        if upload_timeout_s <= 0:
            raise ValueError(f"upload_timeout_s must be positive, not {upload_timeout_s}")
        self.features = features
        self.chunk_size = chunk_size
        self.index = Index(pool)
        self.registry = Registry(reap_timeout_s, registration_grace_s)
        cap_bytes = int(pool.usage().capacity_bytes * max_lease_share)
        self.leases = Leases(pool, cap_bytes, lease_timeout_s)
        self._pool = pool
        self._bus = bus
        self._copy_timeout_s = copy_timeout_s
        self._clock = clock
        self._coverage = Coverage()
        self._totals = StoreTotals()
        self._reads = ReadTotals()
        self._stores: set[asyncio.Future[Any]] = set()
        """Stores under way, uploads among them."""
        self._draining = False
        self._ttl_s = ttl_s
        self._gone_through = clock()
        self._inline_checksums = inline_checksums
        self._checksums = Checksums(
            self.index, lambda: bool(self._stores), self._totals.add_nonfinite
        )
        self.persistence = self._build_persistence(persist, wall)
        self.uploads = Uploads(
            self.index,
            cap_bytes=cap_bytes,
            timeout_s=upload_timeout_s,
            copy_timeout_s=copy_timeout_s,
            on_stored=self._note_stored,
            inline_checksums=inline_checksums,
            persistence=self.persistence,
        )
        self._lifecycle = Lifecycle(
            self.registry, chunk_size, features, copy_timeout_s, self.uploads.instance_leaves
        )

    def _build_persistence(
        self, settings: PersistSettings | None, wall: Callable[[], float]
    ) -> Persistence | None:
        if settings is None:
            return None
        persistence = Persistence(
            self.index,
            settings,
            chunk_size=self.chunk_size,
            is_busy=lambda: bool(self._stores),
            committed=self._checksums.note,
            drop_corrupt=self._checksums.drop,
            wall=wall,
            clock=self._clock,
        )
        self.index.on_forgotten = persistence.forgotten
        return persistence

    def _note_stored(self, stored: StoredObject) -> None:
        """A store has committed an object."""
        self._checksums.note(stored)
        if self.persistence is not None:
            self.persistence.note_stored(stored)

    def start(self) -> None:
        """What runs as long as the module does is there from now on, not from when it is first needed."""
        self._checksums.start()

    # --- instances ----------------------------------------------------------------------------------------------

    async def register_q_cache(
        self,
        client: Hashable,
        instance_id: InstanceId,
        model_name: str,
        world_size: int,
        description: RingDescription | None,
        ring: RingSource | None,
        now: float,
    ) -> None:
        """Register a ring under an id; returns when it may be stored from.

        The same client with the same description only refreshes. Another ring of the same client replaces the old
        one after its lane is drained.

        Args:
            description: None from a legacy client.
            ring: what came over the lifeline for `description.ring_token`; taken over by this call in any case.
                None: nothing came, or it was handed over in an earlier call.

        Raises:
            RequestError: shutting_down, unsupported_transport, lifeline_required, ring_refused, bad_payload, not_owner,
                instance_busy.
        """
        if self._draining:
            if ring is not None and not ring.claimed:
                ring.close()
            raise _shutting_down()
        await self._lifecycle.register(
            client, instance_id, model_name, world_size, description, ring, now
        )

    async def unregister_q_cache(
        self, client: Hashable, instance_id: InstanceId, report: WorkerReport | None, now: float
    ) -> None:
        """Release a ring; returns when what was asked for is stored and no copy runs any more.

        Raises:
            RequestError: unknown_instance, not_owner.
        """
        instance = self.registry.get(instance_id)
        if instance is None:
            raise _unknown(instance_id)
        _check_owner(instance, client)
        self._hear(instance, report, now)
        await self._lifecycle.release([instance], ReleaseCause.UNREGISTERED)

    def ping(
        self,
        client: Hashable,
        instance_id: InstanceId | None,
        report: WorkerReport | None,
        now: float,
    ) -> bool:
        """Whether the server knows the instance as this client's; without an id, whether there is a server."""
        if instance_id is None:
            return True
        instance = self.registry.get(instance_id)
        if instance is None or instance.client != client:
            return False
        if instance.state is InstanceState.RELEASING:
            return False
        instance.has_pinged = True
        self._hear(instance, report, now)
        return True

    async def client_gone(self, client: Hashable, now: float) -> None:
        """The connection is dead: its leases end now, its instances go, and nothing of them is admitted any more."""
        self.leases.client_gone(client)
        await self._lifecycle.client_gone(client)

    async def reap_stale_instances(self, now: float) -> list[InstanceId]:
        """Release the instances that were silent for too long; their ids. Call it every quarter of the time-out."""
        stale = self.registry.stale(now)
        await self._lifecycle.release(stale, ReleaseCause.REAPED)
        return [instance.instance_id for instance in stale]

    async def release_lost(self) -> list[InstanceId]:
        """Release the instances whose ring is out of reach; their ids. Call it when a device's process has ended."""
        lost = [instance for instance in self.registry if instance.ring.lost]
        await self._lifecycle.release(lost, ReleaseCause.DEVICE_LOST)
        return [instance.instance_id for instance in lost]

    # --- storing ------------------------------------------------------------------------------------------------

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
            store = check_store(instance, key, block_groups, event, proof, self.chunk_size)
        except RequestError as error:
            self._totals.rejected_stores[error.code] += 1
            raise
        instance.last_seen = max(instance.last_seen, now)
        return self._begin_store(instance, store, now)

    def _live_instance(self, client: Hashable, instance_id: InstanceId) -> Instance:
        if self._draining:
            raise _shutting_down()
        instance = self.registry.get(instance_id)
        if instance is None or instance.state is not InstanceState.LIVE:
            raise _unknown(instance_id)
        _check_owner(instance, client)
        return instance

    def _begin_store(
        self, instance: Instance, store: CheckedStore, now: float
    ) -> asyncio.Task[StoreResult]:
        self._totals.submitted_stores += 1
        began = self._clock()
        run = StoreRun(
            self.index,
            instance,
            store,
            self._copy_timeout_s,
            now,
            self._note_stored,
            self._inline_checksums,
            self.persistence,
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
        for stores in (self._stores, instance.stores):
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
        self._totals.copied_bytes += run.copied_bytes
        self._totals.copy_s += run.copy_s
        self._tell_end(instance, store, run.outcome, began)

    def _tell_end(
        self,
        instance: Instance,
        store: CheckedStore,
        outcome: StoreOutcome,
        began: float,
    ) -> None:
        nbytes = outcome.stored * store.object_bytes
        self._totals.add(outcome, nbytes)
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

    # --- storing what lies out of reach -------------------------------------------------------------------------

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
            store = check_upload(instance, key, proof, self.chunk_size)
            instance.last_seen = max(instance.last_seen, now)
            began = self._clock()
            found = await self.uploads.begin(client, instance, store, self._clock)
            if self._draining and isinstance(found, Upload):
                # It has waited for another writer meanwhile, and nobody waits for it any more.
                self.uploads.give_up(found, "the server is shutting down")
                raise _shutting_down()
        except RequestError as error:
            self._totals.rejected_stores[error.code] += 1
            raise
        self._totals.submitted_stores += 1
        self._tell_begin(instance, store)
        if isinstance(found, StoreOutcome):
            self._tell_end(instance, store, found, began)
            return UploadReply(result=_result(found))
        self._stores.add(found.ended)
        found.ended.add_done_callback(self._stores.discard)
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

    # --- reading ------------------------------------------------------------------------------------------------

    def look_in_tier(self, query: ChunkQuery) -> Awaitable[Elsewhere] | None:
        """What the persistent tier has of a query; await it before `lookup_q`. None: the pool alone answers.

        Raises:
            RequestError: bad_payload.
        """
        reading.check(query, self.chunk_size)
        if self.persistence is None or not self.persistence.reads.is_needed(query):
            return None
        return self.persistence.reads.look(query)

    def lookup_q(self, query: ChunkQuery, elsewhere: Elsewhere = NOWHERE_ELSE) -> LookupReply:
        """Which chunks are there, and why the others are not.

        Args:
            elsewhere: out of `look_in_tier`.
        """
        return reading.lookup(self.index, self._reads, query, self.chunk_size, elsewhere)

    def identities_q(self, query: IdentityQuery) -> IdentitiesReply:
        """Under which identities the asked tokens are stored, as their writers told."""
        return reading.identities(self.index, query, self.chunk_size)

    def bring_from_tier(self, client: Hashable, query: ChunkQuery) -> Awaitable[Brought] | None:
        """Bring into the pool what the persistent tier has of a query; await it before `retrieve_q`.

        None: the pool alone answers. What has been brought is leased until `retrieve_q`, or `let_go`, is told of it.

        Raises:
            RequestError: bad_payload.
        """
        reading.check(query, self.chunk_size)
        if self.persistence is None or not self.persistence.reads.is_needed(query):
            return None
        return self.persistence.reads.bring(query, self.leases.room(client))

    def let_go(self, brought: Brought) -> None:
        """Nobody retrieves what was brought."""
        if self.persistence is not None:
            self.persistence.reads.release(brought)

    def retrieve_q(
        self, client: Hashable, query: ChunkQuery, now: float, brought: Brought | None = None
    ) -> RetrieveReply:
        """Lease the chunks that are there to a client, up to its cap.

        Args:
            brought: out of `bring_from_tier`; let go by this call.
        """
        try:
            return reading.retrieve(
                self.index, self.leases, self._reads, client, query, self.chunk_size, now, brought
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
        return reading.fetch(self._pool, self.leases, client, lease_id, place, part, now)

    def release_q(self, client: Hashable, lease_ids: Iterable[int]) -> None:
        """Give leases back.

        Raises:
            RequestError(unknown_lease): some are over, or are not this client's; the others are released.
        """
        self.leases.release(client, lease_ids)

    async def verify_q(self) -> VerifyReply:
        """Hash everything that is stored, and drop what differs from its checksum."""
        return await asyncio.shield(self._checksums.verify())

    async def flush_q(self, timeout_s: float) -> FlushReply:
        """Wait until everything that is stored is in the persistent tier, too, or cannot be for now."""
        if self.persistence is None:
            return FlushReply(
                persisted=False, waiting=0, message="this server has no persistent tier (--l2)"
            )
        return await self.persistence.flush(timeout_s)

    async def purge_q(self, model_name: str, salt: str | None) -> PurgeReply:
        """Delete what is stored of a model in every tier; stores that are under way are not met.

        Args:
            model_name: as in keys; without a feature's suffix all features of the model.
            salt: None for all.
        """
        what = Purge(model_name, salt)
        dropped = self._drop(what)
        if self.persistence is None:
            return PurgeReply(dropped=dropped, deleted=0, deleted_bytes=0)
        await self.persistence.settle(what)
        dropped += self._drop(what)
        deleted, nbytes, message = await self.persistence.purge(what)
        return PurgeReply(dropped=dropped, deleted=deleted, deleted_bytes=nbytes, message=message)

    def _drop(self, what: Purge) -> int:
        objects = [one for one in self.index.objects() if what.is_family(one.key.family)]
        for stored in objects:
            self.index.discard(stored, MissReason.PURGED)
        return len(objects)

    async def expire_objects(self, now: float) -> None:
        """Drop what is too old, in every tier, and too much in the persistent one. Call it every few seconds."""
        persistence = self.persistence
        if self._ttl_s:
            for stored in self.index.objects():
                if now - stored.created > self._ttl_s:
                    self.index.discard(stored, MissReason.EXPIRED)
        if persistence is None or not persistence.surveyed:
            return
        every_s = min(GO_THROUGH_S, self._ttl_s * TTL_SHARE) if self._ttl_s else GO_THROUGH_S
        if persistence.is_too_full() or now - self._gone_through > every_s:
            self._gone_through = now
            await persistence.go_through()

    def expire_leases(self, now: float) -> int:
        """End the leases whose time is over; how many there were. Call it every few seconds."""
        return self.leases.expire(now)

    # --- the whole ----------------------------------------------------------------------------------------------

    def report_status(self) -> dict[str, Any]:
        """What `/status` serves; plain values only."""
        plain: dict[str, Any] = msgspec.to_builtins(self.report())
        return plain

    def report(self) -> StoreReport:
        """The same, typed."""
        live = self.registry.live()
        ids = [instance.instance_id for instance in live]
        return StoreReport(
            registered_q_ids=sorted(ids, key=lambda one: (isinstance(one, str), one)),
            q_context_meta={str(one.instance_id): _describe_instance(one) for one in live},
            models=self._models(),
            totals=self._totals.summary(),
            reads=self._reads.summary(),
            instances=self._lifecycle.summary(),
            coverage=self._coverage.summary(),
            rings=ring_use(one.report for one in live),
            checksums=self._checksums.summary(),
            leases=self.leases.summary(),
            uploads=self.uploads.summary(),
            pool=PoolReport(**dataclasses.asdict(self._pool.usage())),
            lanes=LanesReport(
                hung=sum(instance.lane.hung for instance in live),
                stuck_after_release=self._lifecycle.stuck_lanes,
            ),
            draining=self._draining,
            l2=None if self.persistence is None else self.persistence.summary(),
        )

    def _models(self) -> list[ModelReport]:
        here = self.index.models()
        return here if self.persistence is None else self.persistence.models(here)

    async def drain(self, deadline_s: float) -> bool:
        """Refuse new stores and registrations, and wait for what runs.

        Returns:
            False when stores are still running after `deadline_s` seconds.
        """
        self._draining = True
        self._checksums.stop()
        began = self._clock()
        if self._stores:
            await asyncio.wait(set(self._stores), timeout=deadline_s)
        if self.persistence is not None:
            await self.persistence.drain(deadline_s - (self._clock() - began))
        return not self._stores

    async def close(self) -> None:
        """Release all instances. Call it last, after `drain`."""
        self._draining = True
        if self.persistence is not None:
            await self.persistence.close(self._copy_timeout_s)
        await self._checksums.close(self._copy_timeout_s)
        await self._lifecycle.close()

    def _hear(self, instance: Instance, report: WorkerReport | None, now: float) -> None:
        instance.last_seen = max(instance.last_seen, now)
        if report is not None:
            instance.report = report
            feature = instance.description.layout.feature
            self._coverage.note(instance.instance_id, report, feature)


def _check_settings(
    chunk_size: int,
    features: tuple[str, ...],
    copy_timeout_s: float,
    lease_timeout_s: float,
    max_lease_share: float,
) -> None:
    for feature in features:
        if feature not in FEATURE_SUFFIX:
            raise ValueError(f"unknown feature {feature!r}; known: {', '.join(FEATURE_SUFFIX)}")
    if min(chunk_size, copy_timeout_s, lease_timeout_s) <= 0:
        raise ValueError("chunk_size, copy_timeout_s and lease_timeout_s must be positive")
    if not 0 < max_lease_share <= 1:
        raise ValueError(f"max_lease_share must be in (0, 1], not {max_lease_share}")


def _result(outcome: StoreOutcome) -> StoreResult:
    return StoreResult(b"", not outcome.refused, outcome)


def _describe_instance(instance: Instance) -> InstanceReport:
    description = instance.description
    layout = description.layout
    return InstanceReport(
        model_name=instance.model_name,
        world_size=instance.world_size,
        transport=description.kind,
        device=instance.ring.device,
        q_ring_layout=RingLayoutReport(
            num_layers=len(layout.layer_ids),
            num_blocks=description.num_blocks,
            block_size=description.block_size,
            hidden_dim=layout.hidden_dim,
            dtype=layout.dtype,
            layout_id=instance.layout_id.hex(),
            layout=msgspec.to_builtins(layout),
        ),
        ring=ring_use([instance.report]),
    )


def _check_owner(instance: Instance, client: Hashable) -> None:
    if instance.client != client:
        raise RequestError(
            ErrorCode.NOT_OWNER,
            f"instance {instance.instance_id!r} belongs to another connection: register a ring of your own",
        )


def _unknown(instance_id: InstanceId) -> RequestError:
    return RequestError(
        ErrorCode.UNKNOWN_INSTANCE, f"instance {instance_id!r} has no ring here: register it first"
    )


def _shutting_down() -> RequestError:
    return RequestError(
        ErrorCode.SHUTTING_DOWN, "the server is shutting down: try another, or later"
    )
