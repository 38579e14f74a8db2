"""The copies of an upload: bytes that a worker sends, because the server can't reach its ring.

Its rows come in parts, its stamps last, and the worker reads its ring in this order, too: rows first, stamps second. So
stamps that are as expected prove here what they prove behind a copy out of a ring (chunk_copy.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lmcache_qserver.copying.checked_copy import Copied
from lmcache_qserver.copying.checksum import checksum
from lmcache_qserver.copying.chunk_copy import ChunkCopy, StampFault, check_stamps, clear_others
from lmcache_qserver.copying.ring_geometry import RingGeometry

WIRE_STAMP = np.dtype("<i8")
"""Stamps on the wire; in shared memory they are in the machine's own byte order."""


class UnreachableRing:
    """What an instance has for a ring that its server can't reach; a RingSource without bytes."""

    device = "cpu"
    nbytes = 0
    lost = False

    def __init__(self) -> None:
        self.claimed = False
        self.closed = False

    def open(self, geometry: RingGeometry) -> None:
        """There is nothing to map."""

    def copy(self, chunks: Sequence[ChunkCopy], event: bytes) -> StampFault | None:
        """The gate of stores refuses before this."""
        raise ValueError("this instance's ring can't be reached: its rows come in uploads")

    def abort(self) -> None:
        """Nothing here waits for anybody."""

    def close(self) -> None:
        """There is nothing to unmap."""
        self.closed = True


def copy_part(target: npt.NDArray[np.uint8], part: memoryview) -> None:
    """Put a part where it belongs.

    Args:
        target: as long as the part.
    """
    np.copyto(target, np.frombuffer(part, dtype=np.uint8))


def prove(chunk: ChunkCopy, block_size: int, stamps: memoryview, with_checksum: bool) -> Copied:
    """Compare the stamps of a chunk whose rows are all there, and clear rows that are not its own.

    Args:
        chunk: its `block_ids` only say how many there are.
        stamps: one `WIRE_STAMP` per row.
        with_checksum: make the object's checksum, if its stamps are right.
    """
    clear_others(chunk, block_size)
    found = np.frombuffer(stamps, dtype=WIRE_STAMP).astype(np.int64, copy=False)
    fault = check_stamps(found, chunk.first_stamp, 0)
    if fault is not None:
        return Copied(fault)
    made = checksum(chunk.target) if with_checksum else None
    return Copied(None, (made,))
