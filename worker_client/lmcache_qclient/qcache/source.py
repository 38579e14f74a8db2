"""Where a reader gets the bytes of leased chunks from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lmcache_qclient.qcache.copies import Copy
from lmcache_qclient.qcache.stitch import Bits, row_copies
from lmcache_qprotocol.messages import StoredChunk


@dataclass(frozen=True)
class ChunkRead:
    """Rows of a leased chunk, and where they go.

    Attributes:
        place: the chunk's, among those of its lease.
        rows: rows [a, b) of the chunk, among those that it has.
        targets: `[layers, b - a, heads, head_dim]`, any strides, and which of the chunk's layers go there; nobody else
            writes there.
    """

    place: int
    chunk: StoredChunk
    rows: tuple[int, int]
    targets: tuple[tuple[Bits, slice], ...]

    def copies(self, chunk_bytes: npt.NDArray[np.uint8]) -> list[Copy]:
        """What brings the rows from the chunk's bytes to their targets."""
        return [
            one
            for target, layers in self.targets
            for one in row_copies(chunk_bytes, self.chunk, self.rows, target, layers)
        ]


class Source(Protocol):
    """Reads what a lease holds."""

    @property
    def nbytes(self) -> int:
        """A chunk ends before this offset."""

    def read(self, lease_id: int, reads: Sequence[ChunkRead], threads: int) -> None:
        """Bring the rows of all reads to their targets.

        Args:
            threads: that may copy.

        Raises:
            RequestError(unknown_lease): the lease is known to have ended before the last byte was read.
            RequestError, ConnectionError: the server does not give them.
        """
