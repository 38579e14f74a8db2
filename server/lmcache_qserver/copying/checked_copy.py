"""A lane's whole work for a store: the copy with its proof, what is not finite, and the checksums if asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lmcache_qserver.copying.checksum import checksum
from lmcache_qserver.copying.chunk_copy import ChunkCopy, StampFault
from lmcache_qserver.copying.nonfinite import RowForm, nonfinite_rows
from lmcache_qserver.copying.ring_source import RingSource


class Copied(NamedTuple):
    """What became of a copy.

    Attributes:
        fault: the first row that was wrong; None when every row is proven.
        checksums: of the chunks that brought a digest, None for the others; empty when a row was wrong.
        nonfinite: of each chunk, how many rows hold NaN or Inf; likewise.
    """

    fault: StampFault | None
    checksums: tuple[bytes | None, ...] = ()
    nonfinite: tuple[int, ...] = ()


def checked_copy(
    source: RingSource, chunks: Sequence[ChunkCopy], event: bytes, form: RowForm
) -> Copied:
    """Copy chunks out of a ring. In the lane's thread.

    Args:
        event: see `RingSource.copy`.
        form: of the ring's rows.
    """
    fault = source.copy(chunks, event)
    if fault is not None:
        return Copied(fault)
    # Looked at in the lane, so that an object's first reader is told.
    nonfinite = tuple(nonfinite_rows(chunk.target, form) for chunk in chunks)
    return Copied(None, tuple(map(_checksum, chunks)), nonfinite)


def _checksum(chunk: ChunkCopy) -> bytes | None:
    if chunk.digest is None:
        return None
    if chunk.digest.nbytes == chunk.target.nbytes:
        return chunk.digest.value()
    return checksum(chunk.target)
