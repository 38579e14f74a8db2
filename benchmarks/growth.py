"""growth: what one small store costs, with ever more objects in the index, and with ever more instances registered.

Chunks are tiny (16 tokens, 128 bytes each), so that nothing is copied to speak of and what is left is the server's
bookkeeping: message, checks, index, pool, answer. A store is timed from submitting to the answer, one at a time; the
index is filled by stores of many chunks in between.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch

from benchmarks.samples import seconds
from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qclient.link.connection import Connection
from lmcache_qprotocol.keys import feature_model_name
from lmcache_qprotocol.layout import Layout, layout_id
from lmcache_qprotocol.messages import RangeKey, RingDescription, StoreProof, StoreResult
from lmcache_qprotocol.operations import REGISTER_Q_CACHE, STORE_Q, UNREGISTER_Q_CACHE
from lmcache_qprotocol.stamps import first_stamp
from lmcache_qserver.testing.daemon import RunningDaemon

CHUNK = 16
"""The daemon must run with it."""
OBJECTS = (1, 10, 100, 1_000, 10_000, 100_000)
INSTANCES = (1, 2, 4, 8, 16, 32, 64)
FILL = 256
"""Chunks of one store that fills; the ring has as many blocks, of one chunk each."""
TRIES = 200
LAYOUT = Layout(
    feature="transfer_query",
    layer_ids=(0,),
    first_head=0,
    num_heads=1,
    total_heads=1,
    head_dim=4,
    dtype="bfloat16",
)


class TinyWorker:
    """One instance whose ring never changes: block i always holds the chunk at position 16 i with nonce 1."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._link = connection.link
        self._name = name
        self._names = itertools.count()
        self._ring = QRingBuffer(1, FILL, CHUNK, LAYOUT.hidden_dim, torch.bfloat16)
        positions = torch.arange(FILL * CHUNK)
        self._ring.stamp(positions, positions + first_stamp(1, 0))
        assert connection.lifeline is not None
        assert self._ring.memory is not None
        token = connection.lifeline.offer_ring(self._ring.memory.fd, self._ring.nbytes)
        description = RingDescription(
            layout=LAYOUT,
            num_blocks=FILL,
            block_size=CHUNK,
            chunk_size=CHUNK,
            ring_token=token,
            stamps_offset=self._ring.stamps_offset,
        )
        self._link.call(REGISTER_Q_CACHE, (name, (), "tiny", 1, "benchmark", {}, (), description))

    def store(self, count: int) -> None:
        """Store `count` chunks that nobody has stored before."""
        start = next(self._names)
        hashes = tuple(
            blake2b(f"{self._name}/{start}/{index}".encode(), digest_size=32).digest()
            for index in range(count)
        )
        key = RangeKey(
            model_name=feature_model_name("tiny", "transfer_query"),
            world_size=1,
            worker_id=0,
            start=0,
            end=count * CHUNK,
            chunk_hashes=hashes,
            layout_id=layout_id(LAYOUT),
        )
        proof = StoreProof(nonces=(1,) * count)
        result: StoreResult = self._link.call(
            STORE_Q, (key, self._name, (tuple(range(count)),), b"", proof), 30.0
        )
        assert result.ok, result

    def close(self) -> None:
        """Unregister, and give the ring back."""
        self._link.call(UNREGISTER_Q_CACHE, (self._name,))
        self._ring.close()


@contextmanager
def _connection(server: RunningDaemon) -> Iterator[Connection]:
    connection = Connection.open(server.url, client="benchmark")
    try:
        yield connection
    finally:
        connection.close()


def with_objects(server: RunningDaemon) -> dict[str, float]:
    """Objects in the index → median microseconds of a store."""
    figures = {}
    with _connection(server) as connection:
        one = TinyWorker(connection, "grow")
        for _ in range(50):
            one.store(1)  # warm; the first figure has these in the index, and its own
        stored = 50
        for objects in OBJECTS:
            while stored < objects:
                count = min(FILL, objects - stored)
                one.store(count)
                stored += count
            tries = TRIES if objects > TRIES else 20
            times = [seconds(lambda: one.store(1)) for _ in range(tries)]
            stored += tries
            figures[str(objects)] = 1e6 * statistics.median(times)
        one.close()
    return figures


def with_instances(server: RunningDaemon) -> dict[str, float]:
    """Registered instances that store in turn → median microseconds of a store."""
    figures = {}
    with _connection(server) as connection:
        workers: list[TinyWorker] = []
        for instances in INSTANCES:
            while len(workers) < instances:
                workers.append(TinyWorker(connection, f"one-of-many-{len(workers)}"))
            turns = itertools.cycle(workers)
            for _ in range(instances):
                next(turns).store(1)
            times = [seconds(lambda turns=turns: next(turns).store(1)) for _ in range(TRIES)]  # type: ignore[misc]  # default binds the loop variable
            figures[str(instances)] = 1e6 * statistics.median(times)
        for one in workers:
            one.close()
    return figures
