"""A worker's side of a ring in a real memfd, with content that gives every mix-up away.

Element (token position p, layer index l, hidden index h) of sequence s is ((s * 4096 + p) * layers + l) * hidden + h as
int32: no two rows of any test are alike, and neither are two elements of a row.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lmcache_qprotocol.keys import KeyFamily, kv_rank
from lmcache_qprotocol.layout import Layout, layout_id
from lmcache_qprotocol.messages import ChunkQuery, RangeKey, RingDescription, StoreProof
from lmcache_qprotocol.stamps import EMPTY, first_stamp
from lmcache_qserver.copying import RingMemory

MODEL = "org/model"
LAYERS, HEADS, HEAD_DIM = 3, 4, 8
HIDDEN = HEADS * HEAD_DIM
BLOCK_SIZE, CHUNK_SIZE = 4, 16
BLOCKS_PER_CHUNK = CHUNK_SIZE // BLOCK_SIZE
CHUNK_BYTES = CHUNK_SIZE * LAYERS * HIDDEN * 4
MAX_POSITIONS = 4096

LAYOUT = Layout(
    feature="transfer_query",
    layer_ids=tuple(range(LAYERS)),
    first_head=0,
    num_heads=HEADS,
    total_heads=HEADS,
    head_dim=HEAD_DIM,
    dtype="int32",
)
FAMILY = KeyFamily(
    model_name=f"{MODEL}##query", world_size=1, kv_rank=kv_rank(1, 0), layout_id=layout_id(LAYOUT)
)


def rows(sequence: int, start: int, count: int) -> npt.NDArray[np.int32]:
    """Queries of tokens [start, start + count), int32 `[count, layers, hidden]`."""
    position = (
        np.arange(start, start + count, dtype=np.int64)[:, None, None] + sequence * MAX_POSITIONS
    )
    layer = np.arange(LAYERS, dtype=np.int64)[None, :, None]
    hidden = np.arange(HIDDEN, dtype=np.int64)[None, None, :]
    return ((position * LAYERS + layer) * HIDDEN + hidden).astype(np.int32)


def stored_chunk(sequence: int, chunk: int) -> npt.NDArray[np.int32]:
    """A chunk as the server must keep it, int32 `[blocks, layers, block_size, hidden]`."""
    whole = rows(sequence, chunk * CHUNK_SIZE, CHUNK_SIZE)
    blocks = whole.reshape(BLOCKS_PER_CHUNK, BLOCK_SIZE, LAYERS, HIDDEN)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3))


def hash_of(sequence: int, chunk: int) -> bytes:
    """Any 32 bytes that name the chunk."""
    return sequence.to_bytes(16, "big") + chunk.to_bytes(16, "big")


def query_of(sequence: int, chunks: Sequence[int]) -> ChunkQuery:
    """Asks for these chunks."""
    hashes = tuple(hash_of(sequence, chunk) for chunk in chunks)
    return ChunkQuery(family=FAMILY, chunk_hashes=hashes)


class FakeWorker:
    """A ring, written as a worker writes it.

    Args:
        seals: what is sealed; the default is what the server asks for.
    """

    def __init__(self, num_blocks: int = 32, seals: int = fcntl.F_SEAL_SHRINK) -> None:
        rows_bytes = num_blocks * BLOCK_SIZE * LAYOUT.token_bytes
        self.nbytes = rows_bytes + num_blocks * BLOCK_SIZE * 8
        self.description = RingDescription(
            layout=LAYOUT,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            chunk_size=CHUNK_SIZE,
            ring_token=os.urandom(16),
            stamps_offset=rows_bytes,
        )
        self.fd = os.memfd_create("test-ring", os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self._map = mmap.mmap(self.fd, self.nbytes)
        shape = (num_blocks, LAYERS, BLOCK_SIZE, HIDDEN)
        count = num_blocks * LAYERS * BLOCK_SIZE * HIDDEN
        self.blocks = np.frombuffer(self._map, np.int32, count).reshape(shape)
        self.stamps = np.frombuffer(self._map, np.int64, offset=rows_bytes).reshape(
            num_blocks, BLOCK_SIZE
        )
        self.stamps[:] = EMPTY
        self._nonce = 0

    def offer(self) -> RingMemory:
        """What the server gets over the lifeline: a descriptor of its own."""
        return RingMemory(os.dup(self.fd), self.nbytes)

    def write(self, sequence: int, chunk: int, block_ids: Sequence[int]) -> int:
        """Fill ring blocks with a chunk as a step would; returns its nonce."""
        self._nonce += 1
        start = chunk * CHUNK_SIZE
        self.stamps[list(block_ids)] = EMPTY
        self.blocks[list(block_ids)] = stored_chunk(sequence, chunk)
        stamps = first_stamp(self._nonce, start) + np.arange(CHUNK_SIZE)
        self.stamps[list(block_ids)] = stamps.reshape(BLOCKS_PER_CHUNK, BLOCK_SIZE)
        return self._nonce

    def close(self) -> None:
        """Forget the ring; the server's descriptor is the server's."""
        del self.blocks, self.stamps
        self._map.close()
        os.close(self.fd)


def range_key(sequence: int, first: int, count: int = 1, **changes: object) -> RangeKey:
    """The key of `count` chunks from chunk `first` on, with some fields changed."""
    fields: dict[str, object] = {
        "model_name": FAMILY.model_name,
        "world_size": 1,
        "worker_id": 0,
        "start": first * CHUNK_SIZE,
        "end": (first + count) * CHUNK_SIZE,
        "request_id": f"request-{sequence}",
        "chunk_hashes": tuple(hash_of(sequence, chunk) for chunk in range(first, first + count)),
        "layout_id": FAMILY.layout_id,
    }
    return RangeKey(**{**fields, **changes})  # type: ignore[arg-type]


def proof_of(*nonces: int) -> StoreProof:
    """The proof that names these nonces."""
    return StoreProof(nonces=nonces)
