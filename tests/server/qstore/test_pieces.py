"""Pieces: what is stored of a chunk that is not whole, what else lies in its blocks, and how it is found again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.hashing import chunk_hash
from lmcache_qprotocol.identity import ItemIdentity
from lmcache_qprotocol.keys import KeyFamily
from lmcache_qprotocol.messages import (
    ChunkQuery,
    Missing,
    PartialChunk,
    RangeKey,
    RetrieveReply,
    StoreOutcome,
)
from lmcache_qprotocol.reasons import LossReason, MissReason
from lmcache_qprotocol.stamps import EMPTY
from tests.server.qstore.fake_worker import (
    BLOCK_SIZE,
    CHUNK_SIZE,
    FAMILY,
    HIDDEN,
    LAYERS,
    FakeWorker,
    proof_of,
    range_key,
    rows,
)
from tests.server.qstore.world import World

PARENT = b"\x0f" * 32
TOKENS = tuple(range(100, 100 + CHUNK_SIZE))
CHUNK = 2
"""Place of the chunk in its sequence."""
BASE = CHUNK * CHUNK_SIZE
Items = Sequence[ItemIdentity]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A store of its own."""
    made = World()
    yield made
    await made.close()


def piece_key(
    first: int, end: int, tokens: Sequence[int] = TOKENS, items: Items = (), **changes: Any
) -> RangeKey:
    """Rows [first, end) of the chunk with these tokens."""
    held = tuple(tokens[:end])
    inside = tuple(item for item in items if item.offset < end)
    fields: dict[str, Any] = {
        "start": BASE + first,
        "end": BASE + end,
        "chunk_hashes": (chunk_hash(PARENT, held, 0, inside),),
        "parent_hash": PARENT,
        "piece_tokens": held,
        "piece_items": inside,
    }
    return range_key(0, CHUNK, **{**fields, **changes})


async def store(
    world: World,
    worker: FakeWorker,
    first: int,
    end: int,
    tokens: Sequence[int] = TOKENS,
    *,
    sequence: int = 1,
    items: Items = (),
    flip: int | None = None,
    **changes: Any,
) -> StoreOutcome:
    """Write the whole chunk of `sequence`, of which only [first, end) has stamps, and store these rows."""
    ids = tuple(range(4))
    nonce = worker.write(sequence, CHUNK, ids)
    stamps = worker.stamps[:4].reshape(-1)
    stamps[:first], stamps[end:] = EMPTY, 77
    if flip is not None:
        stamps[flip] ^= 1 << 40
    worker.stamps[:4] = stamps.reshape(4, BLOCK_SIZE)
    blocks = ids[first // BLOCK_SIZE : -(-end // BLOCK_SIZE)]
    key = piece_key(first, end, tokens, items, **changes)
    result = await world.module.stores.store_q(
        "c1", key, 1, (blocks,), b"", proof_of(nonce), world.now
    )
    assert result.outcome is not None
    return result.outcome


def ask(
    tokens: Sequence[int] = TOKENS,
    items: Items = (),
    *,
    index: int = 0,
    hashes: tuple[bytes, ...] = (),
    family: KeyFamily = FAMILY,
) -> ChunkQuery:
    """A query for one chunk by its tokens."""
    inside = tuple(item for item in items if item.offset < len(tokens))
    partial = PartialChunk(index=index, parent_hash=PARENT, tokens=tuple(tokens), items=inside)
    return ChunkQuery(family=family, chunk_hashes=hashes, partials=(partial,))


def found_rows(world: World, query: ChunkQuery) -> list[tuple[int, int]]:
    """The rows [a, c) of each object that a retrieve of `query` leases; lookup must say the same."""
    reply: RetrieveReply = world.module.reads.retrieve_q("reader", query, world.now)
    said = world.module.reads.lookup_q(query)
    assert said.missing == reply.missing
    assert said.tokens == reply.tokens
    if reply.lease_id:
        world.module.reads.release_q("reader", (reply.lease_id,))
    return [chunk.valid or chunk.rows for chunk in reply.chunks]


@pytest.mark.parametrize(("first", "end"), [(0, 5), (3, 4), (4, 8), (5, 16), (2, 15), (7, 9)])
async def test_its_rows_come_back_and_all_else_in_its_blocks_is_zero(
    world: World, first: int, end: int
) -> None:
    worker = await world.worker()
    assert (await store(world, worker, first, end)).stored == 1
    reply = world.module.reads.retrieve_q("reader", ask(), world.now)
    (chunk,) = reply.chunks
    base = first // BLOCK_SIZE * BLOCK_SIZE
    blocks = -(-end // BLOCK_SIZE) - first // BLOCK_SIZE
    assert chunk.shape == (blocks, LAYERS, BLOCK_SIZE, HIDDEN)
    assert (chunk.rows, chunk.valid) == ((first, end), (first, end))
    data = world.memory.array[chunk.offset : chunk.offset + chunk.nbytes].view(np.int32)
    by_row = data.reshape(chunk.shape).transpose(0, 2, 1, 3).reshape(-1, LAYERS, HIDDEN)
    expected = np.zeros_like(by_row)
    expected[first - base : end - base] = rows(1, BASE + first, end - first)
    assert np.array_equal(by_row, expected)
    gaps = [(0, first)] * (first > 0) + [(end, CHUNK_SIZE)] * (end < CHUNK_SIZE)
    assert reply.missing == tuple(Missing(0, MissReason.NOT_STORED, gap) for gap in gaps)
    assert reply.tokens == (end if first == 0 else 0)


@pytest.mark.parametrize("flip", [3, 6, 9])
async def test_a_flipped_stamp_inside_it_refuses_it(world: World, flip: int) -> None:
    worker = await world.worker()
    outcome = await store(world, worker, 3, 10, flip=flip)
    assert outcome.refused == {LossReason.STAMP_MISMATCH: 1}
    assert str(BASE + flip) in outcome.message
    assert found_rows(world, ask()) == []
    assert (await store(world, worker, 3, 10)).stored == 1


@pytest.mark.parametrize("flip", [2, 10])
async def test_stamps_beside_it_do_not_matter(world: World, flip: int) -> None:
    worker = await world.worker()
    assert (await store(world, worker, 3, 10, flip=flip)).stored == 1


async def test_the_longest_common_prefix_counts(world: World) -> None:
    worker = await world.worker()
    await store(world, worker, 0, 12)
    other = (*TOKENS[:7], 1, *TOKENS[8:])
    assert found_rows(world, ask(other)) == [(0, 7)]
    assert found_rows(world, ask(TOKENS[:9])) == [(0, 9)]
    assert found_rows(world, ask((1, *TOKENS[1:]))) == []
    assert world.module.reads.lookup_q(ask(other)).tokens == 7


async def test_pieces_join(world: World) -> None:
    worker = await world.worker()
    await store(world, worker, 0, 6)
    await store(world, worker, 4, 8)
    await store(world, worker, 8, 16)
    assert found_rows(world, ask()) == [(0, 6), (4, 8), (8, 16)]
    reply = world.module.reads.lookup_q(ask())
    assert (reply.prefix, reply.tokens, reply.missing) == (1, CHUNK_SIZE, ())
    # One that reaches further makes the one in the middle needless.
    await store(world, worker, 0, 9)
    assert found_rows(world, ask()) == [(0, 9), (8, 16)]


async def test_a_whole_chunk_serves_the_question_for_its_beginning(world: World) -> None:
    worker = await world.worker()
    assert (await store(world, worker, 0, CHUNK_SIZE)).stored == 1
    key = piece_key(0, CHUNK_SIZE)
    assert world.module.reads.lookup_q(
        ChunkQuery(family=FAMILY, chunk_hashes=key.chunk_hashes)
    ).prefix
    assert found_rows(world, ask(TOKENS[:5])) == [(0, 5)]
    assert found_rows(world, ask((*TOKENS[:5], 1))) == [(0, 5)]
    assert world.module.report_status()["models"][0]["chunks"] == 1


async def test_a_whole_chunk_without_tokens_is_found_whole_by_its_tokens(world: World) -> None:
    worker = await world.worker()
    await store(world, worker, 0, CHUNK_SIZE, parent_hash=None, piece_tokens=(), piece_items=())
    assert found_rows(world, ask()) == [(0, CHUNK_SIZE)]
    assert found_rows(world, ask(TOKENS[:5])) == []


async def test_a_piece_to_the_end_is_not_the_whole_chunk(world: World) -> None:
    worker = await world.worker()
    await store(world, worker, 8, 16)
    hashes = piece_key(8, 16).chunk_hashes
    assert hashes == piece_key(0, 16).chunk_hashes
    assert world.module.reads.lookup_q(ChunkQuery(family=FAMILY, chunk_hashes=hashes)).prefix == 0
    # Asked by hash and tokens, the piece answers, and the rest is missing.
    query = ask(hashes=hashes)
    assert found_rows(world, query) == [(8, 16)]
    assert world.module.reads.lookup_q(query).missing == (
        Missing(0, MissReason.NOT_STORED, (0, 8)),
    )
    status = world.module.report_status()["models"][0]
    assert (status["chunks"], status["pieces"]) == (0, 1)


@pytest.mark.parametrize(
    "asked",
    [(), (ItemIdentity("mm", "b", 6),), (ItemIdentity("embeds", "a", 6),)],
    ids=["no item", "another digest", "another kind"],
)
async def test_items_that_differ_end_the_agreement(world: World, asked: Items) -> None:
    worker = await world.worker()
    await store(world, worker, 0, 12, items=(ItemIdentity("mm", "a", 6),))
    assert found_rows(world, ask(items=(ItemIdentity("mm", "a", 6),))) == [(0, 12)]
    assert found_rows(world, ask(items=asked)) == [(0, 6)]
    assert found_rows(world, ask(items=(ItemIdentity("mm", "a", 5),))) == [(0, 5)]


async def test_salts_layouts_and_parents_are_kept_apart(world: World) -> None:
    worker = await world.worker()
    await store(world, worker, 0, 12)
    for changes in ({"cache_salt": "s"}, {"layout_id": b"\1" * 16}, {"kv_rank": 7}):
        assert found_rows(world, ask(family=msgspec.structs.replace(FAMILY, **changes))) == []
    partial = PartialChunk(index=0, parent_hash=b"\1" * 32, tokens=TOKENS)
    assert found_rows(world, ChunkQuery(family=FAMILY, partials=(partial,))) == []


async def test_the_same_piece_twice_is_a_duplicate(world: World) -> None:
    worker = await world.worker()
    await store(world, worker, 3, 9)
    assert (await store(world, worker, 3, 9)).duplicate == 1


async def test_eviction_takes_it_out_of_the_index() -> None:
    world = World(pool_chunks=2)
    worker = await world.worker()
    for other in range(8):
        await store(world, worker, 0, CHUNK_SIZE - 1, (other, *TOKENS[1:]))
        world.module.index.validate()
    assert found_rows(world, ask((0, *TOKENS[1:-1]))) == []
    assert found_rows(world, ask((7, *TOKENS[1:-1]))) == [(0, CHUNK_SIZE - 1)]
    await world.close()


async def test_tokens_are_counted_over_whole_chunks_and_pieces(world: World) -> None:
    worker = await world.worker()
    await world.store(worker, 5, 0)
    await store(world, worker, 0, 6)
    whole = range_key(5, 0).chunk_hashes[0]
    query = ask(index=1, hashes=(whole, b"\2" * 32))
    reply = world.module.reads.retrieve_q("reader", query, world.now)
    assert [(one.index, one.rows, one.valid) for one in reply.chunks] == [
        (0, (0, CHUNK_SIZE), None),
        (1, (0, 6), (0, 6)),
    ]
    assert reply.tokens == CHUNK_SIZE + 6
    said = world.module.reads.lookup_q(query)
    assert (said.prefix, said.tokens) == (1, CHUNK_SIZE + 6)


BAD: dict[str, dict[str, Any]] = {
    "no parent": {"parent_hash": None},
    "no tokens": {"piece_tokens": ()},
    "a token too few": {"piece_tokens": TOKENS[:9]},
    "a token too many": {"piece_tokens": TOKENS[:11]},
    "another token": {"piece_tokens": (1, *TOKENS[1:10])},
    "another hash": {"chunk_hashes": (b"\1" * 32,)},
    "no hash": {"chunk_hashes": (), "token_ids": (0,) * 64},
    "an item outside": {"piece_items": (ItemIdentity("mm", "a", 10),)},
    "an item of another hash": {"piece_items": (ItemIdentity("mm", "a", 1),)},
    "across two chunks": {"end": BASE + 20},
    "no rows": {"start": BASE + 10},
    "two chunks with a parent": {"start": BASE, "end": BASE + 32, "chunk_hashes": (PARENT,) * 2},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD.keys())
async def test_a_piece_that_does_not_fit_itself_is_refused(
    world: World, changes: dict[str, Any]
) -> None:
    await world.worker()
    key = msgspec.structs.replace(piece_key(3, 10), **changes)
    with pytest.raises(RequestError) as caught:
        await world.module.stores.store_q("c1", key, 1, ((0, 1, 2),), b"", proof_of(1), world.now)
    assert caught.value.code is ErrorCode.BAD_PAYLOAD
    assert world.module.report_status()["totals"]["rejected_stores"] == {"bad_payload": 1}


@pytest.mark.parametrize("blocks", [(0, 1), (0, 1, 2, 3), ()])
async def test_its_blocks_must_cover_it_exactly(world: World, blocks: tuple[int, ...]) -> None:
    await world.worker()
    with pytest.raises(RequestError) as caught:
        await world.module.stores.store_q(
            "c1", piece_key(3, 10), 1, (blocks,), b"", proof_of(1), world.now
        )
    assert caught.value.code is ErrorCode.BLOCKS_NOT_COVERING


@pytest.mark.parametrize(
    "partial",
    [
        PartialChunk(index=0, parent_hash=PARENT, tokens=(*TOKENS, 1)),
        PartialChunk(index=0, parent_hash=PARENT, tokens=(1,), items=(ItemIdentity("mm", "a", 1),)),
    ],
)
async def test_a_question_for_more_than_a_chunk_is_refused(
    world: World, partial: PartialChunk
) -> None:
    for call in (
        lambda query: world.module.reads.lookup_q(query),
        lambda query: world.module.reads.retrieve_q("reader", query, world.now),
    ):
        with pytest.raises(RequestError) as caught:
            call(ChunkQuery(family=FAMILY, partials=(partial,)))
        assert caught.value.code is ErrorCode.BAD_PAYLOAD
