"""A call of a ring that outlives its time is aborted: that is how a device's process gets killed."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence

import pytest

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.reasons import LossReason
from lmcache_qserver.copying import ChunkCopy, RingGeometry, RingMemory, StampFault
from tests.server.qstore.fake_worker import MODEL, FakeWorker
from tests.server.qstore.world import DEADLINE_S, World, until


class HangingRing(RingMemory):
    """Hangs in one of its calls until it is aborted, as one on a device does."""

    def __init__(self, worker: FakeWorker, hangs_in: str) -> None:
        super().__init__(os.dup(worker.fd), worker.nbytes)
        self._hangs_in = hangs_in
        self._aborted = threading.Event()
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1
        self._aborted.set()

    def _pass(self, call: str) -> None:
        if call == self._hangs_in:
            assert self._aborted.wait(DEADLINE_S), "nobody has aborted it"
            raise OSError("aborted")

    def open(self, geometry: RingGeometry) -> None:
        self._pass("open")
        super().open(geometry)

    def copy(self, chunks: Sequence[ChunkCopy], event: bytes) -> StampFault | None:
        self._pass("copy")
        return super().copy(chunks, event)

    def close(self) -> None:
        super().close()
        if self._hangs_in == "close":
            self._aborted.wait(DEADLINE_S)


async def register(hangs_in: str) -> tuple[World, FakeWorker, HangingRing]:
    world = World(copy_timeout_s=0.05)
    worker = FakeWorker()
    world.workers.append(worker)
    ring = HangingRing(worker, hangs_in)
    await world.module.register_q_cache("c1", 1, MODEL, 1, worker.description, ring, world.now)
    return world, worker, ring


async def test_a_copy() -> None:
    world, worker, ring = await register("copy")
    outcome = await world.store(worker, 1)
    assert outcome.refused == {LossReason.COPY_FAILED: 1}
    assert ring.aborts == 1
    instance = world.module.registry.get(1)
    assert instance is not None
    await until(lambda: not instance.lane.hung)
    await until(lambda: world.pool.usage().reserved_bytes == 0)
    await world.close()


async def test_opening() -> None:
    world = World(copy_timeout_s=0.05)
    worker = FakeWorker()
    world.workers.append(worker)
    ring = HangingRing(worker, "open")
    with pytest.raises(RequestError) as caught:
        await world.module.register_q_cache("c1", 1, MODEL, 1, worker.description, ring, world.now)
    assert caught.value.code is ErrorCode.RING_REFUSED
    assert ring.aborts == 1
    await until(lambda: ring.closed)
    await world.close()


async def test_closing() -> None:
    world, _, ring = await register("close")
    await asyncio.wait_for(world.module.unregister_q_cache("c1", 1, None, world.now), DEADLINE_S)
    assert ring.aborts == 1
    await until(lambda: world.module.report().lanes.stuck_after_release == 0)
    await world.close()
