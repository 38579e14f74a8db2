"""An engine of a few lines: a memfd ring whose every value tells where it belongs, stored into the real daemon."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_qclient.link.connection import Connection
from lmcache_qclient.qcache.stitch import bits_dtype
from lmcache_qprotocol.hashing import HashChain, chunk_hash, chunk_hashes
from lmcache_qprotocol.identity import PLAIN, Identity, ItemIdentity
from lmcache_qprotocol.keys import feature_model_name
from lmcache_qprotocol.layout import Layout, layout_id
from lmcache_qprotocol.messages import (
    IdentityClaim,
    RangeKey,
    RingDescription,
    StoreProof,
    StoreResult,
)
from lmcache_qprotocol.operations import REGISTER_Q_CACHE, STORE_Q
from lmcache_qprotocol.stamps import EMPTY, first_stamp
from tests.worker_client.link.memory import sealed_memory

CHUNK = 16
BLOCK = 4
NUM_BLOCKS = 64


def layout_of(**changes: Any) -> Layout:
    """Three layers, four heads of eight bfloat16, one rank."""
    fields: dict[str, Any] = {
        "feature": "transfer_query",
        "layer_ids": (0, 1, 2),
        "first_head": 0,
        "num_heads": 4,
        "total_heads": 4,
        "head_dim": 8,
        "dtype": "bfloat16",
    }
    return Layout(**{**fields, **changes})


def expected(
    token_ids: Sequence[int], layer_ids: Sequence[int], heads: range, head_dim: int, dtype: str
) -> npt.NDArray[Any]:
    """Bits `[layers, tokens, heads, head_dim]` that depend on position, token, layer, head and element."""
    position = np.arange(len(token_ids), dtype=np.uint64)[None, :, None, None]
    token = np.asarray(token_ids, dtype=np.uint64)[None, :, None, None]
    layer = np.asarray(layer_ids, dtype=np.uint64)[:, None, None, None]
    head = np.asarray(heads, dtype=np.uint64)[None, None, :, None]
    element = np.arange(head_dim, dtype=np.uint64)[None, None, None, :]
    mixed = (((position * 1_000_003 + token) * 1009 + layer) * 257 + head) * 131 + element
    mixed ^= mixed >> np.uint64(7)
    bits: npt.NDArray[Any] = (mixed * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(17)).astype(
        bits_dtype(dtype)
    )
    return bits


@dataclass
class Engine:
    """One rank of an engine.

    Args:
        url: of the daemon.
        layout: what the rank holds.
        world_size, rank: its place.
        chunk_size: the server's; only CHUNK may be stored.
    """

    url: str
    layout: Layout
    model_name: str = "org/model"
    world_size: int = 1
    rank: int = 0
    chunk_size: int = CHUNK

    def __post_init__(self) -> None:
        self.connection = Connection.open(self.url, client="test engine")
        assert self.connection.lifeline is not None
        layers, hidden = len(self.layout.layer_ids), self.layout.hidden_dim
        dtype = bits_dtype(self.layout.dtype)
        rows_bytes = NUM_BLOCKS * layers * BLOCK * hidden * dtype.itemsize
        stamps_offset = -(-rows_bytes // 64) * 64
        nbytes = stamps_offset + NUM_BLOCKS * BLOCK * 8
        fd = sealed_memory(nbytes)
        memory = np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)
        rows = memory[:rows_bytes].view(dtype)
        self.rows = rows.reshape(NUM_BLOCKS, layers, BLOCK, hidden)
        self.stamps = memory[stamps_offset:].view(np.int64).reshape(NUM_BLOCKS, BLOCK)
        self.stamps[:] = EMPTY
        self._nonce = 0
        description = RingDescription(
            layout=self.layout,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK,
            chunk_size=self.chunk_size,
            ring_token=self.connection.lifeline.offer_ring(fd, nbytes),
            stamps_offset=stamps_offset,
        )
        os.close(fd)
        self.instance_id = f"{self.model_name}-{self.rank}"
        self.connection.link.call(
            REGISTER_Q_CACHE,
            (self.instance_id, (), self.model_name, self.world_size, "test", {}, (), description),
        )

    def values(self, token_ids: Sequence[int]) -> npt.NDArray[Any]:
        """Bits `[layers, tokens, hidden]` of this rank."""
        layout = self.layout
        heads = range(layout.first_head, layout.first_head + layout.num_heads)
        bits = expected(token_ids, layout.layer_ids, heads, layout.head_dim, layout.dtype)
        return bits.reshape(len(layout.layer_ids), len(token_ids), layout.hidden_dim)

    def store(
        self,
        token_ids: Sequence[int],
        chunks: Sequence[int],
        salt: str = "",
        identity: Identity = PLAIN,
    ) -> None:
        """Store these chunks of a sequence, each out of scattered ring blocks."""
        hashes = chunk_hashes(token_ids, CHUNK, identity)
        values = self.values(token_ids)
        for index in chunks:
            result = self._store_chunk(values, index, hashes[index], salt)
            assert result.ok, result

    def store_piece(
        self,
        token_ids: Sequence[int],
        start: int,
        end: int,
        identity: Identity = PLAIN,
        *,
        claim: IdentityClaim | None = None,
        **key: Any,
    ) -> None:
        """Store positions [start, end), all in one chunk of a sequence: a piece, or a whole chunk with its tokens.

        Args:
            claim: None tells the truth.
        """
        self._nonce += 1
        base = start // CHUNK * CHUNK
        first, last = (start - base) // BLOCK, (end - 1 - base) // BLOCK
        values = self.values(token_ids)
        blocks = random.Random(self._nonce).sample(range(NUM_BLOCKS), last - first + 1)
        for place, block in enumerate(blocks):
            at = base + (first + place) * BLOCK
            self.rows[block], self.stamps[block] = 0xEE, EMPTY
            for position in range(max(at, start), min(at + BLOCK, end)):
                self.rows[block, :, position - at] = values[:, position]
                self.stamps[block, position - at] = first_stamp(self._nonce, position)
        chain = HashChain(CHUNK, identity)
        chain.extend(token_ids[:base])
        parent, index = chain.parent(base // CHUNK), base // CHUNK
        tokens = tuple(token_ids[base:end])
        begun = tuple(item for item in identity.items if item.offset < end)
        claim = claim or IdentityClaim(
            plain_parent_hash=chain.plain_parent(index), lora=identity.lora, items=begun
        )
        key = {
            "model_name": feature_model_name(self.model_name, self.layout.feature),
            "world_size": self.world_size,
            "worker_id": self.rank,
            "start": start,
            "end": end,
            "chunk_hashes": (chunk_hash(parent, tokens, base, identity.items),),
            "layout_id": layout_id(self.layout),
            "parent_hash": parent,
            "piece_tokens": tokens,
            "piece_items": tuple(
                ItemIdentity(item.kind, item.digest, item.offset - base)
                for item in begun
                if item.offset >= base
            ),
            **key,
        }
        payloads = (RangeKey(**key), self.instance_id, (tuple(blocks),), b"")
        proof = StoreProof(nonces=(self._nonce,), claim=claim)
        result: StoreResult = self.connection.link.call(STORE_Q, (*payloads, proof))
        assert result.ok, result

    def store_all(self, token_ids: Sequence[int], identity: Identity = PLAIN, **key: Any) -> None:
        """Store every position of a sequence, as a worker does: whole chunks with their tokens, and the tail."""
        for start in range(0, len(token_ids), CHUNK):
            self.store_piece(token_ids, start, min(start + CHUNK, len(token_ids)), identity, **key)

    def _store_chunk(
        self, values: npt.NDArray[Any], index: int, chunk_hash: bytes, salt: str
    ) -> StoreResult:
        self._nonce += 1
        blocks = random.Random(self._nonce).sample(range(NUM_BLOCKS), CHUNK // BLOCK)
        for place, block in enumerate(blocks):
            start = index * CHUNK + place * BLOCK
            self.rows[block] = values[:, start : start + BLOCK]
            self.stamps[block] = first_stamp(self._nonce, start) + np.arange(BLOCK)
        key = RangeKey(
            model_name=feature_model_name(self.model_name, self.layout.feature),
            world_size=self.world_size,
            worker_id=self.rank,
            start=index * CHUNK,
            end=(index + 1) * CHUNK,
            cache_salt=salt,
            chunk_hashes=(chunk_hash,),
            layout_id=layout_id(self.layout),
        )
        proof = StoreProof(nonces=(self._nonce,))
        result: StoreResult = self.connection.link.call(
            STORE_Q, (key, self.instance_id, (tuple(blocks),), b"", proof)
        )
        return result

    def close(self) -> None:
        """Die."""
        self.connection.close()
