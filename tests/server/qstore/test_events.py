"""MP_STORE_SUBMITTED, START and END come once each, in this order, whatever becomes of a store."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from lmcache_qprotocol.errors import RequestError
from lmcache_qprotocol.reasons import LossReason
from lmcache_qserver.events import StoreEnd, StoreStart, StoreSubmitted
from tests.server.qstore.fake_worker import proof_of, range_key
from tests.server.qstore.world import DEADLINE_S, World, until

ORDER = [StoreSubmitted, StoreStart, StoreEnd]


def check_each_once(world: World, stores: int) -> list[StoreEnd]:
    """The ends of that many stores, of which all was told once and in order; told apart by their request ids."""
    by_session: dict[str, list[type]] = {}
    for event in world.events:
        by_session.setdefault(event.session, []).append(type(event))
    assert len(by_session) == stores
    assert all(kinds == ORDER for kinds in by_session.values()), by_session
    ends = [event for event in world.events if isinstance(event, StoreEnd)]
    assert all(end.stored + end.duplicate + sum(end.refused.values()) > 0 for end in ends)
    totals = world.module.report().totals
    assert totals.submitted_stores == totals.finished_stores == stores
    assert totals.stored == sum(end.stored for end in ends)
    return ends


async def all_ended(world: World, stores: int) -> None:
    await until(lambda: Counter(map(type, world.events))[StoreEnd] == stores)


async def hung_lane(world: World) -> int:
    """One hangs, and the next is refused at once."""
    worker = await world.worker()
    await world.hang(worker, 1)
    await world.store(worker, 2)
    return 2


async def copy_that_raises(world: World) -> int:
    worker = await world.worker()

    def fail() -> None:
        raise OSError("the ring can't be read")

    world.gate.before = fail
    await world.store(worker, 1)
    return 1


async def wrong_stamps(world: World) -> int:
    worker = await world.worker()
    await world.store(worker, 1, spoil=lambda: worker.stamps.fill(0))
    return 1


async def no_room(world: World) -> int:
    worker = await world.worker(num_blocks=128)
    await world.store(worker, 1, 0, 16)
    for chunk in range(4):
        world.retrieve(1, range(chunk * 4, chunk * 4 + 4), client=f"reader-{chunk}")
    await world.store(worker, 2)
    return 2


async def dead_instance(world: World) -> int:
    """Its client goes while one store copies, and one waits in the lane behind it."""
    worker = await world.worker()
    world.gate.hold_calls = {0}
    stores = [asyncio.ensure_future(world.store(worker, one, block=4 * one)) for one in (1, 2)]
    await until(world.gate.entered.is_set)
    gone = asyncio.ensure_future(world.module.client_gone("c1", world.now))
    await until(lambda: world.module.registry.live() == [])
    world.gate.open.set()
    await asyncio.gather(gone, *stores)
    return 2


async def cancelled_caller(world: World) -> int:
    worker = await world.worker()
    world.gate.hold_calls = {0}
    store = asyncio.ensure_future(world.store(worker, 1))
    await until(world.gate.entered.is_set)
    store.cancel()
    with pytest.raises(asyncio.CancelledError):
        await store
    world.gate.open.set()
    return 1


async def duplicate_of_one_that_fails(world: World) -> int:
    """The second waits for the first, which hangs, and is never copied."""
    first, second = await world.worker(1), await world.worker(2, client="c2")
    world.gate.hold_calls = {0}
    one = asyncio.ensure_future(world.store(first, 1))
    await until(world.gate.entered.is_set)
    nonce = second.write(1, 0, range(4))
    other = asyncio.ensure_future(
        world.module.stores.store_q(
            "c2",
            range_key(1, 0, request_id="other"),
            2,
            ((0, 1, 2, 3),),
            b"",
            proof_of(nonce),
            world.now,
        )
    )
    await until(lambda: world.module.report().totals.submitted_stores == 2)
    instance = world.module.registry.get(1)
    assert instance is not None
    instance.lane._expire(instance.lane._jobs[0])
    await asyncio.gather(one, other)
    return 2


@pytest.mark.parametrize(
    ("case", "results"),
    [
        (hung_lane, [{LossReason.COPY_FAILED: 1}] * 2),
        (copy_that_raises, [{LossReason.COPY_FAILED: 1}]),
        (wrong_stamps, [{LossReason.STAMP_MISMATCH: 1}]),
        (no_room, [{}, {LossReason.POOL_FULL: 1}]),
        (dead_instance, [{LossReason.COPY_FAILED: 1}] * 2),
        (cancelled_caller, [{}]),
        (duplicate_of_one_that_fails, [{LossReason.COPY_FAILED: 1}, {}]),
    ],
)
async def test_each_event_comes_once(
    case: Callable[[World], Awaitable[int]], results: list[dict[LossReason, int]]
) -> None:
    world = World()
    try:
        stores = await case(world)
        await all_ended(world, stores)
        ends = check_each_once(world, stores)
        assert [end.refused for end in ends] == results
    finally:
        await world.close()


async def test_even_if_the_store_itself_is_cancelled_before_its_first_turn(world: World) -> None:
    """Nobody may, but a loop that is shut down does."""
    worker = await world.worker()
    nonce = worker.write(1, 0, range(4))
    task = world.module.stores.begin_store_q(
        "c1", range_key(1, 0), 1, ((0, 1, 2, 3),), b"", proof_of(nonce), world.now
    )
    task.cancel()
    await until(lambda: len(world.events) == 3)
    assert [type(event) for event in world.events] == ORDER
    instance = world.module.registry.get(1)
    assert instance is not None
    await asyncio.wait_for(
        asyncio.shield(instance.lane.submit(int, timeout_s=None).over), DEADLINE_S
    )
    for write in tuple(world.module.index._writing.values()):
        world.module.index.fail([write], reason=world.module.index.miss_reason(write.key))


async def test_a_store_that_fails_its_checks_is_none(world: World) -> None:
    worker = await world.worker()
    nonce = worker.write(1, 0, range(4))
    with pytest.raises(RequestError):
        await world.module.stores.store_q(
            "c1", range_key(1, 0), 1, ((0, 1),), b"", proof_of(nonce), world.now
        )
    await world.store(worker, 2)
    await all_ended(world, 1)
    check_each_once(world, 1)
    assert world.module.report().totals.rejected_stores == {"blocks_not_covering": 1}
