"""Random stores, reads, releases, deaths and bad stores against a plain dict; every byte that is read is compared.

The model knows what *may* be there: everything stored and not reported evicted. The pool is small, so eviction happens
all the time; a chunk may be missing only for a reason that the model can tell.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import RetrieveReply, StoreOutcome
from lmcache_qprotocol.reasons import LossReason
from lmcache_qprotocol.stamps import EMPTY
from tests.server.qstore.fake_worker import FakeWorker, stored_chunk
from tests.server.qstore.world import SPAN, World

POOL_CHUNKS = 6
SEQUENCES = st.integers(0, 3)
FIRSTS = st.integers(0, 3)
COUNTS = st.integers(1, 4)
CLIENTS = st.sampled_from(["r1", "r2"])


class StoreMachine(RuleBasedStateMachine):
    """One server, two workers on one model, two readers."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.offered: set[tuple[int, int]] = set()
        self.held: dict[int, tuple[str, RetrieveReply, int, range]] = {}
        self.workers: dict[int, FakeWorker] = {}
        self.run(self.begin())

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    async def begin(self) -> None:
        self.world = World(POOL_CHUNKS, max_lease_share=0.5)
        for number in (1, 2):
            self.workers[number] = await self.world.worker(
                number, client=f"w{number}", num_blocks=64
            )

    def teardown(self) -> None:
        self.run(self.world.close())
        self.loop.close()

    async def store(
        self, number: int, sequence: int, first: int, count: int, **more: Any
    ) -> StoreOutcome:
        return await self.world.store(
            self.workers[number],
            sequence,
            first,
            count,
            instance_id=number,
            client=f"w{number}",
            **more,
        )

    @rule(
        number=st.integers(1, 2),
        sequence=SEQUENCES,
        first=FIRSTS,
        count=COUNTS,
        block=st.integers(0, 48),
    )
    def store_well(self, number: int, sequence: int, first: int, count: int, block: int) -> None:
        outcome = self.run(self.store(number, sequence, first, count, block=block))
        assert set(outcome.refused) <= {LossReason.POOL_FULL}
        if outcome.stored + outcome.duplicate:
            self.offered.update((sequence, chunk) for chunk in range(first, first + count))

    @rule(data=st.data(), sequence=SEQUENCES, first=FIRSTS)
    def store_side_by_side(self, data: st.DataObject, sequence: int, first: int) -> None:
        counts = data.draw(st.lists(COUNTS, min_size=2, max_size=4))

        async def both() -> list[StoreOutcome]:
            return await asyncio.gather(
                *(
                    self.store(1 + place % 2, sequence, first, count, block=(place // 2) * 16)
                    for place, count in enumerate(counts)
                )
            )

        for outcome in self.run(both()):
            assert set(outcome.refused) <= {LossReason.POOL_FULL}
        self.offered.update((sequence, chunk) for chunk in range(first, first + max(counts)))

    @rule(sequence=SEQUENCES, first=FIRSTS, count=COUNTS, wrong=st.integers(0, 15))
    def store_with_a_wrong_stamp(self, sequence: int, first: int, count: int, wrong: int) -> None:
        worker = self.workers[1]

        def spoil() -> None:
            for chunk in range(count):
                worker.stamps[chunk * 4 + wrong // 4, wrong % 4] = EMPTY

        outcome = self.run(self.store(1, sequence, first, count, spoil=spoil))
        assert outcome.stored == 0
        assert set(outcome.refused) <= {LossReason.POOL_FULL, LossReason.STAMP_MISMATCH}

    @rule(target=leases, client=CLIENTS, sequence=SEQUENCES, first=FIRSTS, count=COUNTS)
    def retrieve(self, client: str, sequence: int, first: int, count: int) -> int:
        chunks = range(first, first + count)
        reply = self.world.retrieve(sequence, chunks, client)
        for index, data in self.world.read(reply).items():
            assert (sequence, chunks[index]) in self.offered, "never stored, and yet found"
            assert np.array_equal(data, stored_chunk(sequence, chunks[index]))
        told = {chunk.index for chunk in reply.chunks} | set(self.world.misses(reply))
        assert reply.partial or told == set(range(count))
        for index, reason in self.world.misses(reply).items():
            if (sequence, chunks[index]) in self.offered:
                assert reason in {"evicted", "pool_full", "stamp_mismatch"}
            else:
                assert reason in {"not_stored", "pool_full", "stamp_mismatch"}
        if reply.lease_id:
            self.held[reply.lease_id] = (client, reply, sequence, chunks)
        return reply.lease_id

    @rule(lease_id=consumes(leases))
    def release(self, lease_id: int) -> None:
        if lease_id in self.held:
            self.world.module.release_q(self.held.pop(lease_id)[0], [lease_id])
            return
        with pytest.raises(RequestError) as caught:
            self.world.module.release_q("r1", [lease_id])
        assert caught.value.code is ErrorCode.UNKNOWN_LEASE

    @rule(client=CLIENTS)
    def reader_dies(self, client: str) -> None:
        self.run(self.world.module.client_gone(client, self.world.now))
        self.held = {lease_id: held for lease_id, held in self.held.items() if held[0] != client}

    @rule(seconds=st.sampled_from([1.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        if seconds > 60 and self.held:
            assert self.world.module.expire_leases(self.world.now) == len(self.held)
            self.held.clear()

    @rule(number=st.integers(1, 2), graceful=st.booleans())
    def worker_comes_back(self, number: int, graceful: bool) -> None:
        async def work() -> None:
            module, client = self.world.module, f"w{number}"
            if graceful:
                await module.unregister_q_cache(client, number, None, self.world.now)
            else:
                await module.client_gone(client, self.world.now)
            await self.world.register(self.workers[number], number, client)

        self.run(work())

    @invariant()
    def bytes_add_up_and_leased_bytes_stay(self) -> None:
        module = self.world.module
        module.index.validate()
        usage = self.world.pool.usage()
        assert usage.reserved_bytes == 0
        assert len(module.index) * SPAN == usage.committed_bytes + usage.leased_bytes
        assert module.report_status()["leases"]["count"] == len(self.held)
        for _, reply, sequence, chunks in self.held.values():
            for index, data in self.world.read(reply).items():
                assert np.array_equal(data, stored_chunk(sequence, chunks[index]))


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
