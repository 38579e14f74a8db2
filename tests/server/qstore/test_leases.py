"""Reading: leases are capped, end in three ways, and keep what they hold."""

from __future__ import annotations

import pytest

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import ChunkQuery
from tests.server.qstore.fake_worker import FAMILY, hash_of
from tests.server.qstore.world import SPAN, World


def leased(world: World) -> int:
    return world.pool.usage().leased_bytes // SPAN


async def test_a_miss_leases_nothing(world: World) -> None:
    reply = world.retrieve(1, [0, 1])
    assert (reply.lease_id, reply.chunks, reply.partial) == (0, (), False)
    assert world.misses(reply) == {0: "not_stored", 1: "not_stored"}
    assert (
        world.module.reads.retrieve_q("r", ChunkQuery(family=FAMILY, chunk_hashes=()), 0.0).lease_id
        == 0
    )


async def test_what_lies_behind_a_gap_is_leased_too(world: World) -> None:
    worker = await world.worker()
    await world.store(worker, 1, 0)
    await world.store(worker, 1, 2)
    reply = world.retrieve(1, [0, 1, 2])
    assert [chunk.index for chunk in reply.chunks] == [0, 2]
    assert world.misses(reply) == {1: "not_stored"}


async def test_ids_are_positive_and_never_used_twice(world: World) -> None:
    worker = await world.worker()
    await world.store(worker, 1)
    ids = []
    for number in range(5):
        ids.append(world.retrieve(1, [0], client=number % 2).lease_id)
        world.module.reads.release_q(number % 2, [ids[-1]])
    assert len(set(ids)) == 5
    assert min(ids) > 0
    assert leased(world) == 0


async def test_the_cap_cuts_the_answer_and_cut_chunks_are_in_neither_list(world: World) -> None:
    worker = await world.worker()
    await world.store(worker, 1, 0, 8)
    hashes = [hash_of(1, chunk) for chunk in range(8)]
    hashes[1] = hash_of(9, 1)
    hashes[7] = hash_of(9, 7)
    query = ChunkQuery(family=FAMILY, chunk_hashes=tuple(hashes))
    reply = world.module.reads.retrieve_q("reader", query, world.now)
    assert [chunk.index for chunk in reply.chunks] == [0, 2, 3, 4]
    assert world.misses(reply) == {1: "not_stored", 7: "not_stored"}
    assert reply.partial
    more = world.module.reads.retrieve_q("reader", query, world.now)
    assert (more.lease_id, more.chunks, more.partial) == (0, (), True)
    other = world.module.reads.retrieve_q("other", query, world.now)
    assert len(other.chunks) == 4, "the cap is each client's own"
    world.module.reads.release_q("reader", [reply.lease_id])
    again = world.retrieve(1, [5, 6])
    assert (len(again.chunks), again.partial) == (2, False)


async def test_one_chunk_larger_than_the_cap_can_still_be_read() -> None:
    world = World(pool_chunks=4, max_lease_share=0.01)
    worker = await world.worker()
    await world.store(worker, 1, 0, 2)
    reply = world.retrieve(1, [0, 1])
    assert ([chunk.index for chunk in reply.chunks], reply.partial) == ([0], True)
    assert world.retrieve(1, [1]).partial, "but not a second one beside it"
    world.module.reads.release_q("reader", [reply.lease_id])
    assert len(world.retrieve(1, [1]).chunks) == 1
    await world.close()


async def test_releasing_what_one_does_not_hold_is_an_error_and_the_rest_is_released(
    world: World,
) -> None:
    worker = await world.worker()
    await world.store(worker, 1, 0, 2)
    mine = [world.retrieve(1, [chunk]).lease_id for chunk in (0, 1)]
    theirs = world.retrieve(1, [0], client="other").lease_id
    with pytest.raises(RequestError) as caught:
        world.module.reads.release_q("reader", [mine[0], 999, theirs, mine[0], mine[1]])
    assert caught.value.code is ErrorCode.UNKNOWN_LEASE
    assert world.module.report_status()["leases"]["count"] == 1
    assert leased(world) == 1
    world.module.reads.release_q("other", [theirs])
    assert leased(world) == 0


async def test_leases_expire() -> None:
    world = World(lease_timeout_s=60.0)
    worker = await world.worker()
    await world.store(worker, 1)
    first = world.retrieve(1, [0])
    world.now += 30
    second = world.retrieve(1, [0])
    assert world.module.reads.expire_leases(world.now) == 0
    assert world.module.reads.expire_leases(world.now + 30) == 1
    assert leased(world) == 1
    with pytest.raises(RequestError):
        world.module.reads.release_q("reader", [first.lease_id])
    world.module.reads.release_q("reader", [second.lease_id])
    assert world.module.report_status()["leases"] == {
        "count": 0,
        "bytes": 0,
        "clients": 0,
        "expired": 1,
        "cap_bytes_per_client": 4 * SPAN,
    }
    await world.close()


async def test_a_client_that_is_gone_holds_nothing(world: World) -> None:
    worker = await world.worker()
    await world.store(worker, 1, 0, 3)
    world.retrieve(1, [0, 1])
    world.retrieve(1, [1, 2])
    await world.module.client_gone("reader", world.now)
    assert leased(world) == 0
    assert world.retrieve(1, range(3)).lease_id > 0


async def test_a_generation_never_comes_back_with_other_bytes() -> None:
    world = World(pool_chunks=1)
    worker = await world.worker()
    generations = []
    for sequence in range(4):
        await world.store(worker, sequence)
        reply = world.retrieve(sequence, [0])
        generations.append(reply.chunks[0].generation)
        world.module.reads.release_q("reader", [reply.lease_id])
    assert len(set(generations)) == 4
    await world.close()


async def test_a_reply_says_how_long_its_lease_lasts_at_least() -> None:
    """Readers rely on it (PROTOCOL.md): a longer time than the lease's would let them believe overwritten bytes."""
    world = World(lease_timeout_s=60.0)
    worker = await world.worker()
    await world.store(worker, 1)
    assert world.retrieve(1, [1]).lease_ms == 0, "nothing was leased"
    lease_ms = world.retrieve(1, [0]).lease_ms
    assert lease_ms == 60_000
    assert world.module.reads.expire_leases(world.now + lease_ms / 1000 - 0.001) == 0
    assert world.module.reads.expire_leases(world.now + lease_ms / 1000) == 1
    await world.close()
