"""Random operations of writers and readers, and their deaths, against a plain dict; every byte read is compared.

The model knows what is stored (it looks after every operation, and stores and evictions must account for it), who is
registered since when, and who holds which lease. The pool is small, so eviction happens all the time; a chunk may be
missing only for a reason that the model can tell. Copies are held in their lanes' threads where two writers of one
chunk are to meet.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.messages import RetrieveReply, StoreOutcome
from lmcache_qprotocol.reasons import LossReason
from lmcache_qprotocol.stamps import EMPTY
from lmcache_qserver.pool import PoolUsage
from tests.server.qstore.fake_worker import (
    FAMILY,
    MODEL,
    FakeWorker,
    hash_of,
    range_key,
    stored_chunk,
)
from tests.server.qstore.world import SPAN, World, until

POOL_CHUNKS = 6
LEASE_S, REAP_S, GRACE_S = 60.0, 120.0, 600.0
LEAST_OPERATIONS = 5_000
SEQUENCES = st.integers(0, 3)
FIRSTS = st.integers(0, 3)
COUNTS = st.integers(1, 4)
READERS = st.sampled_from(["r1", "r2"])
WRITERS = st.sampled_from([1, 2])
BLOCKS = st.integers(0, 48)
ALL_KEYS = {
    (sequence, chunk): ObjectKey(family=FAMILY, chunk_hash=hash_of(sequence, chunk))
    for sequence in range(4)
    for chunk in range(10)
}


@dataclass
class Writer:
    """A worker, as the model knows it; its client is `w1` or `w2`."""

    ring: FakeWorker
    registered: bool = True
    last_seen: float = 0.0
    has_pinged: bool = False


class StoreMachine(RuleBasedStateMachine):
    """One server, two workers on one model, two readers."""

    leases = Bundle("leases")
    operations: ClassVar[Counter[str]] = Counter()
    """Of all machines since it was cleared, by rule; and what came about in them."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stored: set[tuple[int, int]] = set()
        self.offered: set[tuple[int, int]] = set()
        self.held: dict[int, tuple[str, RetrieveReply, int, range]] = {}
        self.writers: dict[int, Writer] = {}
        self.run(self.begin())

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    async def begin(self) -> None:
        self.world = World(
            POOL_CHUNKS,
            max_lease_share=0.5,
            lease_timeout_s=LEASE_S,
            reap_timeout_s=REAP_S,
            registration_grace_s=GRACE_S,
        )
        for number in (1, 2):
            ring = await self.world.worker(number, client=f"w{number}", num_blocks=64)
            self.writers[number] = Writer(ring, last_seen=self.world.now)

    def teardown(self) -> None:
        self.run(self.world.close())
        self.loop.close()

    def count(self, *names: str) -> None:
        self.operations.update(names)

    # --- storing ------------------------------------------------------------------------------------------------

    async def store(
        self, number: int, sequence: int, first: int, count: int, **more: Any
    ) -> StoreOutcome:
        writer = self.writers[number]
        client = f"w{number}"
        writer.last_seen = self.world.now
        return await self.world.store(
            writer.ring, sequence, first, count, instance_id=number, client=client, **more
        )

    def refused(self, number: int, sequence: int, first: int, count: int) -> bool:
        """Who is not registered stores nothing; True when that was so."""
        writer = self.writers[number]
        if writer.registered:
            return False
        key, blocks = range_key(sequence, first, count), (tuple(range(count * 4)),)
        with pytest.raises(RequestError) as caught:
            self.world.module.stores.begin_store_q(
                f"w{number}", key, number, blocks, b"", None, self.world.now
            )
        assert caught.value.code is ErrorCode.UNKNOWN_INSTANCE
        self.count("store of a stranger")
        return True

    def note(self, before: PoolUsage, *outcomes: StoreOutcome) -> None:
        """Objects before, plus the stored ones, minus the evicted ones, are the objects now."""
        usage = self.world.pool.usage()
        now = {place for place, key in ALL_KEYS.items() if self.world.module.index.get(key)}
        added = sum(outcome.stored for outcome in outcomes)
        evicted = usage.evictions - before.evictions
        assert len(now) == len(self.stored) + added - evicted
        assert now <= self.stored | self.offered, "never offered, and yet stored"
        self.stored = now
        self.operations["chunks stored"] += added
        self.operations["chunks evicted"] += evicted
        self.operations["duplicates"] += sum(outcome.duplicate for outcome in outcomes)
        for outcome in outcomes:
            for reason, chunks in outcome.refused.items():
                self.operations[f"chunks {reason.value}"] += chunks

    def offer(self, sequence: int, first: int, count: int) -> None:
        self.offered.update((sequence, chunk) for chunk in range(first, first + count))

    @rule(number=WRITERS, sequence=SEQUENCES, first=FIRSTS, count=COUNTS, block=BLOCKS)
    def store_well(self, number: int, sequence: int, first: int, count: int, block: int) -> None:
        self.count("store")
        if self.refused(number, sequence, first, count):
            return
        self.offer(sequence, first, count)
        before = self.world.pool.usage()
        outcome = self.run(self.store(number, sequence, first, count, block=block))
        assert set(outcome.refused) <= {LossReason.POOL_FULL}
        free = before.free_bytes // SPAN
        evicted = self.world.pool.usage().evictions - before.evictions
        assert evicted == max(0, outcome.stored - free), "evicted when there was room, or too much"
        if outcome.refused:
            usage = self.world.pool.usage()
            assert usage.free_bytes < SPAN, "refused, and yet there is room"
        self.note(before, outcome)

    @rule(data=st.data(), sequence=SEQUENCES, first=FIRSTS)
    def store_side_by_side(self, data: st.DataObject, sequence: int, first: int) -> None:
        self.count("stores side by side")
        numbers = [number for number, writer in self.writers.items() if writer.registered]
        if not numbers:
            return
        counts = data.draw(st.lists(COUNTS, min_size=2, max_size=4))
        self.offer(sequence, first, max(counts))
        before = self.world.pool.usage()

        async def all_of_them() -> list[StoreOutcome]:
            return await asyncio.gather(
                *(
                    self.store(
                        numbers[place % len(numbers)], sequence, first, count, block=place * 16
                    )
                    for place, count in enumerate(counts)
                )
            )

        outcomes = self.run(all_of_them())
        assert all(set(outcome.refused) <= {LossReason.POOL_FULL} for outcome in outcomes)
        self.note(before, *outcomes)

    @rule(number=WRITERS, sequence=SEQUENCES, first=FIRSTS, count=COUNTS, wrong=st.integers(0, 15))
    def store_with_a_wrong_stamp(
        self, number: int, sequence: int, first: int, count: int, wrong: int
    ) -> None:
        self.count("store with a wrong stamp")
        if self.refused(number, sequence, first, count):
            return
        self.offer(sequence, first, count)
        before, ring = self.world.pool.usage(), self.writers[number].ring

        def spoil() -> None:
            for chunk in range(count):
                ring.stamps[chunk * 4 + wrong // 4, wrong % 4] = EMPTY

        outcome = self.run(self.store(number, sequence, first, count, spoil=spoil))
        assert outcome.stored == 0
        assert set(outcome.refused) <= {LossReason.POOL_FULL, LossReason.STAMP_MISMATCH}
        self.note(before, outcome)

    @rule(number=WRITERS, sequence=SEQUENCES, first=FIRSTS, count=COUNTS)
    def store_whose_copy_fails(self, number: int, sequence: int, first: int, count: int) -> None:
        self.count("store whose copy fails")
        if self.refused(number, sequence, first, count):
            return
        self.offer(sequence, first, count)
        before = self.world.pool.usage()
        self.world.gate.before = self.burst
        outcome = self.run(self.store(number, sequence, first, count))
        self.world.gate.before = lambda: None
        assert outcome.stored == 0
        assert set(outcome.refused) <= {LossReason.POOL_FULL, LossReason.COPY_FAILED}
        self.note(before, outcome)

    def burst(self) -> None:
        self.world.gate.before = lambda: None
        raise OSError("planted")

    @rule(
        number=WRITERS,
        sequence=SEQUENCES,
        first=FIRSTS,
        count=COUNTS,
        fault=st.sampled_from(["none", "copy", "stamp", "death", "unregister"]),
    )
    def two_writers_of_the_same_chunks(
        self, number: int, sequence: int, first: int, count: int, fault: str
    ) -> None:
        """The second comes while the first one's copy runs: it shares the outcome, or takes over."""
        self.count("two writers")
        other = 3 - number
        for one, writer in self.writers.items():
            if not writer.registered:
                self.register(one, writer.ring)
        self.offer(sequence, first, count)
        before = self.world.pool.usage()
        place = sequence, first, count
        outcomes = self.run(self.meet(number, other, place, fault))
        if outcomes is None:
            return
        self.count(f"two writers, {fault}")
        self.note(before, *outcomes)
        first_outcome, second = outcomes
        full = first_outcome.refused.get(LossReason.POOL_FULL, 0)
        copied = count - first_outcome.duplicate - full
        if fault in ("none", "unregister"):
            assert first_outcome.stored == copied
            assert second.duplicate >= copied, "it shares the outcome"
        else:
            reason = LossReason.STAMP_MISMATCH if fault == "stamp" else LossReason.COPY_FAILED
            assert first_outcome.refused[reason] == copied
            assert second.stored >= copied, "it takes over what the first one did not store"

    async def meet(
        self, number: int, other: int, place: tuple[int, int, int], fault: str
    ) -> tuple[StoreOutcome, StoreOutcome] | None:
        """None when the first one had nothing to copy."""
        world, gate, writer = self.world, self.world.gate, self.writers[number]
        gate.open.clear()
        gate.entered.clear()
        gate.hold_calls = {gate.calls}
        one = asyncio.ensure_future(self.store(number, *place))
        await until(lambda: gate.entered.is_set() or one.done())
        if one.done():
            gate.hold_calls = set()
            outcome = await one
            self.note(self.world.pool.usage(), outcome)
            assert outcome.stored == 0
            return None
        two = asyncio.ensure_future(self.store(other, *place))
        await asyncio.sleep(0)
        leaving = None
        if fault == "copy":
            gate.before = self.burst
        elif fault == "stamp":
            writer.ring.stamps[: 4 * place[2]] = EMPTY
        elif fault == "death":
            leaving = asyncio.ensure_future(world.module.client_gone(f"w{number}", world.now))
        elif fault == "unregister":
            leaving = asyncio.ensure_future(
                world.module.unregister_q_cache(f"w{number}", number, None, world.now)
            )
        await asyncio.sleep(0)
        gate.open.set()
        outcomes = await one, await two
        if leaving is not None:
            await leaving
            writer.registered = False
        return outcomes

    # --- reading ------------------------------------------------------------------------------------------------

    @rule(target=leases, client=READERS, sequence=SEQUENCES, first=FIRSTS, count=COUNTS)
    def retrieve(self, client: str, sequence: int, first: int, count: int) -> int:
        return self.read(client, sequence, range(first, first + count))

    @rule(target=leases, client=READERS, data=st.data())
    def retrieve_what_is_there(self, client: str, data: st.DataObject) -> Any:
        if not self.stored:
            return multiple()
        sequence, chunk = data.draw(st.sampled_from(sorted(self.stored)))
        return self.read(client, sequence, range(chunk, chunk + 3))

    def read(self, client: str, sequence: int, chunks: range) -> int:
        self.count("retrieve")
        reply = self.world.retrieve(sequence, chunks, client)
        found = self.world.read(reply)
        for index, data in found.items():
            assert np.array_equal(data, stored_chunk(sequence, chunks[index]))
        self.operations["chunks read"] += len(found)
        misses = self.world.misses(reply)
        assert {chunks[index] for index in misses} == {
            chunk for chunk in chunks if (sequence, chunk) not in self.stored
        }
        assert reply.partial or set(found) | set(misses) == set(range(len(chunks)))
        for index, reason in misses.items():
            told = {"evicted", "pool_full", "stamp_mismatch", "copy_failed"}
            assert reason in (told if (sequence, chunks[index]) in self.offered else {"not_stored"})
        if reply.lease_id:
            self.held[reply.lease_id] = (client, reply, sequence, chunks)
        return reply.lease_id

    @rule(lease_id=consumes(leases))
    def release(self, lease_id: int) -> None:
        self.count("release")
        if lease_id in self.held:
            self.world.module.reads.release_q(self.held.pop(lease_id)[0], [lease_id])
            return
        with pytest.raises(RequestError) as caught:
            self.world.module.reads.release_q("r1", [lease_id])
        assert caught.value.code is ErrorCode.UNKNOWN_LEASE

    @rule(client=READERS)
    def reader_dies(self, client: str) -> None:
        self.count("reader dies")
        self.run(self.world.module.client_gone(client, self.world.now))
        self.held = {lease_id: held for lease_id, held in self.held.items() if held[0] != client}

    # --- time ---------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, LEASE_S + 1, REAP_S + 1, GRACE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.count("time passes")
        self.world.now += seconds
        if seconds > LEASE_S:
            assert self.world.module.reads.expire_leases(self.world.now) == len(self.held)
            self.operations["leases expired"] += len(self.held)
            self.held.clear()

    @rule(silent_s=st.sampled_from([0.0, REAP_S + 1, GRACE_S + 1]))
    def reap(self, silent_s: float) -> None:
        self.count("reap")
        self.world.now += silent_s
        now, stale = self.world.now, []
        for number, writer in self.writers.items():
            allowed_s = REAP_S if writer.has_pinged else GRACE_S
            if writer.registered and now - writer.last_seen > allowed_s:
                stale.append(number)
                writer.registered = False
        assert sorted(self.run(self.world.module.reap_stale_instances(now))) == stale
        self.operations["workers reaped"] += len(stale)

    # --- workers ------------------------------------------------------------------------------------------------

    @rule(number=WRITERS)
    def ping(self, number: int) -> None:
        self.count("ping")
        writer = self.writers[number]
        known = self.world.module.ping(f"w{number}", number, None, self.world.now)
        assert known == writer.registered
        if known:
            writer.has_pinged, writer.last_seen = True, self.world.now

    @rule(number=WRITERS)
    def register_again(self, number: int) -> None:
        """The same ring: a refresh where it is known, which needs no memory; else it is registered anew."""
        self.count("register")
        writer = self.writers[number]
        if not writer.registered:
            self.register(number, writer.ring)
            return
        before = self.world.module.registry.get(number)
        description = writer.ring.description
        self.run(
            self.world.module.register_q_cache(
                f"w{number}", number, MODEL, 1, description, None, self.world.now
            )
        )
        assert self.world.module.registry.get(number) is before
        writer.last_seen = self.world.now

    @rule(number=WRITERS)
    def register_another_ring(self, number: int) -> None:
        """It replaces the one before, which is closed."""
        self.count("register another ring")
        before = self.world.module.registry.get(number)
        ring = FakeWorker(num_blocks=64)
        self.world.workers.append(ring)
        self.register(number, ring)
        assert before is None or before.ring.closed

    def register(self, number: int, ring: FakeWorker) -> None:
        self.run(self.world.register(ring, number, f"w{number}"))
        self.writers[number] = Writer(ring, last_seen=self.world.now)

    @rule(number=WRITERS)
    def unregister(self, number: int) -> None:
        self.count("unregister")
        leaving = self.world.module.unregister_q_cache(f"w{number}", number, None, self.world.now)
        if self.writers[number].registered:
            self.run(leaving)
            self.writers[number].registered = False
            return
        with pytest.raises(RequestError) as caught:
            self.run(leaving)
        assert caught.value.code is ErrorCode.UNKNOWN_INSTANCE

    @rule(number=WRITERS)
    def worker_dies(self, number: int) -> None:
        self.count("worker dies")
        self.run(self.world.module.client_gone(f"w{number}", self.world.now))
        self.writers[number].registered = False

    # --- what always holds --------------------------------------------------------------------------------------

    @invariant()
    def bytes_add_up_and_leased_bytes_stay(self) -> None:
        module = self.world.module
        module.index.validate()
        usage = self.world.pool.usage()
        assert usage.reserved_bytes == 0
        assert len(module.index) * SPAN == usage.committed_bytes + usage.leased_bytes
        assert usage.free_bytes == usage.capacity_bytes - len(self.stored) * SPAN
        assert module.report_status()["leases"]["count"] == len(self.held)
        leased = set()
        for _, reply, sequence, chunks in self.held.values():
            for index, data in self.world.read(reply).items():
                assert np.array_equal(data, stored_chunk(sequence, chunks[index]))
                leased.add((sequence, chunks[index]))
        assert leased <= self.stored, "what is leased is not evicted"
        assert usage.leased_bytes == len(leased) * SPAN

    @invariant()
    def who_is_registered_is_known(self) -> None:
        known = [number for number, writer in self.writers.items() if writer.registered]
        assert self.world.module.report_status()["registered_q_ids"] == known


def test_random_operations_against_a_dict() -> None:
    StoreMachine.operations.clear()
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=170,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
    counts = StoreMachine.operations
    print(dict(counts.most_common()))
    rules = {
        "store", "stores side by side", "store with a wrong stamp", "store whose copy fails", "two writers",
        "retrieve", "release", "reader dies", "time passes", "reap", "ping", "register",
        "register another ring", "unregister", "worker dies",
    }  # fmt: skip
    assert sum(counts[name] for name in rules) >= LEAST_OPERATIONS
    came_about = {
        "chunks stored", "chunks evicted", "duplicates", "chunks read", "leases expired", "workers reaped",
        "store of a stranger", "chunks pool_full", "chunks stamp_mismatch", "chunks copy_failed",
        *(f"two writers, {fault}" for fault in ("none", "copy", "stamp", "death", "unregister")),
    }  # fmt: skip
    assert {name for name in rules | came_about if not counts[name]} == set()
