"""A stored object describes itself: an SDK needs nothing of the engine that wrote it, which may be long gone."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.layout import Layout
from lmcache_qprotocol.messages import StoredChunk
from lmcache_qserver.pool import Slot


@dataclass(frozen=True, slots=True)
class Description:
    """What the bytes of an object are; the same for all chunks of one ring."""

    layout: Layout
    block_size: int
    chunk_size: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a whole chunk."""
        return self.chunk_size * self.layout.token_bytes

    @property
    def blocks_per_chunk(self) -> int:
        """Ring blocks of a whole chunk."""
        return self.chunk_size // self.block_size


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One committed chunk. Immutable, as its bytes are.

    Attributes:
        rows: rows [a, b) of the chunk that it holds; a whole chunk has all of them.
        created: seconds, monotonic, of this server.
    """

    key: ObjectKey
    slot: Slot
    description: Description
    rows: tuple[int, int]
    created: float

    def located(self, index: int) -> StoredChunk:
        """Where a reader finds it.

        Args:
            index: its place in the reader's query.
        """
        layout, block_size = self.description.layout, self.description.block_size
        blocks = self.slot.nbytes // (block_size * layout.token_bytes)
        return StoredChunk(
            index=index,
            offset=self.slot.offset,
            nbytes=self.slot.nbytes,
            shape=(blocks, len(layout.layer_ids), block_size, layout.hidden_dim),
            dtype=layout.dtype,
            rows=self.rows,
            generation=self.slot.generation,
        )
