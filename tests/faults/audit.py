"""Looks at every object of a sequence by itself: there, and right bit by bit, or missing for a reason."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from lmcache_qprotocol.hashing import chunk_hashes, root_hash
from lmcache_qprotocol.keys import KeyFamily, feature_model_name, kv_rank
from lmcache_qprotocol.messages import ChunkQuery, PartialChunk, RetrieveReply, StoredChunk
from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.testing.bare_client import BareClient, BareLifeline
from lmcache_qserver.testing.daemon import RunningDaemon
from tests.e2e.small_worker import MODEL
from tests.faults.pattern import BLOCK, CHUNK, HEAD_DIM, HEADS, LAYERS, expected


@dataclass(frozen=True)
class Presence:
    """Which chunks of a sequence are there, the piece at its end included; and why the others are not."""

    present: tuple[int, ...]
    missing: dict[int, MissReason]


class Audit:
    """A reader of its own, over the bare wire.

    Args:
        layout_id: of the objects that are looked at.
    """

    def __init__(self, daemon: RunningDaemon, layout_id: bytes) -> None:
        self._family = KeyFamily(
            model_name=feature_model_name(MODEL, "transfer_query"),
            world_size=1,
            kv_rank=kv_rank(1, 0),
            layout_id=layout_id,
        )
        self._client = BareClient(daemon.url)
        self._lifeline = BareLifeline(daemon.lifeline)
        attached, pool_fd = self._lifeline.attach(self._client.hello().session)
        self._pool = mmap.mmap(pool_fd, attached.pool_bytes, prot=mmap.PROT_READ)
        os.close(pool_fd)

    def __enter__(self) -> Audit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._client.socket.close()
        self._lifeline.socket.close()
        self._pool.close()

    def lease(self, tokens: Sequence[int]) -> tuple[StoredChunk, ...]:
        """Lease what is there, and keep it."""
        reply: RetrieveReply = self._client.ask("retrieve_q", self._query(tokens)).result
        return reply.chunks

    def look(self, tokens: Sequence[int]) -> Presence:
        """Lease what is there, compare it, give it back.

        Raises:
            AssertionError: a byte is wrong, or the server's answer does not tell of every chunk.
        """
        reply: RetrieveReply = self._client.ask("retrieve_q", self._query(tokens)).result
        for chunk in reply.chunks:
            self._compare(chunk, tokens[chunk.index * CHUNK : (chunk.index + 1) * CHUNK])
        if reply.lease_id:
            self._client.ask("release_q", (reply.lease_id,))
        present = tuple(sorted({chunk.index for chunk in reply.chunks}))
        missing = {miss.index: miss.reason for miss in reply.missing}
        assert not reply.partial, "the audit leases less than its cap"
        assert {*present, *missing} == set(range(-(-len(tokens) // CHUNK))), reply
        return Presence(present, missing)

    def _query(self, tokens: Sequence[int]) -> ChunkQuery:
        hashes = chunk_hashes(tokens, CHUNK)
        partials: tuple[PartialChunk, ...] = ()
        if tail := tuple(tokens[len(hashes) * CHUNK :]):
            parent = hashes[-1] if hashes else root_hash()
            partials = (PartialChunk(index=len(hashes), parent_hash=parent, tokens=tail),)
        return ChunkQuery(family=self._family, chunk_hashes=tuple(hashes), partials=partials)

    def _compare(self, chunk: StoredChunk, tokens: Sequence[int]) -> None:
        blocks = chunk.shape[0]
        assert chunk.shape == (blocks, LAYERS, BLOCK, HEADS * HEAD_DIM), chunk
        found = np.frombuffer(self._pool, np.float32, chunk.nbytes // 4, chunk.offset)
        by_token = (
            found.reshape(chunk.shape).transpose(1, 0, 2, 3).reshape(LAYERS, -1, HEADS * HEAD_DIM)
        )
        first, end = chunk.valid or chunk.rows
        base = (
            chunk.rows[0] // BLOCK * BLOCK
        )  # an object begins with the block that holds its first row
        rows = by_token[:, first - base : end - base]
        wanted = expected(tokens[first:end]).numpy().reshape(LAYERS, end - first, -1)
        assert np.array_equal(rows, wanted), f"wrong bytes in {chunk}"
