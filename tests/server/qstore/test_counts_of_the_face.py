"""What /status and /metrics count beside stores: why workers went, what readers found, how full rings are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from lmcache_qprotocol.errors import RequestError
from lmcache_qprotocol.messages import WorkerReport
from lmcache_qserver.qstore.release_cause import ReleaseCause
from lmcache_qserver.qstore.ring_use import ring_use
from tests.server.qstore.fake_worker import CHUNK_BYTES, MODEL, FakeWorker, query_of
from tests.server.qstore.world import World


async def unregister(world: World) -> None:
    await world.module.unregister_q_cache("c1", 1, None, world.now)


async def replace(world: World) -> None:
    await world.worker()


async def lose_the_client(world: World) -> None:
    await world.module.client_gone("c1", world.now)
    await world.module.client_gone("c1", world.now)


async def stay_silent(world: World) -> None:
    assert await world.module.reap_stale_instances(world.now + 10_000) == [1]


async def lose_the_device(world: World) -> None:
    instance = world.module.registry.get(1)
    assert instance is not None
    instance.ring.lost = True  # type: ignore[misc]  # as the process of a device would have it
    assert await world.module.release_lost() == [1]


async def shut_down(world: World) -> None:
    await world.module.close()


async def offer_what_does_not_open(world: World) -> None:
    await unregister(world)
    worker = FakeWorker(seals=0)
    world.workers.append(worker)
    with pytest.raises(RequestError):
        await world.register(worker)


@pytest.mark.parametrize(
    ("act", "causes"),
    [
        (unregister, {ReleaseCause.UNREGISTERED}),
        (replace, {ReleaseCause.REPLACED}),
        (lose_the_client, {ReleaseCause.CLIENT_GONE}),
        (stay_silent, {ReleaseCause.REAPED}),
        (lose_the_device, {ReleaseCause.DEVICE_LOST}),
        (shut_down, {ReleaseCause.SHUTDOWN}),
        (offer_what_does_not_open, {ReleaseCause.UNREGISTERED, ReleaseCause.NOT_OPENED}),
    ],
)
async def test_each_release_has_one_cause(
    world: World, act: Callable[[World], Awaitable[None]], causes: set[ReleaseCause]
) -> None:
    await world.worker()
    await act(world)
    counts = world.module.report().instances
    assert {cause for cause, count in counts.released.items() if count} == causes
    assert set(counts.released) == {cause.value for cause in ReleaseCause}
    assert all(count <= 1 for count in counts.released.values())
    assert counts.registered == (2 if act is replace else 1)


async def test_a_refreshed_registration_is_none(world: World) -> None:
    worker = await world.worker()
    await world.register(worker)
    counts = world.module.report().instances
    assert (counts.registered, sum(counts.released.values())) == (1, 0)


async def test_the_cause_that_was_there_first_counts(world: World) -> None:
    worker = await world.worker()
    world.gate.hold_calls = {0}
    store = asyncio.ensure_future(world.store(worker, 1))
    await asyncio.sleep(0)
    leaving = asyncio.ensure_future(unregister(world))
    await asyncio.sleep(0)
    gone = asyncio.ensure_future(world.module.client_gone("c1", world.now))
    await asyncio.sleep(0)
    world.gate.open.set()
    await asyncio.gather(store, leaving, gone)
    assert world.module.report().instances.released["unregistered"] == 1
    assert world.module.report().instances.released["client_gone"] == 0


async def test_reads(world: World) -> None:
    """The reader may hold a quarter of 16 chunks."""
    worker = await world.worker()
    await world.store(worker, 1, 0, 6)
    world.module.reads.lookup_q(query_of(1, range(8)))
    reply = world.retrieve(1, range(7))
    assert (len(reply.chunks), reply.partial) == (4, True)
    assert world.retrieve(1, [0]).lease_id == 0
    reads = world.module.report().reads
    assert reads.hits == {"lookup_q": 6, "retrieve_q": 7}
    assert reads.misses["lookup_q"]["not_stored"] == 2
    assert reads.misses["retrieve_q"]["not_stored"] == 1
    assert (reads.retrieved_chunks, reads.retrieved_bytes) == (4, 4 * CHUNK_BYTES)
    assert reads.capped == 2


def report(blocks: int, used: int, high_water: int) -> WorkerReport:
    return WorkerReport(
        computed=0,
        captured=0,
        lost={},
        pending=0,
        ring_blocks=blocks,
        ring_used=used,
        ring_high_water=high_water,
    )


def test_rings_add_up_and_the_fullest_is_told() -> None:
    use = ring_use([report(10, 1, 9), None, report(100, 5, 20), report(0, 0, 0)])
    assert (use.blocks, use.used, use.high_water, use.highest_ratio) == (110, 6, 29, 0.9)
    assert ring_use([report(1, 9, 9)]).highest_ratio == 1.0
    assert ring_use([]).highest_ratio == 0.0


async def test_the_ring_of_a_worker_that_has_gone_is_none(world: World) -> None:
    await world.worker()
    await world.worker(2, client="c2")
    world.module.ping("c1", 1, report(10, 2, 3), world.now)
    world.module.ping("c2", 2, report(5, 1, 1), world.now)
    assert world.module.report().rings.blocks == 15
    await world.module.client_gone("c1", world.now)
    assert world.module.report().rings.blocks == 5
    assert world.module.report().q_context_meta["2"].ring.used == 1
    assert world.module.report().q_context_meta["2"].model_name == MODEL
