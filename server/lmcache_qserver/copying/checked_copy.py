"""A lane's whole work for a store: the copy with its proof and, if they are asked for, the checksums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lmcache_qserver.copying.checksum import checksum
from lmcache_qserver.copying.chunk_copy import ChunkCopy, StampFault
from lmcache_qserver.copying.ring_source import RingSource


class Copied(NamedTuple):
    """What became of a copy.

    Attributes:
        fault: the first row that was wrong; None when every row is proven.
        checksums: of the chunks that brought a digest, None for the others; empty when a row was wrong.
    """

    fault: StampFault | None
    checksums: tuple[bytes | None, ...] = ()


def checked_copy(source: RingSource, chunks: Sequence[ChunkCopy], event: bytes) -> Copied:
    """Copy chunks out of a ring. In the lane's thread.

    Args:
        event: see `RingSource.copy`.
    """
    fault = source.copy(chunks, event)
    if fault is not None:
        return Copied(fault)
    return Copied(None, tuple(map(_checksum, chunks)))


def _checksum(chunk: ChunkCopy) -> bytes | None:
    if chunk.digest is None:
        return None
    if chunk.digest.nbytes == chunk.target.nbytes:
        return chunk.digest.value()
    return checksum(chunk.target)
