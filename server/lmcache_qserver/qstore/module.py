"""The store's front: everything that the wire and the daemon call.

    register, unregister, reap, client_gone ─▶ lifecycle ─▶ registry
    stores   what workers offer: stores.py
    reads    what readers ask for: reads.py
    verify_q, flush_q, purge_q, expire_objects: what concerns all objects, in memory and in the persistent tier

Every method is called on the event loop. Those that are not `async` decide and answer at once. Those that are may be
cancelled by their caller at any time: what they have begun goes on to its end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Hashable
from typing import Any

import msgspec

from lmcache_qprotocol.keys import FEATURE_SUFFIX
from lmcache_qprotocol.messages import (
    FlushReply,
    PurgeReply,
    RingDescription,
    VerifyReply,
    WorkerReport,
)
from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.copying import RingSource
from lmcache_qserver.events import EventBus
from lmcache_qserver.pool import Pool
from lmcache_qserver.qstore.checksums import Checksums
from lmcache_qserver.qstore.coverage import Coverage
from lmcache_qserver.qstore.index import Index
from lmcache_qserver.qstore.instance import Instance, InstanceId, InstanceState
from lmcache_qserver.qstore.leases import Leases
from lmcache_qserver.qstore.lifecycle import Lifecycle
from lmcache_qserver.qstore.persist.persistence import Persistence, PersistSettings
from lmcache_qserver.qstore.persist.purging import Purge
from lmcache_qserver.qstore.reads import Reads
from lmcache_qserver.qstore.refusals import check_owner, shutting_down, unknown_instance
from lmcache_qserver.qstore.registry import Registry
from lmcache_qserver.qstore.release_cause import ReleaseCause
from lmcache_qserver.qstore.ring_use import ring_use
from lmcache_qserver.qstore.stored_object import StoredObject
from lmcache_qserver.qstore.stores import Stores
from lmcache_qserver.qstore.totals import StoreTotals
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
        self._copy_timeout_s = copy_timeout_s
        self._clock = clock
        self._coverage = Coverage()
        totals = StoreTotals()
        under_way: set[asyncio.Future[Any]] = set()
        self._ttl_s = ttl_s
        self._gone_through = clock()
        self._checksums = Checksums(self.index, lambda: bool(under_way), totals.add_nonfinite)
        self.persistence = self._build_persistence(persist, lambda: bool(under_way), wall)
        uploads = Uploads(
            self.index,
            cap_bytes=cap_bytes,
            timeout_s=upload_timeout_s,
            copy_timeout_s=copy_timeout_s,
            on_stored=self._note_stored,
            inline_checksums=inline_checksums,
            persistence=self.persistence,
        )
        self.stores = Stores(
            self.index,
            self.registry,
            uploads,
            totals,
            under_way,
            on_stored=self._note_stored,
            bus=bus,
            chunk_size=chunk_size,
            copy_timeout_s=copy_timeout_s,
            inline_checksums=inline_checksums,
            persistence=self.persistence,
            clock=clock,
        )
        self.reads = Reads(self.index, pool, self.leases, chunk_size, self.persistence)
        self._lifecycle = Lifecycle(
            self.registry, chunk_size, features, copy_timeout_s, uploads.instance_leaves
        )

    def _build_persistence(
        self,
        settings: PersistSettings | None,
        is_busy: Callable[[], bool],
        wall: Callable[[], float],
    ) -> Persistence | None:
        if settings is None:
            return None
        persistence = Persistence(
            self.index,
            settings,
            chunk_size=self.chunk_size,
            is_busy=is_busy,
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
        if self.stores.draining:
            if ring is not None and not ring.claimed:
                ring.close()
            raise shutting_down()
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
            raise unknown_instance(instance_id)
        check_owner(instance, client)
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

    # --- both tiers -----------------------------------------------------------------------------------------------

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
        # What a reader has brought out of the persistent tier before it was deleted there.
        await self.persistence.settle(what)
        dropped += self._drop(what, persisted_only=True)
        return PurgeReply(dropped=dropped, deleted=deleted, deleted_bytes=nbytes, message=message)

    def _drop(self, what: Purge, persisted_only: bool = False) -> int:
        objects = [
            one
            for one in self.index.objects()
            if what.is_family(one.key.family) and (one.persisted or not persisted_only)
        ]
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
            totals=self.stores.totals.summary(),
            reads=self.reads.totals.summary(),
            instances=self._lifecycle.summary(),
            coverage=self._coverage.summary(),
            rings=ring_use(one.report for one in live),
            checksums=self._checksums.summary(),
            leases=self.leases.summary(),
            uploads=self.stores.uploads.summary(),
            pool=PoolReport(**dataclasses.asdict(self._pool.usage())),
            lanes=LanesReport(
                hung=sum(instance.lane.hung for instance in live),
                stuck_after_release=self._lifecycle.stuck_lanes,
            ),
            draining=self.stores.draining,
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
        self.stores.draining = True
        self._checksums.stop()
        began = self._clock()
        if self.stores.under_way:
            await asyncio.wait(set(self.stores.under_way), timeout=deadline_s)
        if self.persistence is not None:
            await self.persistence.drain(deadline_s - (self._clock() - began))
        return not self.stores.under_way

    async def close(self) -> None:
        """Release all instances. Call it last, after `drain`."""
        self.stores.draining = True
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
