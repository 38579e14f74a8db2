"""Reading through the pool, where the store does what the test says."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from lmcache_qserver.tier import Unavailable
from tests.server.persist.controlled_store import ControlledStore, TierWorld, until
from tests.server.qstore.fake_worker import FAMILY, query_of
from tests.server.qstore.world import SPAN

MODEL = FAMILY.model_name


async def filled(world: TierWorld, chunks: int = 1, sequences: int = 1) -> ControlledStore:
    """Sequences 1, 2, ... are in the store only."""
    store = world.attach()
    worker = await world.worker(num_blocks=64)
    for sequence in range(1, sequences + 1):
        await world.store(worker, sequence, 0, chunks)
        await world.forget()
    store.asked.clear()
    return store


def leased(world: TierWorld) -> int:
    return world.pool.usage().leased_bytes // SPAN


async def test_two_queries_share_one_transfer(world: TierWorld) -> None:
    store = await filled(world)
    store.held = {"get"}
    queries = [asyncio.ensure_future(world.bring(query_of(1, [0]), name)) for name in "ab"]
    await store.until_waits("get")
    assert world.persistence.summary().fetching == 1
    store.let_go()
    replies = await asyncio.gather(*queries)
    assert [len(reply.chunks) for reply in replies] == [1, 1]
    assert (store.count("get"), world.persistence.summary().brought) == (1, 1)
    assert store.count("head") == 2, "under its parent, and where the parent is not told"
    assert leased(world) == 1
    for reply, name in zip(replies, "ab", strict=True):
        world.module.reads.release_q(name, (reply.lease_id,))
    assert leased(world) == 0


@pytest.mark.parametrize("stopped_at", ["head", "get"])
async def test_a_cancelled_query_holds_nothing_and_hinders_nobody(
    world: TierWorld, stopped_at: str
) -> None:
    store = await filled(world, 3)
    store.held = {stopped_at}
    cancelled = asyncio.ensure_future(world.bring(query_of(1, [0, 1, 2]), "a"))
    other = asyncio.ensure_future(world.bring(query_of(1, [0, 1, 2]), "b"))
    await store.until_waits(stopped_at)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    store.let_go()
    reply = await other
    assert len(reply.chunks) == 3
    world.module.reads.release_q("b", (reply.lease_id,))
    assert leased(world) == 0


async def test_what_a_cancelled_query_has_begun_goes_on_to_its_end(world: TierWorld) -> None:
    store = await filled(world)
    store.held = {"get"}
    query = asyncio.ensure_future(world.bring(query_of(1, [0])))
    await store.until_waits("get")
    query.cancel()
    await asyncio.gather(query, return_exceptions=True)
    store.let_go()
    await until(lambda: world.persistence.summary().fetching == 0)
    assert (world.persistence.summary().brought, leased(world)) == (1, 0)
    assert await world.read_back(1, 0) == {0: True}
    assert store.count("get") == 1


async def test_a_store_of_what_is_being_brought_waits_for_it(world: TierWorld) -> None:
    store = await filled(world)
    store.held = {"get"}
    query = asyncio.ensure_future(world.bring(query_of(1, [0])))
    await store.until_waits("get")
    world.persistence.held.take(
        world.persistence.held.begin_anew()
    )  # it does not know that it is there: else it asks, and copies nothing
    storing = asyncio.ensure_future(world.store(world.workers[0], 1))
    await until(lambda: len(world.module.stores.under_way) == 1)
    store.let_go()
    assert (await storing).duplicate == 1
    world.module.reads.release_q("reader", ((await query).lease_id,))


async def test_a_store_of_what_can_not_be_brought_is_stored(world: TierWorld) -> None:
    store = await filled(world)
    store.held = {"get"}
    query = asyncio.ensure_future(world.bring(query_of(1, [0])))
    await store.until_waits("get")
    world.persistence.held.take(world.persistence.held.begin_anew())
    storing = asyncio.ensure_future(world.store(world.workers[0], 1))
    await until(lambda: len(world.module.stores.under_way) == 1)
    store.failing["get"] = [Unavailable("x")]
    store.let_go()
    assert (await storing).stored == 1
    reply = await query
    if reply.lease_id:  # the store was faster than the answer
        world.module.reads.release_q("reader", (reply.lease_id,))
    assert await world.read_back(1, 0) == {0: True}


async def test_what_was_corrupt_and_is_replaced_meanwhile_is_served(world: TierWorld) -> None:
    store = await filled(world)
    ((name, whole),) = store.objects.items()
    store.objects[name] = whole[:-1] + bytes([whole[-1] ^ 1])
    store.held = {"head", "get"}
    reading = asyncio.ensure_future(world.read_back(1, 0))
    await until(lambda: bool(store.waiting))
    while store.step() != "get":
        await until(lambda: bool(store.waiting))
    await store.until_waits("head")
    store.objects[name] = whole
    store.let_go()
    assert await reading == {0: True}
    assert (store.put_aside, world.persistence.summary().missed["corrupt"]) == ({}, 0)
    assert world.pool.usage().reserved_bytes == 0


async def test_what_stays_corrupt_is_read_twice_and_put_aside(world: TierWorld) -> None:
    store = await filled(world, 2)
    name = next(name for name in store.objects if "0" * 64 in name.partition("-w")[2])
    whole = store.objects[name]
    store.objects[name] = whole[:-1] + bytes([whole[-1] ^ 1])
    assert await world.read_back(1, 0) == {0: "corrupt"}
    assert store.count("get") == 2
    assert list(store.put_aside) == [name]
    now = world.persistence.summary()
    assert (now.missed["corrupt"], now.quarantined, now.missed["unavailable"]) == (1, 1, 0)
    assert (await world.store(world.workers[0], 1)).stored == 1
    await world.forget()
    assert store.objects[name] != whole[:-1]
    assert await world.read_back(1, 0, 1) == {0: True, 1: True}


async def test_a_store_that_can_not_put_aside_is_read_on(world: TierWorld) -> None:
    store = await filled(world, 1, sequences=5)
    good = next(name for name in store.objects if (5).to_bytes(16, "big").hex() in name)
    for name in set(store.objects) - {good}:
        store.objects[name] = store.objects[name][:-1] + b"\x99"
    store.for_ever["quarantine"] = Unavailable("x")
    for sequence in range(1, 5):
        assert await world.read_back(sequence, 0) == {0: "corrupt"}
    assert world.persistence.state == "ready"
    assert await world.read_back(5, 0) == {0: True}


async def test_pools_too_small_for_what_is_brought_at_once_mix_nothing(world: TierWorld) -> None:
    store = await filled(world, 6, sequences=4)
    assert len(store.objects) == 24
    for _ in range(3):
        found = await asyncio.gather(*(one_reader(world, sequence) for sequence in range(1, 5)))
        for chunks in found:
            assert chunks[0] is True, "the first is brought whatever happens"
            assert set(chunks.values()) <= {True, "pool_full", "evicted"}
        world.module.index.validate()
        await until(lambda: (leased(world), world.pool.usage().reserved_bytes) == (0, 0))


async def one_reader(world: TierWorld, sequence: int) -> dict[int, str | bool]:
    return await world.read_back(sequence, *range(6))


async def test_a_pool_that_is_all_leased_says_pool_full(world: TierWorld) -> None:
    await filled(world, 4, sequences=5)
    replies = {name: await world.bring(query_of(name, range(4)), name) for name in range(1, 5)}
    assert leased(world) == 16
    assert await world.read_back(5, 0) == {0: "pool_full"}
    assert world.persistence.summary().missed["pool_full"] == 1
    for name, reply in replies.items():
        assert len(world.read(reply)) == 4
        world.module.reads.release_q(name, (reply.lease_id,))
    assert await world.read_back(5, 0) == {0: True}


async def test_a_reader_gets_a_long_sequence_share_after_share(world: TierWorld) -> None:
    await filled(world, 15)
    at = 0
    while at < 15:
        query = query_of(1, range(at, 15))
        before = query_of(1, [at - 1]).chunk_hashes[0] if at else None
        reply = await world.bring(msgspec.structs.replace(query, parent_hash=before))
        got = len(world.read(reply))
        assert 1 <= got <= 4
        assert reply.partial == (at + got < 15)
        await until(lambda got=got: leased(world) == got)  # type: ignore[misc]  # what comes next is brought meanwhile
        most = at + 2 * 5  # what is held, and as much ahead
        assert world.persistence.summary().brought <= most, "not more than it may hold"
        world.module.reads.release_q("reader", (reply.lease_id,))
        at += got
    await until(lambda: leased(world) == 0)


async def test_a_get_that_is_not_over_keeps_its_slot(world: TierWorld) -> None:
    """It has timed out, and may still write: nobody else gets those bytes before it is over."""
    store = await filled(world)
    store.held = {"get"}
    reading = asyncio.ensure_future(world.read_back(1, 0))
    await store.until_waits("get")
    store.time_out()
    assert await reading == {0: "unavailable"}
    assert world.pool.usage().reserved_bytes == SPAN
    await world.store(world.workers[0], 2, 0, 8)
    store.let_go()
    await until(lambda: world.pool.usage().reserved_bytes == 0)
    assert await world.read_back(2, *range(8)) == dict.fromkeys(range(4), True)
    assert await world.read_back(1, 0) == {0: True}


async def test_a_sequence_that_is_not_there_costs_few_questions(world: TierWorld) -> None:
    store = await filled(world)
    assert await world.read_back(9, *range(100)) == dict.fromkeys(range(100), "not_stored")
    assert len(store.asked) <= 2
    assert world.persistence.summary().absent == 1


async def test_a_store_that_does_not_answer_is_left_alone_for_a_while(world: TierWorld) -> None:
    store = await filled(world)
    store.for_ever["head"] = Unavailable("x")
    for _ in range(10):
        assert await world.read_back(1, 0) == {0: "unavailable"}
        said = world.module.reads.look_in_tier(query_of(1, [0]))
        assert said is not None
        assert world.misses(world.module.reads.lookup_q(query_of(1, [0]), await said)) == {
            0: "unavailable"
        }
    assert store.count("head") <= 3
    assert world.persistence.state == "failing"
    store.for_ever.clear()
    await until(lambda: not world.persistence.reads.is_failing)  # found out without a reader
    assert await world.read_back(1, 0) == {0: True}
    assert world.persistence.state == "ready"


async def test_a_strange_error_leaves_nothing_leased(world: TierWorld) -> None:
    """Of a wave one fails at once, and the others come later, when the query has its error already."""
    store = await filled(world, 4)
    store.held = {"get"}
    query = asyncio.ensure_future(world.bring(query_of(1, range(4))))
    await store.until_waits("get")
    store.step()
    await store.until_waits("get", 3)
    store.failing["get"] = [RuntimeError("a bug of a store")]
    store.step()
    await until(lambda: world.persistence.summary().fetching == 2)
    for _ in range(10):  # an error that does not wait for the others is told by now
        await asyncio.sleep(0)
    store.let_go()
    with pytest.raises(RuntimeError):
        await query
    await until(lambda: world.persistence.summary().fetching == 0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert (leased(world), world.pool.usage().reserved_bytes) == (0, 0)


async def test_what_is_brought_during_a_purge_goes_with_it(world: TierWorld) -> None:
    store = await filled(world, 2)
    store.held = {"delete"}
    purge = asyncio.ensure_future(world.module.purge_q(MODEL, None))
    await store.until_waits("delete")
    assert await world.read_back(1, 0) == {0: True}
    store.let_go()
    assert (await purge).deleted == 2
    assert store.objects == {}
    assert (await world.read_back(1, 0))[0] in ("purged", "not_stored", "evicted")


async def test_a_purge_waits_for_what_is_being_brought(world: TierWorld) -> None:
    store = await filled(world)
    store.held = {"get"}
    reading = asyncio.ensure_future(world.bring(query_of(1, [0])))
    await store.until_waits("get")
    purge = asyncio.ensure_future(world.module.purge_q(MODEL, None))
    await asyncio.sleep(0)
    store.let_go()
    reply = await reading
    assert (await purge).deleted == 1
    assert (await world.read_back(1, 0))[0] == "purged"
    if reply.lease_id:
        world.module.reads.release_q("reader", (reply.lease_id,))


@pytest.fixture
async def aging() -> TierWorld:
    return TierWorld(ttl_s=3600.0, wall=lambda: clock[0])


clock = [1.8e9]


async def test_what_is_too_old_is_not_given(aging: TierWorld) -> None:
    await filled(aging)
    clock[0] += 3599
    assert await aging.read_back(1, 0) == {0: True}
    aging.evict()
    clock[0] += 2
    assert await aging.read_back(1, 0) == {0: "expired"}
    assert aging.persistence.summary().missed["expired"] == 1
    await aging.close()
