"""How instances come and go.

Decisions are made on the loop at once, waiting comes after: an id belongs to the new instance from the moment the
registration is accepted, and a release is decided when it is asked for, however long the lane takes. What waits runs in
tasks of its own, so a caller that is cancelled leaves no instance half way.

Who closes a ring's memory: the lane of the instance that claimed it, as its last job. Before it is claimed, `register`
does, on every refusal.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import RingDescription
from lmcache_qserver.copying import Lane, LaneError, RingGeometry, RingSource
from lmcache_qserver.log_fields import told
from lmcache_qserver.qstore.instance import Instance, InstanceId, InstanceState
from lmcache_qserver.qstore.registration_check import check_registration
from lmcache_qserver.qstore.registry import Registry
from lmcache_qserver.qstore.release_cause import ReleaseCause
from lmcache_qserver.status_report import LifecycleReport

logger = logging.getLogger(__name__)

MAX_INSTANCES = 1024
MAX_INSTANCES_PER_CLIENT = 128
"""A worker has one."""


class Lifecycle:
    """Registers and releases the instances of one registry.

    Args:
        chunk_size: tokens per chunk on this server.
        features: what this server stores.
        copy_timeout_s: how long a release waits for the lane.
        on_release: called once for every instance whose release is decided, before anything is waited for.
    """

    def __init__(
        self,
        registry: Registry,
        chunk_size: int,
        features: tuple[str, ...],
        copy_timeout_s: float,
        on_release: Callable[[Instance], None],
    ) -> None:
        self._registry = registry
        self._chunk_size = chunk_size
        self._features = features
        self._copy_timeout_s = copy_timeout_s
        self._on_release = on_release
        self._leaving: set[Instance] = set()
        self._stuck: set[Lane] = set()
        self._registered = 0
        self._released: Counter[ReleaseCause] = Counter()

    @property
    def stuck_lanes(self) -> int:
        """Released instances whose hung copy keeps a thread and a mapping; they go when the copy comes back."""
        return len(self._stuck)

    async def register(
        self,
        client: Hashable,
        instance_id: InstanceId,
        model_name: str,
        world_size: int,
        description: RingDescription | None,
        ring: RingSource | None,
        now: float,
    ) -> None:
        """Make an instance LIVE, or refresh it when the same client says the same again.

        Args:
            ring: this call takes it over, whatever comes of it.

        Raises:
            RequestError: see `_decide`, and ring_refused for memory that is not what it must be.
        """
        try:
            if self._refresh(client, instance_id, model_name, world_size, description, now):
                return
            instance, before = self._decide(
                client, instance_id, model_name, world_size, description, ring, now
            )
        finally:
            if ring is not None and not ring.claimed:
                ring.close()
        await asyncio.shield(asyncio.ensure_future(self._open(instance, before)))

    def begin_release(self, instance: Instance, cause: ReleaseCause) -> asyncio.Task[None]:
        """Decide that an instance goes; the task ends when no copy from it is running (or it hangs for good)."""
        if cause.is_death:
            instance.dead = True
            instance.lane.cancel_waiting()
        if instance.release is None:
            self._released[cause] += 1
            instance.state = InstanceState.RELEASING
            self._leaving.add(instance)
            self._on_release(instance)
            instance.release = asyncio.get_running_loop().create_task(self._release(instance))
        return instance.release

    async def release(self, instances: Iterable[Instance], cause: ReleaseCause) -> None:
        """Release instances side by side, and wait; a hung one delays no other."""
        tasks = [self.begin_release(instance, cause) for instance in instances]
        if tasks:
            await asyncio.wait(tasks)

    async def client_gone(self, client: Hashable) -> None:
        """Release all instances of a client, those on their way out too."""
        leaving = [instance for instance in self._leaving if instance.client == client]
        await self.release({*self._registry.of_client(client), *leaving}, ReleaseCause.CLIENT_GONE)

    async def close(self) -> None:
        """Release everything, after storing what was asked for."""
        await self.release({*self._registry, *self._leaving}, ReleaseCause.SHUTDOWN)

    def summary(self) -> LifecycleReport:
        """For `/status`."""
        released = {cause.value: self._released[cause] for cause in ReleaseCause}
        return LifecycleReport(registered=self._registered, released=released)

    def _refresh(
        self,
        client: Hashable,
        instance_id: InstanceId,
        model_name: str,
        world_size: int,
        description: RingDescription | None,
        now: float,
    ) -> bool:
        holder = self._registry.get(instance_id)
        if holder is None or description is None:
            return False
        if not holder.is_same_registration(client, model_name, world_size, description):
            return False
        holder.last_seen = now
        return True

    def _decide(
        self,
        client: Hashable,
        instance_id: InstanceId,
        model_name: str,
        world_size: int,
        description: RingDescription | None,
        ring: RingSource | None,
        now: float,
    ) -> tuple[Instance, Instance | None]:
        """The new instance, REGISTERING, and who had its id before.

        Raises:
            RequestError: unsupported_transport, lifeline_required, ring_refused, instance_busy, not_owner, busy,
                bad_payload.
        """
        if description is None:
            raise RequestError(
                ErrorCode.UNSUPPORTED_TRANSPORT,
                "this server copies from rings that describe themselves: send a ring description",
            )
        if ring is None:
            raise RequestError(
                ErrorCode.LIFELINE_REQUIRED,
                "no memory came for this ring token: offer the ring over the lifeline first",
            )
        if ring.claimed:
            raise RequestError(
                ErrorCode.RING_REFUSED,
                "this memory is registered already: offer it again under a new token",
            )
        before = self._registry.get(instance_id)
        _check_holder(before, client)
        self._check_room(client)
        check_registration(
            model_name, world_size, description, ring.nbytes, self._chunk_size, self._features
        )
        lane = Lane(f"qlane-{instance_id!r}"[:64])
        ring.claimed = True
        instance = Instance(
            instance_id, client, model_name, world_size, description, ring, lane, now
        )
        self._registry.put(instance)
        return instance, before

    def _check_room(self, client: Hashable) -> None:
        """Every instance has a thread, a mapping and a descriptor, also on its way out."""
        everyone = {*self._registry, *self._leaving}
        held = sum(instance.client == client for instance in everyone)
        total = len(everyone) + len(self._stuck)
        if held >= MAX_INSTANCES_PER_CLIENT or total >= MAX_INSTANCES:
            raise RequestError(
                ErrorCode.BUSY,
                f"{held} instances are this client's, and there are {total}: unregister some",
            )

    async def _open(self, instance: Instance, before: Instance | None) -> None:
        if before is not None:
            logger.warning(
                "another ring replaces that of a worker", extra=told(instance=before.instance_id)
            )
            await asyncio.wait({self.begin_release(before, ReleaseCause.REPLACED)})
        try:
            await instance.lane.run(
                instance.ring.open,
                RingGeometry.of(instance.description),
                timeout_s=self._copy_timeout_s,
            )
            if instance.state is not InstanceState.REGISTERING:
                raise LaneError("the instance was released while it was registering")
        except Exception as error:
            await asyncio.wait({self.begin_release(instance, ReleaseCause.NOT_OPENED)})
            if isinstance(error, RequestError):
                raise
            raise RequestError(
                ErrorCode.RING_REFUSED, f"the ring can't be opened ({error}): offer it again"
            ) from None
        instance.state = InstanceState.LIVE
        self._registered += 1

    async def _release(self, instance: Instance) -> None:
        if instance.stores and not instance.dead:
            await asyncio.wait(set(instance.stores), timeout=self._copy_timeout_s)
        instance.dead = True
        instance.lane.cancel_waiting()
        if not await instance.lane.close(instance.ring.close, self._copy_timeout_s):
            instance.ring.abort()
            self._leave_behind(instance)
        self._registry.remove(instance)
        self._leaving.discard(instance)

    def _leave_behind(self, instance: Instance) -> None:
        """Unmapping under a running copy would kill the daemon, so a hung copy keeps its mapping."""
        logger.error(
            "a copy from a worker that has gone hangs: its thread and its mapping stay until it comes back",
            extra=told(instance=instance.instance_id, bytes=instance.ring.nbytes),
        )
        lane = instance.lane
        self._stuck.add(lane)
        lane.ended.add_done_callback(lambda _: self._stuck.discard(lane))


def _check_holder(before: Instance | None, client: Hashable) -> None:
    if before is None or before.state is InstanceState.RELEASING:
        return
    if before.client != client:
        raise RequestError(
            ErrorCode.NOT_OWNER,
            f"instance {before.instance_id!r} belongs to another connection, which is alive: use another id",
        )
    if before.state is InstanceState.REGISTERING:
        raise RequestError(
            ErrorCode.INSTANCE_BUSY,
            f"instance {before.instance_id!r} is being registered: wait for the answer",
        )
