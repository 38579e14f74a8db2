"""One chunk's whole way: a ring, a store, a lease, and the same bytes in the pool."""

from __future__ import annotations

import mmap
import os
import struct

from lmcache_qprotocol.hashing import chunk_hashes
from lmcache_qprotocol.keys import KeyFamily, kv_rank
from lmcache_qprotocol.layout import layout_id
from lmcache_qprotocol.messages import ChunkQuery, RangeKey, StoreOutcome, StoreProof
from lmcache_qprotocol.stamps import first_stamp
from lmcache_qserver.testing.bare_client import (
    SMALL_LAYOUT,
    BareClient,
    BareLifeline,
    register_small_ring,
    small_ring,
)
from lmcache_qserver.testing.daemon import RunningDaemon

TOKENS = 16
MODEL = "test/model##query"
BLOCK, NONCE, START = 2, 7, 0


def test_a_chunk_goes_in_and_comes_out(daemon: RunningDaemon) -> None:
    ring = fd, nbytes, stamps_offset = small_ring()
    rows = os.urandom(TOKENS * SMALL_LAYOUT.token_bytes)
    stamps = struct.pack(f"={TOKENS}q", *(first_stamp(NONCE, START) + i for i in range(TOKENS)))
    with mmap.mmap(fd, nbytes) as memory:
        memory[BLOCK * len(rows) : (BLOCK + 1) * len(rows)] = rows
        at = stamps_offset + BLOCK * len(stamps)
        memory[at : at + len(stamps)] = stamps
    (chunk,) = chunk_hashes(range(100, 100 + TOKENS), TOKENS)
    layout = layout_id(SMALL_LAYOUT)
    key = RangeKey(
        model_name=MODEL,
        world_size=1,
        worker_id=0,
        start=START,
        end=START + TOKENS,
        chunk_hashes=(chunk,),
        layout_id=layout,
    )
    family = KeyFamily(model_name=MODEL, world_size=1, kv_rank=kv_rank(1, 0), layout_id=layout)
    query = ChunkQuery(family=family, chunk_hashes=(chunk,))
    with BareClient(daemon.url) as client, BareLifeline(daemon.lifeline) as lifeline:
        attached, pool_fd = lifeline.attach(client.hello().session)
        register_small_ring(client, lifeline, "worker", TOKENS, ring=ring)
        store = (key, "worker", ((BLOCK,),), b"", StoreProof(nonces=(NONCE,)))
        assert client.ask("store_q", *store).result.outcome == StoreOutcome(stored=1)
        assert client.ask("store_q", *store).result.outcome == StoreOutcome(duplicate=1)
        assert client.ask("lookup_q", query).result.prefix == 1
        lease = client.ask("retrieve_q", query).result
        (found,) = lease.chunks
        with mmap.mmap(pool_fd, attached.pool_bytes, prot=mmap.PROT_READ) as pool:
            assert pool[found.offset : found.offset + found.nbytes] == rows
        client.ask("release_q", (lease.lease_id,))
        metrics = daemon.metrics()
        assert metrics['lmcache_mp_store_chunks_total{outcome="stored"}'] == 1
        assert metrics['lmcache_mp_store_finished_total{result="duplicate"}'] == 1
        assert metrics["lmcache_mp_store_bytes_total"] == len(rows)
        client.ask("unregister_q_cache", "worker")
    os.close(pool_fd)
    os.close(fd)
