"""A stored object describes itself: an SDK needs nothing of the engine that wrote it, which may be long gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.layout import Layout
from lmcache_qprotocol.messages import StoredChunk
from lmcache_qserver.pool import Slot
from lmcache_qserver.qstore.by_tokens import Content


@dataclass(frozen=True, slots=True)
class Description:
    """What the bytes of an object are; the same for all chunks of one ring."""

    layout: Layout
    block_size: int
    chunk_size: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_size * self.layout.token_bytes

    def blocks_of(self, rows: tuple[int, int]) -> int:
        """Blocks of a chunk in which rows [a, b) lie."""
        return -(-rows[1] // self.block_size) - rows[0] // self.block_size


class Place(NamedTuple):
    """Where a chunk stands in its sequence, as far as its writer told.

    Attributes:
        parent: hash of the chunk before, 32 bytes; empty if unknown.
        start: absolute position of the chunk's first token; None if unknown.
    """

    parent: bytes = b""
    start: int | None = None


NOWHERE = Place()


@dataclass(slots=True, eq=False)
class StoredObject:
    """One committed chunk or piece, compared by identity. Immutable, as its bytes are, but for what is found out later.

    Attributes:
        rows: rows [a, b) of the chunk that it holds; a whole chunk has all of them. Its bytes are those blocks of the
            chunk in which the rows lie; what else lies there is 0.
        created: seconds, monotonic, of this server.
        content: its chunk's tokens and items up to its last row, if its writer told them.
        place: its chunk's place.
        checksum: of its bytes (copying/checksum.py); None until it is made.
        nonfinite: how many of its rows (of one token in one layer) hold NaN or Inf; None until they are looked at.
        persisted: whether it is known to lie in the persistent tier, too.
    """

    key: ObjectKey
    slot: Slot
    description: Description
    rows: tuple[int, int]
    created: float
    content: Content | None = None
    place: Place = NOWHERE
    checksum: bytes | None = None
    nonfinite: int | None = None
    persisted: bool = False

    def located(self, index: int, valid: tuple[int, int] | None = None) -> StoredChunk:
        """Where a reader finds it.

        Args:
            index: its place in the reader's query.
            valid: the rows that belong to the asked tokens; None for all.
        """
        layout, block_size = self.description.layout, self.description.block_size
        blocks = self.slot.nbytes // self.description.block_bytes
        return StoredChunk(
            index=index,
            offset=self.slot.offset,
            nbytes=self.slot.nbytes,
            shape=(blocks, len(layout.layer_ids), block_size, layout.hidden_dim),
            dtype=layout.dtype,
            rows=self.rows,
            generation=self.slot.generation,
            valid=valid,
            checksum=self.checksum,
            nonfinite=self.nonfinite,
            persisted=self.persisted,
        )
