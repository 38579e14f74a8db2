"""The gate of a store: what does not pass has no effect but an error and a count."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import StoreProof
from tests.server.qstore.fake_worker import CHUNK_SIZE, hash_of, proof_of, query_of, range_key
from tests.server.qstore.world import World

HASH = hash_of(1, 0)
TWO = {"end": 2 * CHUNK_SIZE, "chunk_hashes": (HASH, hash_of(1, 1))}


@pytest.mark.parametrize(
    ("changes", "blocks", "code"),
    [
        ({}, (), ErrorCode.BAD_PAYLOAD),
        ({}, ((0, 1, 2, 3), (4, 5, 6, 7)), ErrorCode.BAD_PAYLOAD),
        ({"model_name": "org/model"}, None, ErrorCode.BAD_PAYLOAD),
        ({"model_name": "org/other##query"}, None, ErrorCode.BAD_PAYLOAD),
        ({"world_size": 2}, None, ErrorCode.BAD_PAYLOAD),
        ({"worker_id": None}, None, ErrorCode.BAD_PAYLOAD),
        ({"worker_id": 1}, None, ErrorCode.BAD_PAYLOAD),
        ({"layout_id": b""}, None, ErrorCode.BAD_PAYLOAD),
        ({"layout_id": b"x" * 16}, None, ErrorCode.BAD_PAYLOAD),
        ({"end": 0}, None, ErrorCode.BAD_PAYLOAD),
        ({"start": 8, "end": 24}, None, ErrorCode.BAD_PAYLOAD),
        ({"end": CHUNK_SIZE + 4}, None, ErrorCode.BAD_PAYLOAD),
        ({"chunk_hashes": (HASH, HASH)}, None, ErrorCode.BAD_PAYLOAD),
        ({**TWO, "chunk_hashes": (HASH,)}, (tuple(range(8)),), ErrorCode.BAD_PAYLOAD),
        ({"chunk_hashes": (), "token_ids": ()}, None, ErrorCode.BAD_PAYLOAD),
        ({"chunk_hashes": (), "token_ids": (1,) * 15}, None, ErrorCode.BAD_PAYLOAD),
        ({}, ((0, 1, 2),), ErrorCode.BLOCKS_NOT_COVERING),
        ({}, ((),), ErrorCode.BLOCKS_NOT_COVERING),
        ({}, ((0, 1, 2, 3, 4),), ErrorCode.BLOCKS_NOT_COVERING),
        ({}, ((0, 1, 2, 32),), ErrorCode.BLOCKS_NOT_COVERING),
        ({}, ((-1, 1, 2, 3),), ErrorCode.BLOCKS_NOT_COVERING),
        (TWO, ((0, 1, 2, 3),), ErrorCode.BLOCKS_NOT_COVERING),
    ],
)
async def test_a_store_that_does_not_fit_is_refused_before_any_copy(
    world: World, changes: dict[str, Any], blocks: Any, code: ErrorCode
) -> None:
    worker = await world.worker()
    nonce = worker.write(1, 0, range(4))
    nonces = [nonce] * (2 if "chunk_hashes" in changes and len(changes["chunk_hashes"]) == 2 else 1)
    key = range_key(1, 0, **changes)
    groups = ((0, 1, 2, 3),) if blocks is None else blocks
    with pytest.raises(RequestError) as caught:
        await world.module.stores.store_q("c1", key, 1, groups, b"", proof_of(*nonces), world.now)
    assert caught.value.code is code
    assert world.gate.calls == 0
    assert not world.events
    assert world.pool.usage().free_bytes == world.pool.usage().capacity_bytes
    assert world.module.report_status()["totals"]["rejected_stores"] == {code.value: 1}


@pytest.mark.parametrize("proof", [None, proof_of(1, 2)])
async def test_a_store_without_a_fitting_proof_is_refused(
    world: World, proof: StoreProof | None
) -> None:
    await world.worker()
    with pytest.raises(RequestError) as caught:
        await world.module.stores.store_q(
            "c1", range_key(1, 0), 1, ((0, 1, 2, 3),), b"", proof, world.now
        )
    assert caught.value.code is ErrorCode.BAD_PAYLOAD


async def test_a_device_event_is_refused(world: World) -> None:
    await world.worker()
    with pytest.raises(RequestError) as caught:
        await world.module.stores.store_q(
            "c1", range_key(1, 0), 1, ((0, 1, 2, 3),), b"handle", proof_of(1), world.now
        )
    assert caught.value.code is ErrorCode.UNSUPPORTED_TRANSPORT


async def test_an_unknown_instance_is_refused(world: World) -> None:
    with pytest.raises(RequestError) as caught:
        await world.module.stores.store_q(
            "c1", range_key(1, 0), 1, ((0, 1, 2, 3),), b"", proof_of(1), world.now
        )
    assert caught.value.code is ErrorCode.UNKNOWN_INSTANCE
    assert world.misses(world.module.reads.lookup_q(query_of(1, [0]))) == {0: "not_stored"}
