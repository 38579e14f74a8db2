"""What a stored object's bytes are checked by: XXH3, 64 bits (https://xxhash.com, frozen since version 0.8).

It finds what memory, a disk or a program did to the bytes by accident. It is no proof against somebody who wants two
objects to look alike: the chunk hash, which names an object, is.

The GIL is free while bytes are hashed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]
"""1-D, contiguous."""


def checksum(data: Bytes) -> bytes:
    """8 bytes, most significant first."""
    return xxhash.xxh3_64_digest(data.data)


class Digest:
    """The checksum of bytes that come in parts, in order.

    Attributes:
        nbytes: how many have come.
    """

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()
        self.nbytes = 0

    def update(self, part: Bytes) -> None:
        """The next part."""
        self._state.update(part.data)
        self.nbytes += part.nbytes

    def value(self) -> bytes:
        """8 bytes, most significant first."""
        return self._state.digest()
