"""What a stored object's bytes are checked by: XXH3, 64 bits (https://xxhash.com, frozen since version 0.8).

It finds what memory, a disk or a program did to the bytes by accident. It is no proof against somebody who wants two
objects to look alike: the chunk hash, which names an object, is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash


def checksum(data: npt.NDArray[np.uint8]) -> bytes:
    """XXH3-64 of contiguous bytes, as 8 bytes, most significant first. The GIL is free meanwhile.

    Args:
        data: 1-D.
    """
    return xxhash.xxh3_64_digest(data)
