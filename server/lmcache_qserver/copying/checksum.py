"""What a stored object's bytes are checked by: XXH3, 64 bits (https://xxhash.com, frozen since version 0.8).

It finds what memory, a disk or a program did to the bytes by accident. It is no proof against somebody who wants two
objects to look alike: the chunk hash, which names an object, is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from lmcache_qserver.copying.chunk_copy import ChunkCopy, StampFault
from lmcache_qserver.copying.ring_source import RingSource


class Copied(NamedTuple):
    """What became of a copy.

    Attributes:
        fault: the first row that was wrong; None when every row is proven.
        checksums: of the chunks, in order; empty when they were not asked for, or a row was wrong.
    """

    fault: StampFault | None
    checksums: tuple[bytes, ...] = ()


def checksum(data: npt.NDArray[np.uint8]) -> bytes:
    """XXH3-64 of contiguous bytes, as 8 bytes, most significant first. The GIL is free meanwhile.

    Args:
        data: 1-D.
    """
    return xxhash.xxh3_64_digest(data.data)


def copy(source: RingSource, chunks: Sequence[ChunkCopy], event: bytes, inline: bool) -> Copied:
    """Copy chunks out of a ring. In the lane's thread.

    Args:
        event: see `RingSource.copy`.
        inline: make their checksums, too.
    """
    fault = source.copy(chunks, event)
    if fault is not None or not inline:
        return Copied(fault)
    return Copied(None, tuple(checksum(chunk.target) for chunk in chunks))
