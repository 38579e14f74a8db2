"""What a store tells of its identity: checked where it can be, told by token ids, forgotten with its object."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.hashing import NONE_HASH, HashChain, chunk_hash, root_hash
from lmcache_qprotocol.identity import PLAIN, Identity, ItemIdentity, LoraIdentity
from lmcache_qprotocol.messages import (
    IdentityClaim,
    IdentityQuery,
    KnownIdentity,
    PartialChunk,
    RangeKey,
    StoreOutcome,
)
from tests.server.qstore.fake_worker import CHUNK_SIZE, FAMILY, proof_of, range_key
from tests.server.qstore.world import World

TOKENS = tuple(range(3 * CHUNK_SIZE))
SQL = LoraIdentity("sql", "/adapters/sql", "blake3:00")
RED, BLUE = ItemIdentity("mm", "red", CHUNK_SIZE + 3), ItemIdentity("mm", "blue", CHUNK_SIZE + 3)
WITH_ALL = Identity(SQL, (RED, ItemIdentity("embeds", "e", 2 * CHUNK_SIZE)))


def chunk_of(identity: Identity, index: int, **changes: Any) -> tuple[RangeKey, IdentityClaim]:
    """Key and claim of a whole chunk of `TOKENS`, as a worker makes them."""
    chain = HashChain(CHUNK_SIZE, identity)
    chain.extend(TOKENS)
    base, end = index * CHUNK_SIZE, (index + 1) * CHUNK_SIZE
    inside = tuple(
        ItemIdentity(item.kind, item.digest, item.offset - base)
        for item in identity.items
        if base <= item.offset < end
    )
    key = range_key(
        0,
        index,
        chunk_hashes=(chain.hashes[index],),
        parent_hash=chain.parent(index),
        piece_tokens=TOKENS[base:end],
        piece_items=inside,
        **changes,
    )
    begun = tuple(item for item in identity.items if item.offset < end)
    parent = chain.plain_parent(index)
    return key, IdentityClaim(plain_parent_hash=parent, lora=identity.lora, items=begun)


async def store(world: World, key: RangeKey, claim: IdentityClaim | None) -> StoreOutcome:
    if not world.workers:
        await world.worker()
    ids = tuple(range(4))
    nonce = world.workers[0].write(1, key.start // CHUNK_SIZE, ids)
    proof = msgspec.structs.replace(proof_of(nonce), claim=claim)
    result = await world.module.stores.store_q("c1", key, 1, (ids,), b"", proof, world.now)
    assert result.outcome is not None
    return result.outcome


def told(world: World, *chunks: int) -> list[KnownIdentity]:
    """Identities under which these chunks of `TOKENS` are stored, as the server was told."""
    chain = HashChain(CHUNK_SIZE)
    chain.extend(TOKENS)
    asked = [
        PartialChunk(
            index=index,
            parent_hash=chain.parent(index),
            tokens=TOKENS[index * CHUNK_SIZE : (index + 1) * CHUNK_SIZE],
        )
        for index in chunks
    ]
    query = IdentityQuery(model_name=FAMILY.model_name, chunks=tuple(asked))
    return list(world.module.reads.identities_q(query).identities)


@pytest.mark.parametrize("identity", [PLAIN, WITH_ALL, Identity(None, (RED,)), Identity(SQL)])
async def test_what_a_worker_says_is_taken_and_told(world: World, identity: Identity) -> None:
    for index in range(3):
        assert (await store(world, *chunk_of(identity, index, cache_salt="s"))).stored == 1
    (last,) = told(world, 2)
    assert last == KnownIdentity(cache_salt="s", lora=identity.lora, items=identity.items)
    (first,) = told(world, 0)
    assert first == KnownIdentity(cache_salt="s", lora=identity.lora)
    world.module.index.validate()


async def test_c26_two_pictures_under_one_text_are_two_objects(world: World) -> None:
    for item in (RED, BLUE):
        identity = Identity(None, (item,))
        assert (await store(world, *chunk_of(identity, 1))).stored == 1
        outcome = await store(world, *chunk_of(identity, 0))
        assert (outcome.stored, outcome.duplicate) == ((1, 0) if item is RED else (0, 1))
    assert {known.items for known in told(world, 1)} == {(RED,), (BLUE,)}
    assert told(world, 0) == [KnownIdentity()], "the chunk before the pictures is one"


async def test_what_is_evicted_is_told_no_more(world: World) -> None:
    await store(world, *chunk_of(Identity(SQL), 0))
    assert told(world, 0) == [KnownIdentity(lora=SQL)]
    for sequence in range(16):
        await world.store(world.workers[0], 100 + sequence)
    assert told(world, 0) == []
    world.module.index.validate()


async def test_a_store_that_failed_is_not_told(world: World) -> None:
    await world.worker()
    key, claim = chunk_of(Identity(SQL), 0)
    proof = msgspec.structs.replace(proof_of(77), claim=claim)
    result = await world.module.stores.store_q("c1", key, 1, ((0, 1, 2, 3),), b"", proof, world.now)
    assert not result.ok
    assert told(world, 0) == []


async def test_without_a_claim_it_is_stored_and_not_told(world: World) -> None:
    key, _ = chunk_of(Identity(SQL), 0)
    assert (await store(world, key, None)).stored == 1
    assert told(world, 0) == []


LIES: dict[str, tuple[Identity, int, dict[str, Any]]] = {
    "another LoRA": (Identity(SQL), 0, {"lora": LoraIdentity("other", "/o")}),
    "no LoRA": (Identity(SQL), 0, {"lora": None}),
    "a LoRA where there is none": (PLAIN, 0, {"lora": SQL}),
    "another LoRA, later chunk: equal parents": (PLAIN, 1, {"lora": SQL}),
    "no LoRA, later chunk: unlike parents": (Identity(SQL), 1, {"lora": None}),
    "no item": (Identity(None, (RED,)), 1, {"items": ()}),
    "another item": (Identity(None, (RED,)), 1, {"items": (BLUE,)}),
    "an item too many": (PLAIN, 1, {"items": (RED,)}),
    "an item behind the end": (PLAIN, 0, {"items": (RED,)}),
    "an earlier item, equal parents": (PLAIN, 1, {"items": (ItemIdentity("mm", "x", 3),)}),
    "an earlier item forgotten": (Identity(None, (RED,)), 2, {"items": ()}),
    "items out of order": (
        WITH_ALL,
        2,
        {"items": tuple(reversed(WITH_ALL.items))},
    ),
    "a plain parent of its own": (PLAIN, 1, {"plain_parent_hash": b"x" * 32}),
    "a first chunk with a parent": (Identity(SQL), 0, {"plain_parent_hash": b"x" * 32}),
}


@pytest.mark.parametrize("name", LIES)
async def test_a_lie_that_shows_is_refused(world: World, name: str) -> None:
    identity, index, changes = LIES[name]
    key, claim = chunk_of(identity, index)
    with pytest.raises(RequestError) as caught:
        await store(world, key, msgspec.structs.replace(claim, **changes))
    assert caught.value.code is ErrorCode.BAD_PAYLOAD
    assert (await store(world, key, claim)).stored == 1


async def test_a_claim_without_tokens_is_refused(world: World) -> None:
    _, claim = chunk_of(PLAIN, 0)
    with pytest.raises(RequestError) as caught:
        await store(world, range_key(0, 0), claim)
    assert caught.value.code is ErrorCode.BAD_PAYLOAD


async def test_a_question_for_more_than_a_chunk_is_refused(world: World) -> None:
    chunk = PartialChunk(index=0, parent_hash=NONE_HASH, tokens=(0,) * (CHUNK_SIZE + 1))
    with pytest.raises(RequestError) as caught:
        world.module.reads.identities_q(IdentityQuery(model_name="m##query", chunks=(chunk,)))
    assert caught.value.code is ErrorCode.BAD_PAYLOAD


def test_the_chain_knows_its_plain_parents() -> None:
    plain = HashChain(CHUNK_SIZE)
    plain.extend(TOKENS)
    for identity in (PLAIN, WITH_ALL):
        chain = HashChain(CHUNK_SIZE, identity)
        assert chain.plain_parent(0) == NONE_HASH
        for token in TOKENS:
            chain.extend(iter([token]))
        assert [chain.plain_parent(index) for index in range(4)] == [NONE_HASH, *plain.hashes]
        assert chain.parent(0) == root_hash(identity)
    assert chunk_hash(NONE_HASH, TOKENS[:CHUNK_SIZE]) == plain.hashes[0]
