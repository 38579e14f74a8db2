"""Registering, replacing, releasing, reaping; every refusal, and nothing left behind."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from typing import Any

import msgspec
import pytest

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import RingDescription
from lmcache_qserver.copying import RingGeometry, RingMemory
from lmcache_qserver.qstore.instance import InstanceState
from tests.server.qstore.fake_worker import BLOCK_SIZE, LAYOUT, MODEL, FakeWorker, range_key
from tests.server.qstore.world import World, until


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def lanes() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("qlane-")]


async def refusal(
    world: World,
    description: RingDescription | None,
    ring: RingMemory | None,
    *,
    client: str = "c1",
    instance_id: int | str = 1,
    model_name: str = MODEL,
    world_size: int = 1,
) -> ErrorCode:
    with pytest.raises(RequestError) as caught:
        await world.module.register_q_cache(
            client, instance_id, model_name, world_size, description, ring, world.now
        )
    assert ring is None or ring.closed, "a refused memory is closed"
    return caught.value.code


async def test_a_registered_instance_is_reported(world: World) -> None:
    await world.worker(7)
    await world.worker("b", client="c2")
    await world.worker(-3, client="c2")
    status = world.module.report_status()
    assert status["registered_q_ids"] == [-3, 7, "b"]
    meta = status["q_context_meta"]["7"]
    assert (meta["model_name"], meta["world_size"]) == (MODEL, 1)
    layout = meta["q_ring_layout"]
    assert (layout["num_layers"], layout["num_blocks"], layout["block_size"]) == (3, 32, BLOCK_SIZE)
    assert (layout["hidden_dim"], layout["dtype"]) == (32, "int32")
    msgspec.json.encode(status)


async def test_a_legacy_registration_is_refused(world: World) -> None:
    assert await refusal(world, None, None) is ErrorCode.UNSUPPORTED_TRANSPORT


async def test_a_registration_without_memory_is_refused(world: World) -> None:
    worker = FakeWorker()
    assert await refusal(world, worker.description, None) is ErrorCode.LIFELINE_REQUIRED
    worker.close()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"chunk_size": 32}, ErrorCode.RING_REFUSED),
        ({"block_size": 5}, ErrorCode.RING_REFUSED),
        ({"block_size": 32}, ErrorCode.RING_REFUSED),
        ({"num_blocks": 33}, ErrorCode.RING_REFUSED),
        ({"stamps_offset": 8}, ErrorCode.RING_REFUSED),
        ({"stamps_offset": (1 << 62) - 8}, ErrorCode.RING_REFUSED),
        (
            {"layout": msgspec.structs.replace(LAYOUT, feature="transfer_key")},
            ErrorCode.BAD_PAYLOAD,
        ),
    ],
    ids=str,
)
async def test_a_description_that_does_not_fit_is_refused(
    world: World, changes: dict[str, Any], code: ErrorCode
) -> None:
    worker = FakeWorker()
    description = msgspec.structs.replace(worker.description, **changes)
    assert await refusal(world, description, worker.offer()) is code
    assert world.module.registry.get(1) is None
    worker.close()


async def test_misaligned_stamps_are_refused(world: World) -> None:
    worker = FakeWorker()
    offset = worker.description.stamps_offset + 4
    description = msgspec.structs.replace(worker.description, num_blocks=30, stamps_offset=offset)
    assert await refusal(world, description, worker.offer()) is ErrorCode.RING_REFUSED
    worker.close()


@pytest.mark.parametrize(("model_name", "world_size"), [("", 1), (MODEL, 0), (MODEL, 256)])
async def test_names_and_numbers_outside_their_range_are_refused(
    world: World, model_name: str, world_size: int
) -> None:
    worker = FakeWorker()
    code = await refusal(
        world, worker.description, worker.offer(), model_name=model_name, world_size=world_size
    )
    assert code is ErrorCode.BAD_PAYLOAD
    worker.close()


async def test_memory_without_the_seal_is_refused_by_the_lane(world: World) -> None:
    worker = FakeWorker(seals=fcntl.F_SEAL_GROW)
    assert await refusal(world, worker.description, worker.offer()) is ErrorCode.RING_REFUSED
    assert world.module.registry.get(1) is None, "a refused instance leaves nothing"
    await until(lambda: not lanes())
    worker.close()


async def test_memory_smaller_than_announced_is_refused_by_the_lane(world: World) -> None:
    worker = FakeWorker()
    fd = os.memfd_create("small", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, worker.nbytes - 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    ring = RingMemory(fd, worker.nbytes)
    assert await refusal(world, worker.description, ring) is ErrorCode.RING_REFUSED
    worker.close()


async def test_the_same_again_only_refreshes(world: World) -> None:
    worker = await world.worker()
    before = world.module.registry.get(1)
    assert before is not None
    world.now += 50
    again = worker.offer()
    await world.module.register_q_cache("c1", 1, MODEL, 1, worker.description, again, world.now)
    assert again.closed
    await world.module.register_q_cache(
        "c1", 1, MODEL, 1, worker.description, before.ring, world.now
    )
    await world.module.register_q_cache("c1", 1, MODEL, 1, worker.description, None, world.now)
    after = world.module.registry.get(1)
    assert after is before
    assert after.last_seen == world.now
    assert not after.ring.closed
    assert (await world.store(worker, 1)).stored == 1


async def test_another_ring_replaces_and_the_old_one_is_never_copied_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    old = await world.worker()
    old.write(9, 0, range(4))
    before = world.module.registry.get(1)
    new = await world.worker()
    assert "replaces" in caplog.text
    assert before is not None
    assert before.ring.closed
    assert (await world.store(new, 1)).stored == 1
    assert world.module.report_status()["registered_q_ids"] == [1]
    await until(lambda: len(lanes()) == 1)


async def test_a_replacement_waits_until_the_old_lane_is_drained(world: World) -> None:
    old = await world.worker()
    world.gate.hold_calls = {0}
    store = asyncio.ensure_future(world.store(old, 1))
    await until(world.gate.entered.is_set)
    new = FakeWorker()
    world.workers.append(new)
    replacing = asyncio.ensure_future(world.register(new))
    await until(
        lambda: getattr(world.module.registry.get(1), "description", None) == new.description
    )
    replacement = world.module.registry.get(1)
    assert replacement is not None
    await replacement.lane.run(
        lambda: None, timeout_s=20.0
    )  # behind the opening, if that has been asked for
    assert isinstance(replacement.ring, RingMemory)
    with pytest.raises(ValueError, match="not open"):
        _ = replacement.ring.rows
    assert not replacing.done()
    code = await refusal(world, new.description, new.offer())
    assert code is ErrorCode.INSTANCE_BUSY, "a registration under way is not overtaken"
    world.gate.open.set()
    assert (await store).stored == 1, "what was asked for before is stored"
    await replacing
    assert (await world.store(new, 2)).stored == 1


async def test_the_same_memory_under_two_ids_is_refused(world: World) -> None:
    worker = await world.worker()
    instance = world.module.registry.get(1)
    assert instance is not None
    with pytest.raises(RequestError) as caught:
        await world.module.register_q_cache(
            "c1", 2, MODEL, 1, worker.description, instance.ring, world.now
        )
    assert caught.value.code is ErrorCode.RING_REFUSED
    assert not instance.ring.closed, "it is the other instance's"


async def test_an_id_is_its_clients_until_the_client_is_gone(world: World) -> None:
    await world.worker(1, client="c1")
    other = FakeWorker()
    world.workers.append(other)
    code = await refusal(world, other.description, other.offer(), client="c2")
    assert code is ErrorCode.NOT_OWNER
    for call in (
        world.module.unregister_q_cache("c2", 1, None, world.now),
        world.module.stores.store_q(
            "c2", range_key(1, 0), 1, ((0, 1, 2, 3),), b"", None, world.now
        ),
    ):
        with pytest.raises(RequestError) as caught:
            await call
        assert caught.value.code is ErrorCode.NOT_OWNER
    assert not world.module.ping("c2", 1, None, world.now)
    await world.module.client_gone("c1", world.now)
    await world.register(other, client="c2")
    assert world.module.ping("c2", 1, None, world.now)


class HeldRing(RingMemory):
    """Opens only when it is let to."""

    def __init__(self, fd: int, nbytes: int) -> None:
        super().__init__(fd, nbytes)
        self.go = threading.Event()
        self.entered = threading.Event()

    def open(self, geometry: RingGeometry) -> None:
        self.entered.set()
        assert self.go.wait(20.0)
        super().open(geometry)


async def begin_registering(world: World) -> tuple[FakeWorker, HeldRing, asyncio.Task[None]]:
    """A registration whose ring is just being opened."""
    worker = FakeWorker()
    world.workers.append(worker)
    ring = HeldRing(os.dup(worker.fd), worker.nbytes)
    registering = asyncio.ensure_future(
        world.module.register_q_cache("c1", 1, MODEL, 1, worker.description, ring, world.now)
    )
    await until(ring.entered.is_set)
    return worker, ring, registering


async def test_a_client_that_goes_while_it_registers_leaves_nothing(world: World) -> None:
    _, ring, registering = await begin_registering(world)
    gone = asyncio.ensure_future(world.module.client_gone("c1", world.now))
    await asyncio.sleep(0)
    assert not registering.done()
    ring.go.set()
    await gone
    with pytest.raises(RequestError):
        await registering
    assert ring.closed
    assert world.module.registry.get(1) is None
    await until(lambda: not lanes())


async def test_an_instance_stores_nothing_while_it_registers(world: World) -> None:
    worker, ring, registering = await begin_registering(world)
    with pytest.raises(RequestError) as caught:
        await world.store(worker, 1)
    assert caught.value.code is ErrorCode.UNKNOWN_INSTANCE
    assert world.module.report_status()["registered_q_ids"] == []
    ring.go.set()
    await registering
    assert (await world.store(worker, 1)).stored == 1


async def test_a_registration_whose_caller_is_cancelled_goes_on(world: World) -> None:
    worker, ring, registering = await begin_registering(world)
    registering.cancel()
    ring.go.set()
    await until(lambda: [one.state for one in world.module.registry] == [InstanceState.LIVE])
    assert (await world.store(worker, 1)).stored == 1


async def test_unregistering(world: World) -> None:
    worker = await world.worker()
    instance = world.module.registry.get(1)
    await world.module.unregister_q_cache("c1", 1, None, world.now)
    assert instance is not None
    assert instance.ring.closed
    assert not world.module.ping("c1", 1, None, world.now)
    with pytest.raises(RequestError) as caught:
        await world.module.unregister_q_cache("c1", 1, None, world.now)
    assert caught.value.code is ErrorCode.UNKNOWN_INSTANCE
    await world.register(worker)
    assert (await world.store(worker, 1)).stored == 1


async def test_unregistering_stores_what_was_asked_for_before(world: World) -> None:
    worker = await world.worker()
    world.gate.hold_calls = {0}
    stores = [
        asyncio.ensure_future(world.store(worker, number, block=number * 4)) for number in range(4)
    ]
    await until(world.gate.entered.is_set)
    leaving = asyncio.ensure_future(world.module.unregister_q_cache("c1", 1, None, world.now))
    await until(lambda: not world.module.registry.live())
    with pytest.raises(RequestError) as caught:
        await world.store(worker, 9, block=24)
    assert caught.value.code is ErrorCode.UNKNOWN_INSTANCE
    assert not leaving.done()
    world.gate.open.set()
    await leaving
    assert [(await store).stored for store in stores] == [1, 1, 1, 1]


async def test_reaping_judges_by_ping_or_by_grace() -> None:
    world = World(reap_timeout_s=120.0, registration_grace_s=3600.0)
    pinged, silent = await world.worker("pinged"), await world.worker("silent", client="c2")
    assert world.module.ping("c1", "pinged", None, world.now)
    assert await world.module.reap_stale_instances(world.now + 120) == []
    assert await world.module.reap_stale_instances(world.now + 121) == ["pinged"]
    assert not world.module.ping("c1", "pinged", None, world.now + 121)
    assert (await world.store(silent, 1, instance_id="silent", client="c2")).stored == 1
    assert await world.module.reap_stale_instances(world.now + 3600) == []
    assert await world.module.reap_stale_instances(world.now + 3601) == ["silent"]
    assert pinged is not silent
    await world.close()


async def test_reaping_can_be_off() -> None:
    world = World(reap_timeout_s=0.0)
    await world.worker()
    world.module.ping("c1", 1, None, world.now)
    assert await world.module.reap_stale_instances(world.now + 1e9) == []
    await world.close()


async def test_ping_without_an_id_says_that_there_is_a_server(world: World) -> None:
    assert world.module.ping("anybody", None, None, world.now)
    assert not world.module.ping("anybody", 5, None, world.now)


async def test_a_hundred_rings_leave_neither_descriptors_nor_threads(world: World) -> None:
    world.module.start()
    worker = await world.worker()
    await world.store(worker, 0)
    await world.module.unregister_q_cache("c1", 1, None, world.now)
    await until(lambda: not lanes())
    fds, threads = open_fds(), threading.active_count()
    for number in range(100):
        await world.register(worker)
        await world.store(worker, number)
        if number % 2:
            await world.module.unregister_q_cache("c1", 1, None, world.now)
        else:
            await world.module.client_gone("c1", world.now)
    await until(lambda: threading.active_count() <= threads)
    await until(lambda: open_fds() <= fds)
