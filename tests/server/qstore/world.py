"""A whole store in one process: a real pool, real rings, real threads; what tests of the module share."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_qprotocol.messages import RetrieveReply, StoreOutcome
from lmcache_qserver.copying import ChunkCopy, RingMemory, StampFault
from lmcache_qserver.events import Event, EventBus
from lmcache_qserver.pool import Pool, PoolMemory
from lmcache_qserver.qstore import QStoreModule
from tests.server.qstore.fake_worker import (
    BLOCKS_PER_CHUNK,
    CHUNK_BYTES,
    CHUNK_SIZE,
    FAMILY,
    HIDDEN,
    LAYERS,
    MODEL,
    FakeWorker,
    proof_of,
    query_of,
    range_key,
)

DEADLINE_S = 20.0
SPAN = -(-CHUNK_BYTES // 4096) * 4096


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.001)


class Gate:
    """Around every copy: waits at chosen calls, to hold a copy in its lane's thread."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.calls = 0
        self.hold_calls: set[int] | None = set()
        """Numbers of the calls to hold, from 0; None for all."""
        self.before: Callable[[], None] = lambda: None
        """Runs in the lane's thread before a copy."""

    def enter(self) -> None:
        """A copy begins, in the lane's thread."""
        number, self.calls = self.calls, self.calls + 1
        if self.hold_calls is None or number in self.hold_calls:
            self.entered.set()
            assert self.open.wait(DEADLINE_S)
        self.before()


class GatedRing(RingMemory):
    """A ring whose copies pass a gate."""

    def __init__(self, fd: int, nbytes: int, gate: Gate) -> None:
        super().__init__(fd, nbytes)
        self._gate = gate

    def copy(self, chunks: Sequence[ChunkCopy], event: bytes) -> StampFault | None:
        self._gate.enter()
        return super().copy(chunks, event)


class World:
    """A module with a pool of `pool_chunks` chunks or `pool_bytes`; helpers speak as wire and worker do."""

    def __init__(self, pool_chunks: int = 16, pool_bytes: int = 0, **settings: Any) -> None:
        self.memory = PoolMemory(pool_bytes or pool_chunks * SPAN)
        self.pool = Pool(self.memory)
        self.bus = EventBus()
        self.events: list[Event] = []
        self.bus.subscribe(self.events.append)
        self.gate = Gate()
        self.now = 1000.0
        settings = {"copy_timeout_s": DEADLINE_S, **settings}
        self.module = QStoreModule(pool=self.pool, bus=self.bus, chunk_size=CHUNK_SIZE, **settings)
        self.workers: list[FakeWorker] = []

    async def worker(
        self,
        instance_id: int | str = 1,
        client: Hashable = "c1",
        num_blocks: int = 32,
        model: str = MODEL,
    ) -> FakeWorker:
        """A registered worker."""
        worker = FakeWorker(num_blocks)
        self.workers.append(worker)
        await self.register(worker, instance_id, client, model)
        return worker

    async def register(
        self,
        worker: FakeWorker,
        instance_id: int | str = 1,
        client: Hashable = "c1",
        model: str = MODEL,
    ) -> None:
        ring = GatedRing(os.dup(worker.fd), worker.nbytes, self.gate)
        await self.module.register_q_cache(
            client, instance_id, model, 1, worker.description, ring, self.now
        )

    async def store(
        self,
        worker: FakeWorker,
        sequence: int,
        first: int = 0,
        count: int = 1,
        *,
        instance_id: int | str = 1,
        client: Hashable = "c1",
        block: int = 0,
        model: str = MODEL,
        spoil: Callable[[], None] = lambda: None,
    ) -> StoreOutcome:
        """Write chunks into ring blocks from `block` on and store them.

        Args:
            spoil: runs between writing and storing.
        """
        nonces = []
        block_ids = tuple(range(block, block + count * BLOCKS_PER_CHUNK))
        for index in range(count):
            of_chunk = block_ids[index * BLOCKS_PER_CHUNK :][:BLOCKS_PER_CHUNK]
            nonces.append(worker.write(sequence, first + index, of_chunk))
        spoil()
        key = range_key(sequence, first, count, model_name=f"{model}##query")
        result = await self.module.stores.store_q(
            client, key, instance_id, (block_ids,), b"", proof_of(*nonces), self.now
        )
        assert result.event == b""
        assert result.outcome is not None
        assert result.ok == (not result.outcome.refused)
        outcome = result.outcome
        assert outcome.stored + outcome.duplicate + sum(outcome.refused.values()) == count
        return outcome

    async def hang(self, worker: FakeWorker, sequence: int, count: int = 1) -> StoreOutcome:
        """A store from instance 1 whose copy is held beyond its time; its outcome."""
        self.gate.hold_calls = {self.gate.calls}
        store = asyncio.ensure_future(self.store(worker, sequence, 0, count))
        await until(self.gate.entered.is_set)
        instance = self.module.registry.get(1)
        assert instance is not None
        # As the lane's timer would: a short time-out would be a race between the machine and the test.
        instance.lane._expire(instance.lane._jobs[0])
        return await store

    def retrieve(
        self, sequence: int, chunks: Sequence[int], client: Hashable = "reader"
    ) -> RetrieveReply:
        return self.module.reads.retrieve_q(client, query_of(sequence, chunks), self.now)

    def read(self, reply: RetrieveReply) -> dict[int, npt.NDArray[np.int32]]:
        """What a reader that maps the pool sees, by index in the query."""
        found = {}
        for chunk in reply.chunks:
            assert chunk.shape == (BLOCKS_PER_CHUNK, LAYERS, CHUNK_SIZE // BLOCKS_PER_CHUNK, HIDDEN)
            assert (chunk.nbytes, chunk.dtype, chunk.rows) == (
                CHUNK_BYTES,
                "int32",
                (0, CHUNK_SIZE),
            )
            data = self.memory.array[chunk.offset : chunk.offset + chunk.nbytes]
            found[chunk.index] = data.view(np.int32).reshape(chunk.shape).copy()
        return found

    def misses(self, reply: Any) -> dict[int, str]:
        return {miss.index: miss.reason.value for miss in reply.missing}

    async def close(self) -> None:
        """Everything goes, and nothing is left."""
        self.gate.open.set()
        await self.module.close()
        # A copy that was hung comes back in its own time; its slots are in quarantine until then.
        await until(lambda: self.pool.usage().reserved_bytes == 0)
        self.module.index.validate()
        for worker in self.workers:
            worker.close()
        self.memory.close()


__all__ = ["DEADLINE_S", "FAMILY", "SPAN", "Gate", "World", "until"]
