"""A worker and a reader on the bare wire: what tests of the real daemon say in one line each."""

from __future__ import annotations

import mmap
from typing import Any

from lmcache_qprotocol.errors import RequestError
from lmcache_qprotocol.hashing import NONE_HASH, chunk_hash
from lmcache_qprotocol.keys import KeyFamily, kv_rank
from lmcache_qprotocol.layout import layout_id
from lmcache_qprotocol.messages import (
    ChunkQuery,
    RangeKey,
    RetrieveReply,
    StoreOutcome,
    StoreProof,
    StoreResult,
)
from lmcache_qserver.testing.bare_client import (
    SMALL_LAYOUT,
    BareClient,
    BareLifeline,
    register_small_ring,
    small_ring,
)
from lmcache_qserver.testing.daemon import RunningDaemon
from tests.server.ring_writer import BLOCK_BYTES, RingWriter

CHUNK = 16
MODEL = "test/model"


def name_of(tokens: tuple[int, ...]) -> bytes:
    """The hash of a sequence's first chunk."""
    return chunk_hash(NONE_HASH, tokens, 0, ())


def rows_of(seed: int) -> bytes:
    """One block's rows, which no other seed has."""
    return (seed.to_bytes(8, "big") * BLOCK_BYTES)[:BLOCK_BYTES]


class WireWorker:
    """One client with a lifeline, a registered ring of 4 blocks of one chunk each, and the pool mapped for reading.

    Args:
        register: False to leave the ring unregistered.
    """

    def __init__(
        self, daemon: RunningDaemon, instance_id: int | str = "worker", *, register: bool = True
    ) -> None:
        self.daemon = daemon
        self.instance_id = instance_id
        self.client = BareClient(daemon.url)
        self.lifeline = BareLifeline(daemon.lifeline)
        attached, self.pool_fd = self.lifeline.attach(self.client.hello().session)
        self.pool_bytes = attached.pool_bytes
        self.pool = mmap.mmap(self.pool_fd, self.pool_bytes, prot=mmap.PROT_READ)
        self.ring = RingWriter(small_ring())
        if register:
            self.register(self.ring)

    def __enter__(self) -> WireWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.lifeline.socket.close()
        self.client.socket.close()
        self.pool.close()
        self.ring.close(self.pool_fd)

    def register(self, ring: RingWriter) -> None:
        """Under this worker's id; a ring that was there before is replaced."""
        self.ring = ring
        register_small_ring(
            self.client, self.lifeline, self.instance_id, CHUNK, MODEL, ring=ring.ring
        )

    def key(self, *names: bytes, salt: str = "", request_id: str = "", **more: Any) -> RangeKey:
        """The key of whole chunks from position 0 on."""
        fields: dict[str, Any] = {
            "model_name": f"{MODEL}##query",
            "world_size": 1,
            "worker_id": 0,
            "end": CHUNK * len(names),
            "cache_salt": salt,
            "request_id": request_id,
            "chunk_hashes": names,
            "layout_id": layout_id(SMALL_LAYOUT),
        }
        return RangeKey(**{**fields, **more})

    def store(self, name: bytes, rows: bytes, *, block: int = 0, **more: Any) -> StoreOutcome:
        """Write one chunk's rows into a block, and store it."""
        nonce = self.ring.write(block, 0, rows)
        return self.send_store(self.key(name, **more), (block,), (nonce,))

    def send_store(
        self, key: RangeKey, blocks: tuple[int, ...], nonces: tuple[int, ...]
    ) -> StoreOutcome:
        """STORE_Q as it is; `ok` and the outcome say the same."""
        result: StoreResult = self.client.ask(
            "store_q", key, self.instance_id, (blocks,), b"", StoreProof(nonces=nonces)
        ).result
        assert result.outcome is not None
        assert result.ok == (not result.outcome.refused)
        return result.outcome

    def family(self, salt: str = "") -> KeyFamily:
        """What the stores of this worker are kept under."""
        return KeyFamily(
            model_name=f"{MODEL}##query",
            world_size=1,
            kv_rank=kv_rank(1, 0),
            cache_salt=salt,
            layout_id=layout_id(SMALL_LAYOUT),
        )

    def retrieve(self, *names: bytes, salt: str = "") -> RetrieveReply:
        """A lease; the caller releases it."""
        query = ChunkQuery(family=self.family(salt), chunk_hashes=names)
        reply: RetrieveReply = self.client.ask("retrieve_q", query).result
        return reply

    def read(self, name: bytes, salt: str = "") -> bytes | str:
        """A chunk's bytes, or the reason why it is not there."""
        reply = self.retrieve(name, salt=salt)
        if not reply.chunks:
            return reply.missing[0].reason.value
        (found,) = reply.chunks
        try:
            return self.pool[found.offset : found.offset + found.nbytes]
        finally:
            self.client.ask("release_q", (reply.lease_id,))

    def code(self, name: str, *payloads: Any) -> str:
        """The error code of a request that must fail."""
        try:
            result = self.client.ask(name, *payloads).result
        except RequestError as error:
            return error.code.value
        raise AssertionError(f"{name} was served: {result}")


def leftovers(daemon: RunningDaemon) -> dict[str, int]:
    """What nobody should hold when nothing runs: bytes of reservations and leases, and leases."""
    status = daemon.status()
    return {
        "reserved": status["pool"]["reserved_bytes"],
        "leased": status["pool"]["leased_bytes"],
        "leases": status["leases"]["count"],
    }


NOTHING = {"reserved": 0, "leased": 0, "leases": 0}
