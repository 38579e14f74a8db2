"""Chunks put together from answers, without a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lmcache_qclient.qcache.fetched import PARTS_AHEAD, Fetched
from lmcache_qclient.qcache.source import ChunkRead
from lmcache_qprotocol.errors import ErrorCode, ProtocolError, RequestError
from lmcache_qprotocol.messages import StoredChunk
from tests.worker_client.link.fake_connection import FakeLink, connection_over

LAYERS, BLOCK, HEADS, HEAD_DIM, BLOCKS = 3, 4, 2, 5, 4
SHAPE = (BLOCKS, LAYERS, BLOCK, HEADS * HEAD_DIM)
CHUNKS = np.random.default_rng(2).integers(0, 1 << 16, (3, *SHAPE), dtype=np.uint16)
NBYTES = CHUNKS[0].nbytes


def reads(target: Any, places: tuple[int, ...]) -> list[ChunkRead]:
    """Whole chunks, one behind the other."""
    made = []
    for number, place in enumerate(places):
        chunk = StoredChunk(
            index=number,
            offset=0,
            nbytes=NBYTES,
            shape=SHAPE,
            dtype="bfloat16",
            rows=(0, BLOCKS * BLOCK),
            generation=1,
        )
        rows = (0, BLOCKS * BLOCK)
        mine = target[:, number * 16 : (number + 1) * 16]
        made.append(ChunkRead(place, chunk, rows, ((mine, slice(None)),)))
    return made


def pool(name: str, payloads: tuple[Any, ...]) -> Any:
    _, place, begin, nbytes = payloads
    return memoryview(CHUNKS[place].tobytes())[begin : begin + nbytes]


def right(place: int) -> Any:
    return CHUNKS[place].transpose(1, 0, 2, 3).reshape(LAYERS, BLOCKS * BLOCK, HEADS, HEAD_DIM)


@pytest.mark.parametrize("bulk_bytes", [7, NBYTES - 1, NBYTES, 1 << 20])
def test_chunks_are_put_together_whatever_the_parts(bulk_bytes: int) -> None:
    link = FakeLink(pool)
    target = np.zeros((LAYERS, 32, HEADS, HEAD_DIM), np.uint16)
    Fetched(connection_over(link, bulk_bytes), 1.0).read(5, reads(target, (2, 0)), threads=1)
    assert np.array_equal(target[:, :16], right(2))
    assert np.array_equal(target[:, 16:], right(0))
    assert all(payloads[3] <= bulk_bytes for _, payloads in link.sent)
    assert {payloads[0] for _, payloads in link.sent} == {5}


def test_no_more_than_some_answers_are_asked_for_ahead() -> None:
    link = FakeLink(lambda name, payloads: None)
    target = np.zeros((LAYERS, 32, HEADS, HEAD_DIM), np.uint16)
    with pytest.raises(ConnectionError, match="no bytes of a chunk"):
        Fetched(connection_over(link, 64), 0.01).read(5, reads(target, (0, 1)), threads=1)
    assert len(link.sent) == PARTS_AHEAD


def test_an_answer_of_another_length_is_refused() -> None:
    link = FakeLink(lambda name, payloads: memoryview(bytes(payloads[3] - 1)))
    target = np.zeros((LAYERS, 16, HEADS, HEAD_DIM), np.uint16)
    with pytest.raises(ProtocolError):
        Fetched(connection_over(link, 64), 1.0).read(5, reads(target, (0,)), threads=1)


def test_a_lease_that_is_over_says_so() -> None:
    over = RequestError(ErrorCode.UNKNOWN_LEASE, "over")
    link = FakeLink(lambda name, payloads: over if payloads[2] else pool(name, payloads))
    target = np.zeros((LAYERS, 16, HEADS, HEAD_DIM), np.uint16)
    with pytest.raises(RequestError) as caught:
        Fetched(connection_over(link, 64), 1.0).read(5, reads(target, (0,)), threads=1)
    assert caught.value.code is ErrorCode.UNKNOWN_LEASE
