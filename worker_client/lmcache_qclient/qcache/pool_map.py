"""The server's pool, mapped for reading."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from lmcache_qclient.link.lifeline import LifelineClient


class PoolMap:
    """Maps the pool of a lifeline when it is first read, once.

    Without MAP_POPULATE the first copy out of every page costs a fault, four times as much as the copy itself.

    Args:
        lifeline: attached; it has checked that the pool can't shrink.
    """

    def __init__(self, lifeline: LifelineClient) -> None:
        self.lifeline = lifeline
        self._bytes: npt.NDArray[np.uint8] | None = None

    @property
    def nbytes(self) -> int:
        """Size of the pool."""
        return self.lifeline.pool_bytes

    def bytes(self) -> npt.NDArray[np.uint8]:
        """uint8 `[nbytes]`, read-only. Only what is leased stays as it is.

        Raises:
            ConnectionError: the lifeline is closed.
        """
        if self._bytes is None:
            if self.lifeline.pool_fd < 0:
                raise ConnectionError("the lifeline is closed: connect again")
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mapped = mmap.mmap(self.lifeline.pool_fd, self.nbytes, flags, mmap.PROT_READ)
            self._bytes = np.frombuffer(mapped, dtype=np.uint8)
        return self._bytes
