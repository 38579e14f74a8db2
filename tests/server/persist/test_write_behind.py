"""Writing behind the stores, where the store does what the test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from lmcache_qserver.tier import Full, Refused, TierError, Unavailable
from lmcache_qserver.tier.paths import quote
from tests.server.persist.controlled_store import ControlledStore, TierWorld, until
from tests.server.qstore.fake_worker import FAMILY
from tests.server.qstore.world import SPAN

MODEL = FAMILY.model_name


def lost(world: TierWorld) -> dict[str, int]:
    return {reason: count for reason, count in world.persistence.summary().lost.items() if count}


async def test_what_is_stored_before_the_store_is_open_waits_for_it(world: TierWorld) -> None:
    worker = await world.worker()
    await world.store(worker, 1, 0, 3)
    before = world.persistence.summary()
    assert (before.state, before.waiting) == ("opening", 3)
    reply = await world.module.flush_q(5.0)
    assert (reply.persisted, reply.waiting) == (False, 3)
    assert "opening" in reply.message
    store = world.attach()
    assert (await world.module.flush_q(20.0)).persisted
    assert len(store.objects) == 3
    world.check_sum()


async def test_a_flush_tells_what_was_lost_before_it(world: TierWorld) -> None:
    await world.store(await world.worker(), 1, 0, 2)
    world.evict()
    await world.store(world.workers[0], 2, 0, 1)
    assert lost(world) == {"evicted": 2}
    assert (await world.module.flush_q(0.1)).lost == 2
    world.attach()
    reply = await world.module.flush_q(20.0)
    assert (reply.persisted, reply.waiting, reply.lost) == (True, 0, 2)
    assert (await world.module.purge_q(MODEL, None)).deleted == 1
    assert (await world.module.flush_q(20.0)).lost == 2


async def test_persisted_is_said_when_it_is_and_not_before(world: TierWorld) -> None:
    store = world.attach()
    store.held = {"put"}
    await world.store(await world.worker(), 1, 0, 2)

    def said() -> list[bool]:
        reply = world.retrieve(1, [0, 1])
        world.module.reads.release_q("reader", (reply.lease_id,))
        return [chunk.persisted for chunk in reply.chunks]

    await store.until_waits("put", 2)
    assert said() == [False, False]
    store.step()
    await until(lambda: world.persistence.summary().written == 1)
    assert sorted(said()) == [False, True]
    store.let_go()
    assert (await world.module.flush_q(20.0)).persisted
    assert said() == [True, True]


async def test_draining_ends_at_its_deadline_and_nothing_is_lost_by_that(world: TierWorld) -> None:
    store = world.attach()
    store.held = {"put"}
    worker = await world.worker()
    await world.store(worker, 1, 0, 6)
    await store.until_waits("put", 4)
    began = time.monotonic()
    reply = await world.module.flush_q(0.2)
    assert 0.2 <= time.monotonic() - began < 5
    assert (reply.persisted, reply.waiting) == (False, 6)
    assert world.persistence.summary().writing == 4
    world.check_sum()
    assert not await world.persistence.writes.drain(0.0)
    store.let_go()
    assert (await world.module.flush_q(20.0)).persisted
    assert len(store.objects) == 6


async def test_closing_says_that_a_put_still_reads_the_pool(world: TierWorld) -> None:
    store = world.attach()
    store.held = {"put"}
    await world.store(await world.worker(), 1, 0, 5)
    await store.until_waits("put", 4)
    assert not await world.persistence.close(0.1)
    store.let_go()
    assert await world.persistence.close(20.0)
    assert len(store.objects) == 4, "what waited is not begun any more"
    world.check_sum()


async def test_a_purge_waits_for_the_write_under_way_and_nothing_comes_back(
    world: TierWorld,
) -> None:
    store = world.attach()
    store.held = {"put"}
    await world.store(await world.worker(), 1, 0, 6)
    await store.until_waits("put", 4)
    purge = asyncio.ensure_future(world.module.purge_q(MODEL, None))
    await until(lambda: world.persistence.summary().waiting == 0)
    assert not purge.done()
    store.let_go()
    reply = await purge
    assert (reply.dropped, reply.deleted, reply.message) == (6, 4, "")
    assert store.objects == {}
    assert (await world.module.flush_q(20.0)).persisted
    assert store.objects == {}
    assert await world.read_back(1, *range(6)) == dict.fromkeys(range(6), "purged")
    assert lost(world) == {"purged": 2}
    world.check_sum()


async def test_a_write_under_way_that_fails_behind_a_purge_is_not_tried_again(
    world: TierWorld,
) -> None:
    store = world.attach()
    store.held = {"put"}
    await world.store(await world.worker(), 1)
    await store.until_waits("put")
    purge = asyncio.ensure_future(world.module.purge_q(MODEL, None))
    await asyncio.sleep(0)
    store.failing["put"] = [Unavailable("gone")]
    store.let_go()
    await purge
    assert (store.objects, store.count("put"), lost(world)) == ({}, 1, {"purged": 1})
    world.check_sum()


@pytest.mark.parametrize("error", [Unavailable("x"), Full("x"), Refused("x")])
async def test_failures_are_counted_open_the_breaker_and_end_when_it_works(
    world: TierWorld, error: TierError
) -> None:
    store = world.attach()
    store.for_ever["put"] = error
    await world.store(await world.worker(), 1, 0, 8)
    await until(lambda: world.persistence.state == "failing")
    await until(lambda: world.persistence.summary().writing == 0)
    now = world.persistence.summary()
    assert now.errors[error.code] == sum(now.errors.values()) >= 3
    assert (now.written, now.waiting, now.pinned_bytes) == (0, 8, 0)
    world.check_sum()
    tried = store.count("put")
    store.for_ever.clear()
    await until(lambda: world.persistence.state == "ready")
    assert store.count("put") == tried + 1, "one finds out whether it works again"
    assert (await world.module.flush_q(20.0)).persisted
    assert world.persistence.summary().written == 8
    world.check_sum()


async def test_a_model_that_is_refused_holds_no_other_up(world: TierWorld) -> None:
    """Its folder may be another user's. Pauses grow to a minute: the others must not wait for its whole queue."""
    store = world.attach()
    store.refused = quote(MODEL)
    await world.store(await world.worker(), 1, 0, 8)
    await until(lambda: world.persistence.state == "failing")
    tried = store.count("put")
    worker = await world.worker(2, "c2", model="another")
    await world.store(worker, 1, 0, 6, instance_id=2, client="c2", model="another")
    await until(lambda: world.persistence.summary().written == 6)
    assert store.count("put") <= tried + 6 + 3
    store.refused = ""
    await until(lambda: world.persistence.summary().written == 14)
    world.check_sum()


async def test_what_waits_while_it_fails_gives_way_to_what_is_stored(world: TierWorld) -> None:
    store = world.attach()
    store.for_ever["put"] = Unavailable("x")
    worker = await world.worker()
    await world.store(worker, 1, 0, 8)
    await until(lambda: world.persistence.state == "failing")
    for sequence in range(2, 8):
        assert (await world.store(worker, sequence, 0, 8)).stored == 8
        world.check_sum()
    assert lost(world) == {"evicted": 40}
    store.for_ever.clear()
    await until(lambda: world.persistence.state == "ready")
    assert (await world.module.flush_q(20.0)).persisted
    assert len(store.objects) == 16


async def test_a_put_that_is_not_over_keeps_its_slot(world: TierWorld) -> None:
    """It has timed out, and a thread still reads: the bytes stay, whatever is stored meanwhile."""
    store = world.attach()
    store.held = {"put"}
    worker = await world.worker()
    await world.store(worker, 1)
    await store.until_waits("put")
    store.time_out()
    await until(lambda: world.persistence.summary().errors["unavailable"] == 1)
    now = world.persistence.summary()
    assert (now.writing, now.pinned_bytes) == (1, SPAN)
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert store.count("put") == 1, "it is not put again beside the one that is not over"
    for sequence in range(2, 8):
        await world.store(worker, sequence, 0, 7)
    assert (await world.read_back(1, 0)) == {0: True}
    store.let_go()
    assert (await world.module.flush_q(20.0)).persisted
    now = world.persistence.summary()
    assert now.already_there == 1, "it had been written all the same"
    world.check_sum()
    world.evict()
    assert (await world.read_back(1, 0)) == {0: True}


async def test_what_leaves_the_index_while_it_is_written_is_written(world: TierWorld) -> None:
    store = world.attach()
    store.held = {"put"}
    await world.store(await world.worker(), 1)
    await store.until_waits("put")
    world.evict()
    assert world.pool.usage().leased_bytes == SPAN
    store.let_go()
    assert (await world.module.flush_q(20.0)).persisted
    assert (world.pool.usage().slots, lost(world)) == (0, {})
    world.check_sum()
    assert (await world.read_back(1, 0)) == {0: True}


async def test_a_strange_error_loses_one_object_and_stops_nothing(world: TierWorld) -> None:
    store = world.attach()
    store.failing["put"] = [RuntimeError("a bug of a store")]
    await world.store(await world.worker(), 1, 0, 4)
    assert (await world.module.flush_q(20.0)).persisted
    assert (lost(world), len(store.objects)) == ({"failed": 1}, 3)
    world.check_sum()


@pytest.fixture
async def with_checksums() -> AsyncIterator[TierWorld]:
    """Every object has its checksum when it is stored."""
    world = TierWorld(inline_checksums=True)
    yield world
    await world.close()


async def test_bytes_that_change_in_memory_before_their_turn_are_not_written(
    with_checksums: TierWorld,
) -> None:
    world = with_checksums
    await world.store(await world.worker(), 1, 0, 2)
    last = next(one for one in world.module.index.objects() if one.place.start)
    world.memory.array[last.slot.offset + 5] ^= 1
    store: ControlledStore = world.attach()
    assert (await world.module.flush_q(20.0)).persisted
    assert (lost(world), len(store.objects)) == ({"corrupt": 1}, 1)
    assert await world.read_back(1, 0, 1) == {0: True, 1: "corrupt"}
    world.check_sum()
