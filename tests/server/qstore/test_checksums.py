"""Checksums are made behind the store, told to readers, and find what has changed in memory."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy as np
import pytest
import xxhash

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qserver.qstore import checksums
from tests.server.qstore.fake_worker import CHUNK_BYTES, stored_chunk
from tests.server.qstore.test_pieces import store as store_piece
from tests.server.qstore.test_uploads import Inline, is_empty
from tests.server.qstore.world import World, until


def made(world: World) -> int:
    return int(world.module.report_status()["checksums"]["made"])


def flip_a_bit(world: World, sequence: int, chunk: int) -> None:
    """As a fault of the memory would."""
    reply = world.retrieve(sequence, [chunk])
    (found,) = reply.chunks
    world.memory.array[found.offset + CHUNK_BYTES // 2] ^= 4
    world.module.reads.release_q("reader", [reply.lease_id])


async def test_a_reader_is_told_the_checksum_of_exactly_these_bytes(world: World) -> None:
    worker = await world.worker()
    await world.store(worker, 1, 0, 3)
    await until(lambda: made(world) == 3)
    reply = world.retrieve(1, [0, 1, 2])
    assert len({chunk.checksum for chunk in reply.chunks}) == 3
    for chunk in reply.chunks:
        data = world.memory.array[chunk.offset : chunk.offset + chunk.nbytes]
        expected = xxhash.xxh3_64(data.tobytes()).intdigest()
        assert chunk.checksum == expected.to_bytes(8, "big")


async def test_a_store_is_answered_before_its_checksum_is_made(world: World) -> None:
    worker = await world.worker()
    await world.store(worker, 1)
    assert world.retrieve(1, [0]).chunks[0].checksum is None


async def test_checksums_wait_for_a_pause_between_stores(world: World) -> None:
    worker = await world.worker()
    world.gate.hold_calls = {1}
    held = asyncio.ensure_future(world.store(worker, 2, block=8))
    await world.store(worker, 1)
    await asyncio.sleep(0.15)
    assert made(world) == 0
    world.gate.open.set()
    await held
    await until(lambda: made(world) == 2)


async def test_verifying_agrees_with_what_was_stored(world: World) -> None:
    worker = await world.worker()
    await world.store(worker, 1, 0, 2)
    await until(lambda: made(world) == 2)
    reply = await world.module.verify_q()
    assert (reply.verified, reply.made, reply.corrupt) == (2, 0, 0)
    assert reply.nbytes == 2 * CHUNK_BYTES


async def test_a_flipped_bit_is_a_miss_with_its_reason_and_the_others_stay(world: World) -> None:
    worker = await world.worker()
    await world.store(worker, 1, 0, 3)
    await until(lambda: made(world) == 3)
    flip_a_bit(world, 1, 1)
    reply = await world.module.verify_q()
    assert (reply.verified, reply.corrupt) == (2, 1)
    found = world.retrieve(1, [0, 1, 2])
    assert [chunk.index for chunk in found.chunks] == [0, 2]
    assert world.misses(found) == {1: "corrupt"}
    assert world.module.report_status()["checksums"]["corrupt"] == 1
    world.module.index.validate()


async def test_what_is_dropped_under_a_lease_keeps_its_bytes_until_the_lease_ends(
    world: World,
) -> None:
    worker = await world.worker()
    await world.store(worker, 1)
    await until(lambda: made(world) == 1)
    flip_a_bit(world, 1, 0)
    lease = world.retrieve(1, [0])
    await world.module.verify_q()
    assert world.pool.usage().leased_bytes
    world.module.reads.release_q("reader", [lease.lease_id])
    assert world.pool.usage().free_bytes == world.pool.usage().capacity_bytes


async def test_a_dropped_chunk_can_be_stored_again(world: World) -> None:
    worker = await world.worker()
    await world.store(worker, 1)
    await until(lambda: made(world) == 1)
    flip_a_bit(world, 1, 0)
    await world.module.verify_q()
    assert (await world.store(worker, 1)).stored == 1
    found = world.read(world.retrieve(1, [0]))
    assert np.array_equal(found[0], stored_chunk(1, 0))


async def test_who_asks_during_a_verification_gets_its_outcome(world: World) -> None:
    worker = await world.worker()
    await world.store(worker, 1, 0, 4)
    await until(lambda: made(world) == 4)
    first, second = await asyncio.gather(world.module.verify_q(), world.module.verify_q())
    assert first is second


async def test_an_object_evicted_meanwhile_is_nobodys_concern() -> None:
    world = World(pool_chunks=2)
    worker = await world.worker()
    for sequence in range(20):
        await world.store(worker, sequence)
    await until(lambda: world.module.report_status()["checksums"]["waiting"] == 0)
    reply = await world.module.verify_q()
    assert (reply.corrupt, reply.verified + reply.made) == (0, 2)
    await world.close()


async def test_hashing_does_not_make_an_object_recently_used() -> None:
    world = World(pool_chunks=2)
    worker = await world.worker()
    await world.store(worker, 1)
    await world.store(worker, 2)
    await world.module.verify_q()
    await world.store(worker, 3)
    assert world.misses(world.retrieve(1, [0])) == {0: "evicted"}
    assert len(world.retrieve(2, [0]).chunks) == 1
    await world.close()


async def test_inline_checksums_are_there_when_the_store_is_answered() -> None:
    world = World(inline_checksums=True)
    worker = await world.worker()
    await world.store(worker, 1, 0, 2)
    for chunk in world.retrieve(1, [0, 1]).chunks:
        data = world.memory.array[chunk.offset : chunk.offset + chunk.nbytes]
        assert chunk.checksum == xxhash.xxh3_64(data.tobytes()).digest()
    assert made(world) == 2
    await world.close()


async def test_inline_checksums_of_pieces_cover_the_rows_that_were_cleared() -> None:
    """A piece's blocks hold rows of others in the ring, which are 0 in the object."""
    world = World(inline_checksums=True)
    worker = await world.worker()
    outcome = await store_piece(world, worker, 3, 9)
    assert outcome.stored == 1
    (stored,) = world.module.index.objects()
    data = world.memory.array[stored.slot.offset : stored.slot.offset + stored.slot.nbytes]
    assert stored.checksum == xxhash.xxh3_64(data.tobytes()).digest()
    await world.close()


async def test_what_was_evicted_before_its_turn_does_not_wait_for_ever() -> None:
    """Without a pause between stores few objects get their turn."""
    world = World(pool_chunks=2)
    worker = await world.worker()
    world.gate.hold_calls = {0}
    held = asyncio.ensure_future(world.store(worker, 1000, block=8))
    await until(world.gate.entered.is_set)
    other = await world.worker(2)
    for sequence in range(200):
        await world.store(other, sequence, instance_id=2)
    assert world.module.report_status()["checksums"]["waiting"] <= 70
    world.gate.open.set()
    await held
    await world.close()


def no_thread(name: str) -> None:
    """In place of a lane, where the system has no thread to give."""
    raise RuntimeError(f"can't start new thread {name}")


async def test_a_store_needs_no_thread_that_looks_behind_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await world.worker()
    monkeypatch.setattr(checksums, "Lane", no_thread)
    assert (await world.store(worker, 1, 0, 3)).stored == 3
    assert world.pool.usage().reserved_bytes == 0
    await until(lambda: world.module.report_status()["checksums"]["failed"] == 3)
    monkeypatch.undo()
    assert (await world.module.verify_q()).made == 3


async def test_an_upload_needs_none_either(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await Inline(world).register()
    monkeypatch.setattr(checksums, "Lane", no_thread)
    assert (await worker.store(1)).stored == 1
    is_empty(world)


async def test_an_object_that_cannot_be_looked_at_keeps_no_other_waiting(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = []

    def odd(*_: Any) -> int:
        looked.append(1)
        if len(looked) < 3:
            raise ValueError("odd bytes")
        return 0

    monkeypatch.setattr(checksums, "nonfinite_rows", odd)
    worker = await world.worker()
    await world.store(worker, 1, 0, 4)
    await until(lambda: made(world) == 2)
    report = world.module.report_status()["checksums"]
    assert (report["failed"], report["waiting"]) == (2, 0)
    assert caplog.text.count("logged once") == 1


async def test_a_server_that_stops_waits_for_no_verification(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await world.worker()
    await world.store(worker, 1, 0, 4)
    await until(lambda: made(world) == 4)
    hashing, go_on = threading.Event(), threading.Event()

    def slow(_: Any) -> bytes:
        hashing.set()
        assert go_on.wait(20)
        return b""

    monkeypatch.setattr(checksums, "checksum", slow)
    verifying = asyncio.ensure_future(world.module.verify_q())
    await until(hashing.is_set)
    assert await world.module.drain(20)
    go_on.set()
    with pytest.raises(RequestError) as refused:
        await verifying
    assert refused.value.code is ErrorCode.SHUTTING_DOWN
    assert world.module.report_status()["checksums"]["corrupt"] == 1  # what was found before


async def test_what_is_stored_while_everything_closes_is_not_looked_at(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    worker = await world.worker()
    await world.store(worker, 1)
    await until(lambda: made(world) == 1)
    world.gate.hold_calls = {1}
    held = asyncio.ensure_future(world.store(worker, 2, block=8))
    await until(world.gate.entered.is_set)
    closing = asyncio.ensure_future(world.module.close())
    await until(lambda: threads("checksums") == 0)
    world.gate.open.set()
    assert (await held).stored == 1
    await closing
    worker.close()
    world.memory.close()
    gc.collect()
    assert "never retrieved" not in caplog.text


def threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())
