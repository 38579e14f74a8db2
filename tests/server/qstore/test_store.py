"""What a store does, when all goes well and when it does not."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.hashing import chunk_hashes
from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.messages import ChunkQuery, StoreOutcome
from lmcache_qprotocol.reasons import LossReason, MissReason
from lmcache_qprotocol.stamps import EMPTY
from lmcache_qserver.events import StoreEnd, StoreStart, StoreSubmitted
from tests.server.qstore.fake_worker import (
    CHUNK_BYTES,
    FAMILY,
    LAYOUT,
    hash_of,
    proof_of,
    query_of,
    range_key,
    stored_chunk,
)
from tests.server.qstore.world import DEADLINE_S, World, until


async def test_what_is_stored_comes_back_byte_for_byte(world: World) -> None:
    worker = await world.worker()
    assert await world.store(worker, 1, 0, 3, block=5) == StoreOutcome(stored=3)
    worker.blocks[:] = -1
    reply = world.retrieve(1, [0, 1, 2, 3])
    found = world.read(reply)
    assert set(found) == {0, 1, 2}
    for chunk, data in found.items():
        assert np.array_equal(data, stored_chunk(1, chunk))
    assert world.misses(reply) == {3: "not_stored"}
    assert world.module.reads.lookup_q(query_of(1, [0, 1, 2, 3])).prefix == 3


async def test_blocks_need_no_order(world: World) -> None:
    worker = await world.worker()
    blocks = (31, 2, 3, 17)
    nonce = worker.write(4, 2, blocks)
    key = range_key(4, 2)
    result = await world.module.stores.store_q(
        "c1", key, 1, (blocks,), b"", proof_of(nonce), world.now
    )
    assert result.ok
    assert np.array_equal(world.read(world.retrieve(4, [2]))[0], stored_chunk(4, 2))


async def test_whole_token_lists_are_hashed_by_the_server(world: World) -> None:
    worker = await world.worker()
    tokens = tuple(range(100, 132))
    nonces = worker.write(1, 0, range(4)), worker.write(1, 1, range(4, 8))
    key = range_key(1, 1, token_ids=tokens, chunk_hashes=())
    blocks = (tuple(range(4, 8)),)
    result = await world.module.stores.store_q(
        "c1", key, 1, blocks, b"", proof_of(nonces[1]), world.now
    )
    assert result.ok
    query = ChunkQuery(family=FAMILY, chunk_hashes=tuple(chunk_hashes(tokens, 16)))
    reply = world.module.reads.retrieve_q("reader", query, world.now)
    assert np.array_equal(world.read(reply)[1], stored_chunk(1, 1))
    assert world.misses(reply) == {0: "not_stored"}


async def test_events_and_totals(world: World) -> None:
    worker = await world.worker("w")
    await world.store(worker, 1, 0, 2, instance_id="w")
    await world.store(worker, 1, 1, 2, instance_id="w")
    kinds = [type(event) for event in world.events]
    assert kinds == [StoreSubmitted, StoreStart, StoreEnd] * 2
    end = world.events[-1]
    assert isinstance(end, StoreEnd)
    assert (end.session, end.instance_id, end.model_name, end.device) == (
        "request-1",
        "w",
        FAMILY.model_name,
        "cpu",
    )
    assert (end.stored, end.duplicate, end.refused, end.nbytes) == (1, 1, {}, CHUNK_BYTES)
    assert end.seconds >= 0
    totals = world.module.report_status()["totals"]
    assert totals["stored"] == 3
    assert totals["duplicate"] == 1
    assert totals["refused"] == {"pool_full": 0, "copy_failed": 0, "stamp_mismatch": 0}
    assert totals["stored_bytes"] == 3 * CHUNK_BYTES
    assert totals["submitted_stores"] == totals["finished_stores"] == 2


async def test_models_are_described_by_what_is_stored(world: World) -> None:
    worker = await world.worker()
    await world.store(worker, 1, 0, 2)
    await world.module.client_gone("c1", world.now)
    (model,) = world.module.report_status()["models"]
    assert model["model_name"] == FAMILY.model_name
    assert (model["world_size"], model["kv_rank"]) == (1, FAMILY.kv_rank)
    assert model["layout_id"] == FAMILY.layout_id.hex()
    assert tuple(model["layout"]["layer_ids"]) == LAYOUT.layer_ids
    assert (model["chunk_size"], model["chunks"], model["bytes"]) == (16, 2, 2 * CHUNK_BYTES)


async def test_a_failing_subscriber_hurts_nobody(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    def burst(event: object) -> None:
        raise ZeroDivisionError

    world.bus.subscribe(burst)
    world.bus.subscribe(seen.append)
    worker = await world.worker()
    assert (await world.store(worker, 1)).stored == 1
    assert len(seen) == 3
    assert "ZeroDivisionError" in caplog.text


# --- proof ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [EMPTY, 0, 1 << 40])
async def test_one_flipped_stamp_and_nothing_is_committed(world: World, wrong: int) -> None:
    worker = await world.worker()

    def spoil() -> None:
        worker.stamps[6, 2] = wrong

    outcome = await world.store(worker, 1, 0, 3, spoil=spoil)
    assert outcome.refused == {LossReason.STAMP_MISMATCH: 3}
    assert "position 26 " in outcome.message
    usage = world.pool.usage()
    assert usage.free_bytes == usage.capacity_bytes
    reply = world.retrieve(1, [0, 1, 2])
    assert reply.lease_id == 0
    assert world.misses(reply) == dict.fromkeys(range(3), "stamp_mismatch")
    assert (await world.store(worker, 1, 0, 3)).stored == 3, "a later store makes it good"
    assert not world.retrieve(1, [0, 1, 2]).missing
    key = ObjectKey(family=FAMILY, chunk_hash=hash_of(1, 0))
    assert world.module.index.miss_reason(key) is MissReason.NOT_STORED, "the reason is forgotten"


async def test_a_nonce_of_another_chunk_is_refused(world: World) -> None:
    worker = await world.worker()
    worker.write(1, 0, range(4))
    nonce = worker.write(2, 0, range(4, 8))
    result = await world.module.stores.store_q(
        "c1", range_key(1, 0), 1, (tuple(range(4)),), b"", proof_of(nonce), world.now
    )
    assert result.outcome is not None
    assert result.outcome.refused == {LossReason.STAMP_MISMATCH: 1}


async def test_a_block_that_is_given_away_during_the_copy_is_caught(world: World) -> None:
    worker = await world.worker()

    def give_away() -> None:
        worker.write(99, 7, range(4))

    world.gate.before = give_away
    outcome = await world.store(worker, 1, 0, 1)
    assert outcome.refused == {LossReason.STAMP_MISMATCH: 1}
    assert world.misses(world.retrieve(1, [0])) == {0: "stamp_mismatch"}


async def test_a_copy_that_raises_is_copy_failed(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await world.worker()

    def burst() -> None:
        raise OSError("bad page")

    world.gate.before = burst
    outcome = await world.store(worker, 1, 0, 2)
    assert outcome.refused == {LossReason.COPY_FAILED: 2}
    assert "bad page" in outcome.message
    assert "Traceback" in caplog.text
    assert world.misses(world.retrieve(1, [0, 1])) == {0: "copy_failed", 1: "copy_failed"}
    world.gate.before = lambda: None
    assert (await world.store(worker, 1, 0, 2)).stored == 2


# --- duplicates -----------------------------------------------------------------------------------------------------


async def test_duplicates_are_not_copied(world: World) -> None:
    worker = await world.worker()
    await world.store(worker, 1, 0, 2)
    assert await world.store(worker, 1, 0, 2) == StoreOutcome(duplicate=2)
    assert world.gate.calls == 1


async def test_a_hash_twice_in_one_store_is_written_once(world: World) -> None:
    worker = await world.worker()
    nonces = worker.write(1, 0, range(4)), worker.write(1, 1, range(4, 8))
    key = range_key(1, 0, 2)
    same = range_key(1, 0, 2, chunk_hashes=(key.chunk_hashes[0],) * 2)
    blocks = (tuple(range(8)),)
    result = await world.module.stores.store_q(
        "c1", same, 1, blocks, b"", proof_of(*nonces), world.now
    )
    assert result.outcome == StoreOutcome(stored=1, duplicate=1)
    assert np.array_equal(world.read(world.retrieve(1, [0]))[0], stored_chunk(1, 0))


async def test_salt_and_rank_are_part_of_the_key(world: World) -> None:
    worker = await world.worker()
    nonce = worker.write(1, 0, range(4))
    for salt in ("", "a", "b"):
        key = range_key(1, 0, cache_salt=salt)
        result = await world.module.stores.store_q(
            "c1", key, 1, ((0, 1, 2, 3),), b"", proof_of(nonce), world.now
        )
        assert result.outcome == StoreOutcome(stored=1)
    key = range_key(1, 0, cache_salt=None)
    result = await world.module.stores.store_q(
        "c1", key, 1, ((0, 1, 2, 3),), b"", proof_of(nonce), world.now
    )
    assert result.outcome == StoreOutcome(duplicate=1)


async def two_stores_of_one_chunk(world: World) -> tuple[Any, Any]:
    """Two workers; the first one's copy is held, the second one waits for its outcome."""
    first, second = await world.worker(1), await world.worker(2, client="c2")
    world.gate.hold_calls = {0}
    one = asyncio.ensure_future(world.store(first, 1, 0, 2))
    await until(world.gate.entered.is_set)
    two = asyncio.ensure_future(world.store(second, 1, 1, 2, instance_id=2, client="c2"))
    await until(lambda: world.module.reads.lookup_q(query_of(1, [2])).prefix == 1)
    assert world.misses(world.retrieve(1, [0, 1])) == {0: "being_stored", 1: "being_stored"}
    assert not two.done()
    return one, two


async def test_the_outcome_of_a_store_under_way_is_shared(world: World) -> None:
    one, two = await two_stores_of_one_chunk(world)
    world.gate.open.set()
    assert await one == StoreOutcome(stored=2)
    assert await two == StoreOutcome(stored=1, duplicate=1)
    assert world.gate.calls == 2


async def test_a_chunk_whose_store_fails_is_taken_over(world: World) -> None:
    one, two = await two_stores_of_one_chunk(world)
    world.workers[0].stamps[0, 0] = EMPTY
    world.gate.open.set()
    assert (await one).refused == {LossReason.STAMP_MISMATCH: 2}
    assert await two == StoreOutcome(stored=2)
    found = world.read(world.retrieve(1, [1, 2]))
    assert np.array_equal(found[0], stored_chunk(1, 1))
    assert world.misses(world.retrieve(1, [0])) == {0: "stamp_mismatch"}


async def test_a_taken_over_chunk_may_fail_too(world: World) -> None:
    one, two = await two_stores_of_one_chunk(world)
    world.workers[0].stamps[0, 0] = EMPTY
    world.workers[1].stamps[1, 1] = EMPTY
    world.gate.open.set()
    await one
    outcome = await two
    assert (outcome.stored, outcome.refused) == (1, {LossReason.STAMP_MISMATCH: 1})


async def test_crosswise_stores_do_not_wait_for_each_other(world: World) -> None:
    first, second = await world.worker(1), await world.worker(2, client="c2")
    outcomes = await asyncio.gather(
        *(world.store(first, number, 0, 2) for number in range(4)),
        *(world.store(second, number, 1, 2, instance_id=2, client="c2") for number in range(4)),
        return_exceptions=True,
    )
    assert all(isinstance(outcome, StoreOutcome) for outcome in outcomes)


# --- room -----------------------------------------------------------------------------------------------------------


async def test_the_least_recently_used_is_evicted_on_demand(world: World) -> None:
    worker = await world.worker()
    for sequence in range(16):
        await world.store(worker, sequence)
    world.module.reads.release_q("reader", [world.retrieve(0, [0]).lease_id])
    assert (await world.store(worker, 16)).stored == 1
    assert world.misses(world.retrieve(1, [0])) == {0: "evicted"}
    assert not world.retrieve(0, [0]).missing
    assert (await world.store(worker, 1)).stored == 1
    assert not world.retrieve(1, [0]).missing


async def test_a_sequence_loses_its_end_first() -> None:
    world = World(max_lease_share=0.5)
    worker = await world.worker()
    await world.store(worker, 1, 0, 8)
    await world.store(worker, 2, 0, 8)
    world.module.reads.release_q("reader", [world.retrieve(1, range(8)).lease_id])
    await world.store(worker, 3, 0, 3)
    assert world.module.reads.lookup_q(query_of(2, range(8))).prefix == 5
    await world.store(worker, 4, 0, 8)
    assert world.module.reads.lookup_q(query_of(1, range(8))).prefix == 5
    await world.close()


async def test_what_fits_is_stored_and_the_rest_is_pool_full() -> None:
    world = World(pool_chunks=3)
    worker = await world.worker()
    outcome = await world.store(worker, 1, 0, 5)
    assert (outcome.stored, outcome.refused) == (3, {LossReason.POOL_FULL: 2})
    reply = world.retrieve(1, range(5), client="c1")
    assert world.misses(reply) == {3: "pool_full", 4: "pool_full"}
    await world.close()


async def test_a_chunk_larger_than_the_pool_is_told_as_such() -> None:
    world = World(pool_bytes=4096)
    worker = await world.worker()
    assert "--pool-bytes" in (await world.store(worker, 1)).message
    await world.close()
    world = World(pool_chunks=1)
    worker = await world.worker()
    assert "being written or read" in (await world.store(worker, 1, 0, 2)).message
    await world.close()


async def test_leased_objects_are_not_evicted(world: World) -> None:
    worker = await world.worker()
    for number in range(4):
        await world.store(worker, number, 0, 4)
        world.retrieve(number, range(4), client=f"reader-{number}")
    outcome = await world.store(worker, 9)
    assert outcome.refused == {LossReason.POOL_FULL: 1}
    assert world.misses(world.retrieve(9, [0])) == {0: "pool_full"}
    await world.module.client_gone("reader-0", world.now)
    assert (await world.store(worker, 9)).stored == 1


async def test_room_is_not_made_at_the_cost_of_the_stores_own_duplicates() -> None:
    world = World(pool_chunks=2)
    worker = await world.worker()
    await world.store(worker, 1, 0, 2)
    outcome = await world.store(worker, 1, 0, 3)
    assert (outcome.duplicate, outcome.refused) == (2, {LossReason.POOL_FULL: 1})
    assert world.module.reads.lookup_q(query_of(1, [0, 1])).prefix == 2
    await world.close()


# --- death and hanging ----------------------------------------------------------------------------------------------


async def test_nothing_is_admitted_after_the_client_died_during_the_copy(world: World) -> None:
    worker = await world.worker()
    world.gate.hold_calls = {0}
    running = asyncio.ensure_future(world.store(worker, 1, 0, 2))
    await until(world.gate.entered.is_set)
    waiting = asyncio.ensure_future(world.store(worker, 2, 0, 1, block=8))
    await until(lambda: world.misses(world.retrieve(2, [0])) == {0: "being_stored"})
    instance = world.module.registry.get(1)
    gone = asyncio.ensure_future(world.module.client_gone("c1", world.now))
    assert (await waiting).refused == {LossReason.COPY_FAILED: 1}, "what has not begun never does"
    assert not gone.done()
    assert instance is not None
    assert not instance.ring.closed, "the mapping stays while a copy runs"
    assert world.pool.usage().reserved_bytes > 0
    world.gate.open.set()
    await gone
    assert instance.ring.closed
    assert (await running).refused == {LossReason.COPY_FAILED: 2}
    assert world.misses(world.retrieve(1, [0, 1])) == {0: "copy_failed", 1: "copy_failed"}
    assert world.pool.usage().free_bytes == world.pool.usage().capacity_bytes
    assert world.gate.calls == 1


async def test_dying_during_a_graceful_release_admits_nothing_either(world: World) -> None:
    worker = await world.worker()
    world.gate.hold_calls = {0}
    running = asyncio.ensure_future(world.store(worker, 1))
    waiting = asyncio.ensure_future(world.store(worker, 2, block=8))
    await until(world.gate.entered.is_set)
    leaving = asyncio.ensure_future(world.module.unregister_q_cache("c1", 1, None, world.now))
    await until(lambda: not world.module.registry.live())
    gone = asyncio.ensure_future(world.module.client_gone("c1", world.now))
    assert (await waiting).refused == {LossReason.COPY_FAILED: 1}
    world.gate.open.set()
    assert (await running).refused == {LossReason.COPY_FAILED: 1}
    await asyncio.gather(leaving, gone)
    assert world.gate.calls == 1


async def test_dying_while_another_ring_replaces_the_old_one_admits_nothing_either(
    world: World,
) -> None:
    worker = await world.worker()
    world.gate.hold_calls = {0}
    running = asyncio.ensure_future(world.store(worker, 1))
    await until(world.gate.entered.is_set)
    old = world.module.registry.get(1)
    replacing = asyncio.ensure_future(world.worker())
    await until(lambda: world.module.registry.get(1) is not old)
    gone = asyncio.ensure_future(world.module.client_gone("c1", world.now))
    await asyncio.sleep(0)
    world.gate.open.set()
    assert (await running).refused == {LossReason.COPY_FAILED: 1}
    await gone
    with pytest.raises(RequestError):
        await replacing
    assert old is not None
    assert old.ring.closed
    assert not list(world.module.registry)


async def test_a_store_whose_caller_is_cancelled_goes_on(world: World) -> None:
    worker = await world.worker()
    world.gate.hold_calls = {0}
    store = asyncio.ensure_future(world.store(worker, 1))
    await until(world.gate.entered.is_set)
    store.cancel()
    with pytest.raises(asyncio.CancelledError):
        await store
    world.gate.open.set()
    await until(lambda: world.module.reads.lookup_q(query_of(1, [0])).prefix == 1)


async def test_a_hung_copy_is_bounded_quarantined_and_hurts_nobody_else() -> None:
    world = World()
    worker, other = await world.worker(1), await world.worker(2, client="c2")
    outcome = await world.hang(worker, 1, count=2)
    assert outcome.refused == {LossReason.COPY_FAILED: 2}
    reserved = world.pool.usage().reserved_bytes
    assert reserved >= 2 * CHUNK_BYTES, "the thread may still write there"
    assert (await world.store(worker, 2)).refused == {LossReason.COPY_FAILED: 1}
    assert world.gate.calls == 1
    assert world.misses(world.retrieve(2, [0])) == {0: "copy_failed"}
    assert world.module.report_status()["lanes"]["hung"] == 1
    assert (await world.store(other, 1, 0, 2, instance_id=2, client="c2")).stored == 2
    world.gate.open.set()
    await until(lambda: world.pool.usage().reserved_bytes == 0)
    assert np.array_equal(world.read(world.retrieve(1, [0]))[0], stored_chunk(1, 0))
    assert (await world.store(worker, 3)).stored == 1, "the lane works again"
    await world.close()


async def test_a_store_on_a_hung_lane_evicts_nothing() -> None:
    world = World(pool_chunks=3)
    worker = await world.worker()
    await world.store(worker, 1, 0, 2)
    await world.hang(worker, 2)
    await world.store(worker, 3, 0, 2)
    assert world.module.reads.lookup_q(query_of(1, [0, 1])).prefix == 2
    await world.close()


async def test_releasing_a_hung_lane_keeps_its_mapping_until_it_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    worker = await world.worker()
    await world.hang(worker, 1)
    instance = world.module.registry.get(1)
    await world.module.client_gone("c1", world.now)
    assert instance is not None
    assert not instance.ring.closed
    assert "hangs" in caplog.text
    assert world.module.report_status()["lanes"] == {"hung": 0, "stuck_after_release": 1}
    assert world.module.registry.get(1) is None
    world.gate.open.set()
    await until(lambda: instance.ring.closed)
    await until(lambda: world.module.report_status()["lanes"]["stuck_after_release"] == 0)
    await until(lambda: "qlane-1" not in {thread.name for thread in threading.enumerate()})
    await world.close()


async def test_draining_refuses_new_stores_and_waits_for_those_that_run(world: World) -> None:
    worker = await world.worker()
    world.gate.hold_calls = {0}
    running = asyncio.ensure_future(world.store(worker, 1))
    await until(world.gate.entered.is_set)
    assert not await world.module.drain(0.01)
    with pytest.raises(RequestError) as caught:
        await world.store(worker, 2, block=8)
    assert caught.value.code is ErrorCode.SHUTTING_DOWN
    with pytest.raises(RequestError) as caught:
        await world.register(worker, 5)
    assert caught.value.code is ErrorCode.SHUTTING_DOWN
    world.gate.open.set()
    assert await world.module.drain(20.0)
    assert (await running).stored == 1


async def test_a_store_that_waits_to_be_hashed_when_its_worker_goes_is_no_fault_of_ours(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await world.worker()
    world.gate.hold_calls = {0}
    first = asyncio.ensure_future(world.store(worker, 1))
    await until(world.gate.entered.is_set)
    nonce = worker.write(2, 0, range(4, 8))
    key = range_key(2, 0, token_ids=tuple(range(16)), chunk_hashes=())
    second = asyncio.ensure_future(
        world.module.stores.store_q("c1", key, 1, ((4, 5, 6, 7),), b"", proof_of(nonce), world.now)
    )
    instance = world.module.registry.get(1)
    assert instance is not None
    await until(lambda: instance.lane.waiting == 2)
    gone = asyncio.ensure_future(world.module.client_gone("c1", world.now))
    result = await second
    assert result.outcome is not None
    assert result.outcome.refused == {LossReason.COPY_FAILED: 1}
    world.gate.open.set()
    await first
    await gone
    assert not [record for record in caplog.records if record.exc_info]


async def test_the_first_copy_is_in_its_lane_before_the_loop_turns(world: World) -> None:
    """What is told and answered afterwards then costs no time: the copy runs beside it."""
    worker = await world.worker()
    nonce = worker.write(1, 0, range(4))
    world.gate.hold_calls = {0}
    task = world.module.stores.begin_store_q(
        "c1", range_key(1, 0), 1, ((0, 1, 2, 3),), b"", proof_of(nonce), world.now
    )
    assert world.gate.entered.wait(DEADLINE_S), "the lane waits for the loop"
    assert not world.events
    world.gate.open.set()
    result = await task
    assert result.ok
    await until(lambda: len(world.events) == 3)
    assert [type(event) for event in world.events] == [StoreSubmitted, StoreStart, StoreEnd]


async def test_two_stores_of_one_chunk_that_begin_at_once_are_one_copy(world: World) -> None:
    worker = await world.worker()
    nonces = worker.write(1, 0, range(4)), worker.write(1, 0, range(4, 8))
    tasks = [
        world.module.stores.begin_store_q(
            "c1", range_key(1, 0), 1, (blocks,), b"", proof_of(nonce), world.now
        )
        for blocks, nonce in zip(((0, 1, 2, 3), (4, 5, 6, 7)), nonces, strict=True)
    ]
    outcomes = [(await task).outcome for task in tasks]
    assert outcomes == [StoreOutcome(stored=1), StoreOutcome(duplicate=1)]
    assert world.gate.calls == 1
