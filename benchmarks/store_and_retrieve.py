"""store_vs_memcpy and retrieve_vs_memcpy: whole requests over the real daemon against a plain copy of the same bytes.

Store: a worker's STORE_Q of one chunk (16 or 64 MiB) from a block-major ring of 16-token blocks, from submitting to
the answer: message, checks, copy into the pool, stamps, commit. Every store is a new chunk, from other ring blocks than
the one before. Retrieve: the SDK's `retrieve` of such a chunk: lookup, lease, transposing copy into a preallocated
tensor, release. The copy that both are held against runs from one warm buffer to another, over changing places, too.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from benchmarks.samples import interleaved, speed_ratio
from lmcache_qclient.capture.account import Account
from lmcache_qclient.capture.adapter import QRingBufferAdapter
from lmcache_qclient.capture.finished_chunk import FinishedChunk
from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qclient.link.connection import Connection
from lmcache_qclient.qcache import connect
from lmcache_qprotocol.hashing import chunk_hashes
from lmcache_qprotocol.layout import Layout
from lmcache_qprotocol.stamps import first_stamp
from lmcache_qserver.testing.daemon import RunningDaemon

MIB = 1 << 20
CHUNK = 256
BLOCK = 16
LAYERS = 32
PLACES = 4
"""Chunks that the ring, and the buffers of the plain copy, hold."""


@contextmanager
def worker(
    server: RunningDaemon, chunk_mib: int
) -> Iterator[tuple[QRingBufferAdapter, QRingBuffer]]:
    """A registered worker whose chunks have `chunk_mib` MiB: bf16, 32 layers."""
    heads = chunk_mib * MIB // (CHUNK * LAYERS * 2 * 128)
    layout = Layout(
        feature="transfer_query",
        layer_ids=tuple(range(LAYERS)),
        first_head=0,
        num_heads=heads,
        total_heads=heads,
        head_dim=128,
        dtype="bfloat16",
    )
    ring = QRingBuffer(LAYERS, PLACES * CHUNK // BLOCK, BLOCK, layout.hidden_dim, torch.bfloat16)
    ring.flat.copy_(torch.randint(0, 100, (1, layout.hidden_dim)))
    adapter = QRingBufferAdapter(
        Connection.open(server.url, client="benchmark"),
        instance_id=f"bench-{chunk_mib}",
        model_name=f"bench-{chunk_mib}",
        world_size=1,
        rank=0,
        account=Account(),
    )
    adapter.establish_transfer_context(BLOCK)
    adapter.register_q_ring(ring, layout)
    try:
        yield adapter, ring
    finally:
        adapter.shutdown_q_ring()


def prompt(index: int) -> list[int]:
    """Tokens of one chunk that nobody has stored before."""
    return [index, *range(CHUNK - 1)]


def prepare_chunk(adapter: QRingBufferAdapter, ring: QRingBuffer, index: int) -> FinishedChunk:
    """Take ring blocks for a chunk and stamp its rows, as a worker does in a forward pass."""
    blocks = ring.allocate(CHUNK // BLOCK)
    assert blocks is not None
    nonce = index + 1
    slots = torch.arange(blocks[0] * BLOCK, blocks[0] * BLOCK + CHUNK)
    ring.stamp(slots, torch.arange(CHUNK) + first_stamp(nonce, 0))
    adapter.account.computed += CHUNK
    chunk_hash = chunk_hashes(prompt(index), CHUNK)[0]
    return FinishedChunk(
        "bench", 0, CHUNK, chunk_hash, "", tuple(blocks), nonce, adapter.account.request("bench")
    )


def measure(server: RunningDaemon, chunk_mib: int, rounds: int) -> tuple[float, float]:
    """(store_vs_memcpy, retrieve_vs_memcpy) for chunks of `chunk_mib` MiB."""
    nbytes = chunk_mib * MIB
    source = np.frombuffer(bytearray(secrets.token_bytes(MIB) * chunk_mib * PLACES), dtype=np.uint8)
    target = np.zeros_like(source)

    def copy(index: int) -> None:
        place = slice(index % PLACES * nbytes, (index % PLACES + 1) * nbytes)
        np.copyto(target[place], source[place])

    with worker(server, chunk_mib) as (adapter, ring):

        def store(index: int) -> None:
            sequence = adapter.submit_q_store_request(chunks[index])
            assert sequence is not None
            adapter.wait_for_store(sequence)

        chunks: list[FinishedChunk] = []
        pairs = []
        # The first turn over all places is for warming up.
        for first in range(0, PLACES + rounds, PLACES):
            chunks += [prepare_chunk(adapter, ring, first + place) for place in range(PLACES)]
            pairs += interleaved(lambda place, first=first: store(first + place), copy, PLACES)  # type: ignore[misc]  # default binds the loop variable
            adapter.reclaim_finished_q_stores()
        assert adapter.account.captured == adapter.account.computed, adapter.account.lost
        pairs = pairs[PLACES:]
        with connect(server.url, server.http_url, f"bench-{chunk_mib}") as cache:
            out = torch.empty(LAYERS, CHUNK, ring.hidden_dim // 128, 128, dtype=torch.bfloat16)

            def retrieve(index: int) -> None:
                assert cache.retrieve(prompt(PLACES + index % rounds), out=out).num_tokens == CHUNK

            retrieve(0)
            back = interleaved(retrieve, copy, rounds)
    return speed_ratio(pairs), speed_ratio(back)
