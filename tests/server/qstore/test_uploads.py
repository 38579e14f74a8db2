"""Stores whose bytes come in messages: what is proven is stored, and whatever else happens leaves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import pytest

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.hashing import NONE_HASH, chunk_hash
from lmcache_qprotocol.messages import (
    RingDescription,
    StoreOutcome,
    StoreProof,
    StoreResult,
    UploadReply,
)
from lmcache_qprotocol.reasons import LossReason
from lmcache_qprotocol.stamps import first_stamp
from lmcache_qserver.copying import inline
from lmcache_qserver.copying.inline import UnreachableRing
from lmcache_qserver.events import StoreEnd, StoreStart, StoreSubmitted
from lmcache_qserver.qstore import uploads
from tests.server.qstore.fake_worker import (
    BLOCK_SIZE,
    CHUNK_BYTES,
    CHUNK_SIZE,
    LAYOUT,
    MODEL,
    proof_of,
    query_of,
    range_key,
    stored_chunk,
)
from tests.server.qstore.world import SPAN, World, until

PART = 1000
INLINE = RingDescription(
    layout=LAYOUT,
    num_blocks=32,
    block_size=BLOCK_SIZE,
    chunk_size=CHUNK_SIZE,
    ring_token=bytes(16),
    stamps_offset=0,
    kind="inline",
)


def stamps_of(nonce: int, start: int, rows: int = CHUNK_SIZE) -> memoryview:
    """What a worker sends last."""
    stamps = first_stamp(nonce, start) + np.arange(rows, dtype=np.int64)
    return memoryview(stamps.astype("<i8").tobytes())


@dataclass
class Inline:
    """An instance out of the server's reach."""

    world: World
    client: Hashable = "c1"
    instance_id: int = 1

    async def register(self) -> Inline:
        await self.world.module.register_q_cache(
            self.client, self.instance_id, MODEL, 1, INLINE, UnreachableRing(), self.world.now
        )
        return self

    async def begin(self, sequence: int, chunk: int = 0, nonce: int = 7) -> UploadReply:
        return await self.world.module.stores.begin_upload_q(
            self.client,
            range_key(sequence, chunk),
            self.instance_id,
            proof_of(nonce),
            self.world.now,
        )

    async def part(self, upload_id: int, offset: int, part: bytes) -> None:
        await self.world.module.stores.upload_part_q(
            self.client, upload_id, offset, memoryview(part), self.world.now
        )

    async def parts(self, upload_id: int, data: bytes) -> None:
        for offset in range(0, len(data), PART):
            await self.part(upload_id, offset, data[offset : offset + PART])

    async def end(self, upload_id: int, stamps: memoryview) -> StoreResult:
        return await self.world.module.stores.end_upload_q(
            self.client, upload_id, stamps, self.world.now
        )

    async def store(self, sequence: int, chunk: int = 0, nonce: int = 7) -> StoreOutcome:
        reply = await self.begin(sequence, chunk, nonce)
        if reply.result is None:
            await self.parts(reply.upload_id, stored_chunk(sequence, chunk).tobytes())
            result = await self.end(reply.upload_id, stamps_of(nonce, chunk * CHUNK_SIZE))
        else:
            result = reply.result
        assert result.outcome is not None
        assert result.ok == (not result.outcome.refused)
        return result.outcome


@pytest.fixture
async def worker(world: World) -> Inline:
    """Registered."""
    return await Inline(world).register()


def is_empty(world: World) -> None:
    """Nothing is reserved, and every byte of the pool is accounted for."""
    usage = world.pool.usage()
    assert usage.reserved_bytes == 0
    assert usage.free_bytes + usage.committed_bytes + usage.leased_bytes == usage.capacity_bytes
    world.module.index.validate()
    summary = world.module.stores.uploads.summary()
    assert (summary.open, summary.bytes) == (0, 0)


async def test_what_is_uploaded_is_read_byte_for_byte(world: World, worker: Inline) -> None:
    assert await worker.store(1, 0) == StoreOutcome(stored=1)
    assert await worker.store(1, 1, nonce=8) == StoreOutcome(stored=1)
    found = world.read(world.retrieve(1, [0, 1]))
    assert [np.array_equal(found[chunk], stored_chunk(1, chunk)) for chunk in (0, 1)] == [True] * 2
    events = [type(event) for event in world.events]
    assert events == [StoreSubmitted, StoreStart, StoreEnd] * 2
    end = world.events[-1]
    assert isinstance(end, StoreEnd)
    assert (end.stored, end.nbytes) == (1, CHUNK_BYTES)
    is_empty(world)


async def test_a_duplicate_is_told_before_a_byte_is_sent(world: World, worker: Inline) -> None:
    await worker.store(1)
    reply = await worker.begin(1)
    assert (reply.upload_id, reply.nbytes) == (0, 0)
    assert reply.result == StoreResult(b"", True, StoreOutcome(duplicate=1))
    is_empty(world)


async def test_rows_of_a_piece_are_stored_and_others_rows_are_not(
    world: World, worker: Inline
) -> None:
    tokens, rows = tuple(range(300, 300 + 10)), slice(3, 10)
    key = range_key(
        1,
        0,
        start=rows.start,
        end=rows.stop,
        chunk_hashes=(chunk_hash(NONE_HASH, tokens, 0),),
        parent_hash=NONE_HASH,
        piece_tokens=tokens,
    )
    reply = await world.module.stores.begin_upload_q("c1", key, 1, proof_of(5), world.now)
    blocks = stored_chunk(1, 0)[:3]
    assert reply.nbytes == blocks.nbytes
    await worker.parts(reply.upload_id, blocks.tobytes())
    result = await worker.end(reply.upload_id, stamps_of(5, 3, 7))
    assert result.ok
    (stored,) = world.module.index._stored.values()
    data = world.memory.array[stored.slot.offset :][: blocks.nbytes].view(np.int32)
    kept = data.reshape(blocks.shape).copy()
    right = blocks.copy()
    right[0, :, :3] = 0
    right[2, :, 2:] = 0
    assert np.array_equal(kept, right)


async def test_a_wrong_stamp_is_refused_and_counted(world: World, worker: Inline) -> None:
    reply = await worker.begin(1)
    await worker.parts(reply.upload_id, stored_chunk(1, 0).tobytes())
    stamps = np.frombuffer(stamps_of(7, 0), "<i8").copy()
    stamps[11] ^= 1 << 40
    result = await worker.end(reply.upload_id, memoryview(stamps.tobytes()))
    assert result.outcome is not None
    assert result.outcome.refused == {LossReason.STAMP_MISMATCH: 1}
    assert "position 11" in result.outcome.message
    assert world.misses(world.retrieve(1, [0])) == {0: "stamp_mismatch"}
    is_empty(world)


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, PART), (PART + 1, PART), (PART, 0), (PART, CHUNK_BYTES)],
    ids=["again", "a gap", "nothing", "beyond the end"],
)
async def test_a_part_that_is_not_the_next_one_ends_the_upload(
    world: World, worker: Inline, offset: int, size: int
) -> None:
    reply = await worker.begin(1)
    await worker.part(reply.upload_id, 0, bytes(PART))
    with pytest.raises(RequestError) as caught:
        await worker.part(reply.upload_id, offset, bytes(size))
    assert caught.value.code is ErrorCode.BAD_PAYLOAD
    with pytest.raises(RequestError) as caught:
        await worker.part(reply.upload_id, PART, bytes(PART))
    assert caught.value.code is ErrorCode.UNKNOWN_UPLOAD
    is_empty(world)
    assert await worker.store(1) == StoreOutcome(stored=1)


@pytest.mark.parametrize("what", ["bytes", "stamps"])
async def test_an_end_before_the_end_is_refused(world: World, worker: Inline, what: str) -> None:
    reply = await worker.begin(1)
    data = stored_chunk(1, 0).tobytes()
    await worker.parts(reply.upload_id, data[:-4] if what == "bytes" else data)
    with pytest.raises(RequestError) as caught:
        await worker.end(reply.upload_id, stamps_of(7, 0, CHUNK_SIZE - (what == "stamps")))
    assert caught.value.code is ErrorCode.BAD_PAYLOAD
    assert world.module.reads.lookup_q(query_of(1, [0])).prefix == 0
    is_empty(world)


async def test_an_upload_whose_time_is_over_is_given_up(world: World) -> None:
    clock = world.now
    worker = await Inline(world).register()
    world.module.stores._clock = lambda: clock
    reply = await worker.begin(1)
    await worker.part(reply.upload_id, 0, bytes(PART))
    assert world.pool.usage().reserved_bytes == SPAN
    assert world.module.stores.expire_uploads(clock + 59.9) == 0
    assert world.module.stores.expire_uploads(clock + 60.0) == 1
    is_empty(world)
    await until(lambda: isinstance(world.events[-1], StoreEnd))
    end = world.events[-1]
    assert isinstance(end, StoreEnd)
    assert end.refused == {LossReason.COPY_FAILED: 1}
    assert world.module.stores.uploads.summary().given_up == 1
    with pytest.raises(RequestError) as caught:
        await worker.part(reply.upload_id, PART, bytes(PART))
    assert caught.value.code is ErrorCode.UNKNOWN_UPLOAD


@pytest.mark.parametrize("how", ["client gone", "reaped", "unregistered", "replaced"])
async def test_what_a_writer_leaves_unfinished_is_never_admitted(
    world: World, worker: Inline, how: str
) -> None:
    reply = await worker.begin(1)
    await worker.parts(reply.upload_id, stored_chunk(1, 0).tobytes())
    if how == "client gone":
        await world.module.client_gone("c1", world.now)
    elif how == "reaped":
        assert await world.module.reap_stale_instances(world.now + 1e6) == [1]
    elif how == "unregistered":
        await world.module.unregister_q_cache("c1", 1, None, world.now)
    else:
        worker_of_a_ring = await world.worker()
        assert await world.store(worker_of_a_ring, 2) == StoreOutcome(stored=1)
    is_empty(world)
    with pytest.raises(RequestError) as caught:
        await worker.end(reply.upload_id, stamps_of(7, 0))
    assert caught.value.code is ErrorCode.UNKNOWN_UPLOAD
    assert world.module.reads.lookup_q(query_of(1, [0])).prefix == 0


async def test_what_was_ended_before_unregistering_is_stored(world: World, worker: Inline) -> None:
    reply = await worker.begin(1)
    await worker.parts(reply.upload_id, stored_chunk(1, 0).tobytes())
    ended = world.module.stores.end_upload_q("c1", reply.upload_id, stamps_of(7, 0), world.now)
    await world.module.unregister_q_cache("c1", 1, None, world.now)
    assert (await ended).ok
    assert world.module.reads.lookup_q(query_of(1, [0])).prefix == 1


async def test_a_slot_is_not_free_before_its_last_copy_is_over(
    world: World, worker: Inline, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = asyncio.Event()
    loop = asyncio.get_running_loop()
    copy = inline.copy_part

    def slow(target: object, part: memoryview) -> None:
        loop.call_soon_threadsafe(held.set)
        assert world.gate.open.wait(20)
        copy(target, part)  # type: ignore[arg-type]

    monkeypatch.setattr(uploads, "copy_part", slow)
    reply = await worker.begin(1)
    sending = asyncio.ensure_future(worker.part(reply.upload_id, 0, bytes(PART)))
    await held.wait()
    world.module.stores.uploads.expire(world.now + 1e9)
    assert world.module.stores.uploads.summary().open == 0
    assert world.pool.usage().reserved_bytes == SPAN
    world.gate.open.set()
    await until(lambda: world.pool.usage().reserved_bytes == 0)
    await asyncio.wait({sending})
    is_empty(world)


async def test_a_second_writer_waits_and_takes_over_what_the_first_gives_up(
    world: World, worker: Inline
) -> None:
    other = await Inline(world, "c2", 2).register()
    first = await worker.begin(1)
    second = asyncio.ensure_future(other.begin(1))
    await asyncio.sleep(0)
    assert not second.done()
    await world.module.client_gone("c1", world.now)
    reply = await second
    assert reply.nbytes == CHUNK_BYTES
    assert reply.upload_id != first.upload_id
    await other.parts(reply.upload_id, stored_chunk(1, 0).tobytes())
    assert (await other.end(reply.upload_id, stamps_of(7, 0))).ok


async def test_who_waits_for_another_writer_begins_nothing_while_the_server_drains(
    world: World, worker: Inline
) -> None:
    """Nobody would wait for its end: the server would be gone with the upload half sent, and without a word."""
    first = await worker.begin(1)
    other = await Inline(world, "c2", 2).register()
    waiting = asyncio.ensure_future(other.begin(1))
    await asyncio.sleep(0)
    draining = asyncio.ensure_future(world.module.drain(20))
    await asyncio.sleep(0)
    with pytest.raises(RequestError):
        await worker.part(first.upload_id, 1, b"not the next")
    with pytest.raises(RequestError) as refused:
        await waiting
    assert refused.value.code is ErrorCode.SHUTTING_DOWN
    assert await draining
    is_empty(world)


async def test_bytes_of_uploads_are_those_that_are_reserved(world: World, worker: Inline) -> None:
    """Who waits for another writer holds none."""
    first = await worker.begin(1)
    other = await Inline(world, "c2", 2).register()
    waiting = asyncio.ensure_future(other.begin(1))
    await asyncio.sleep(0)
    assert world.module.stores.uploads.summary().bytes == CHUNK_BYTES
    await worker.parts(first.upload_id, stored_chunk(1, 0).tobytes())
    await worker.end(first.upload_id, stamps_of(7, 0))
    assert (await waiting).result is not None


async def test_a_second_writer_shares_what_the_first_stores(world: World, worker: Inline) -> None:
    other = await Inline(world, "c2", 2).register()
    first = await worker.begin(1)
    second = asyncio.ensure_future(other.begin(1))
    await worker.parts(first.upload_id, stored_chunk(1, 0).tobytes())
    await worker.end(first.upload_id, stamps_of(7, 0))
    reply = await second
    assert reply.result is not None
    assert reply.result.outcome == StoreOutcome(duplicate=1)


async def test_a_client_holds_a_part_of_the_pool_at_most(world: World, worker: Inline) -> None:
    """A quarter of it."""
    most = 16 * SPAN // 4 // CHUNK_BYTES
    for sequence in range(most):
        await worker.begin(sequence)
    with pytest.raises(RequestError) as caught:
        await worker.begin(most)
    assert caught.value.code is ErrorCode.BUSY
    assert world.pool.usage().reserved_bytes == most * SPAN
    assert world.module.report_status()["totals"]["rejected_stores"] == {"busy": 1}
    other = await Inline(world, "c2", 2).register()
    assert (await other.begin(most)).upload_id
    await world.module.client_gone("c1", world.now)
    await world.module.client_gone("c2", world.now)
    is_empty(world)


async def test_a_full_pool_refuses_before_a_byte_is_sent() -> None:
    world = World(pool_chunks=1)
    worker = await Inline(world).register()
    await worker.begin(0)
    other = await Inline(world, "c2", 2).register()
    reply = await other.begin(1)
    assert reply.result is not None
    assert reply.result.outcome is not None
    assert reply.result.outcome.refused == {LossReason.POOL_FULL: 1}
    await world.close()


async def test_anothers_upload_is_unknown(world: World, worker: Inline) -> None:
    reply = await worker.begin(1)
    thief = Inline(world, "c2")
    for attempt in (
        thief.part(reply.upload_id, 0, bytes(PART)),
        world.module.stores.upload_part_q(
            "c1", reply.upload_id + 1, 0, memoryview(b"x"), world.now
        ),
    ):
        with pytest.raises(RequestError) as caught:
            await attempt
        assert caught.value.code is ErrorCode.UNKNOWN_UPLOAD
    await worker.part(reply.upload_id, 0, bytes(PART))


async def test_each_kind_of_instance_stores_in_its_own_way(world: World, worker: Inline) -> None:
    with pytest.raises(RequestError) as caught:
        await world.module.stores.store_q(
            "c1", range_key(1, 0), 1, ((0, 1, 2, 3),), b"", proof_of(1), world.now
        )
    assert caught.value.code is ErrorCode.UNSUPPORTED_TRANSPORT
    await world.worker(2, "c2")
    with pytest.raises(RequestError) as caught:
        await world.module.stores.begin_upload_q("c2", range_key(1, 0), 2, proof_of(1), world.now)
    assert caught.value.code is ErrorCode.UNSUPPORTED_TRANSPORT


@pytest.mark.parametrize("key", [range_key(1, 0, 2), range_key(1, 0, chunk_hashes=())])
async def test_an_upload_is_of_one_chunk_with_its_hash(
    world: World, worker: Inline, key: object
) -> None:
    with pytest.raises(RequestError) as caught:
        await world.module.stores.begin_upload_q(
            "c1",
            key,  # type: ignore[arg-type]
            1,
            StoreProof(nonces=(1, 2)),
            world.now,
        )
    assert caught.value.code is ErrorCode.BAD_PAYLOAD


# --- reading --------------------------------------------------------------------------------------


async def test_fetched_bytes_stay_as_they_are_until_nobody_reads_them(
    world: World, worker: Inline
) -> None:
    await worker.store(1)
    reply = world.retrieve(1, [0], "reader")
    pinned = world.module.reads.fetch_q("reader", reply.lease_id, 0, (100, 1100), world.now)
    world.module.reads.release_q("reader", [reply.lease_id])
    assert bytes(pinned.view) == stored_chunk(1, 0).tobytes()[100:1100]
    assert not pinned.data.flags.writeable
    for sequence in range(2, 40):  # more than the pool holds
        await worker.store(sequence)
    assert bytes(pinned.view) == stored_chunk(1, 0).tobytes()[100:1100]
    assert world.module.reads.lookup_q(query_of(1, [0])).prefix == 1
    pinned.release()
    for sequence in range(40, 80):
        await worker.store(sequence)
    assert world.module.reads.lookup_q(query_of(1, [0])).prefix == 0
    is_empty(world)


@pytest.mark.parametrize(
    ("client", "place", "part", "late", "code"),
    [
        ("thief", 0, (0, 1), 0.0, ErrorCode.UNKNOWN_LEASE),
        ("reader", 1, (0, 1), 0.0, ErrorCode.BAD_PAYLOAD),
        ("reader", 0, (0, CHUNK_BYTES + 1), 0.0, ErrorCode.BAD_PAYLOAD),
        ("reader", 0, (5, 5), 0.0, ErrorCode.BAD_PAYLOAD),
        ("reader", 0, (0, 1), 60.0, ErrorCode.UNKNOWN_LEASE),
    ],
)
async def test_only_what_is_leased_is_fetched(
    world: World,
    worker: Inline,
    client: str,
    place: int,
    part: tuple[int, int],
    late: float,
    code: ErrorCode,
) -> None:
    await worker.store(1)
    reply = world.retrieve(1, [0], "reader")
    with pytest.raises(RequestError) as caught:
        world.module.reads.fetch_q(client, reply.lease_id, place, part, world.now + late)
    assert caught.value.code is code
    world.module.reads.fetch_q("reader", reply.lease_id, 0, (0, 1), world.now + 59.9).release()
