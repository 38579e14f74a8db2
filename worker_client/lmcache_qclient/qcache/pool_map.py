"""The server's pool, mapped for reading: the source of a reader on the server's host."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lmcache_qclient.link.lifeline import LifelineClient
from lmcache_qclient.qcache.copies import Copy, copy_all
from lmcache_qclient.qcache.source import ChunkRead

MADV_POPULATE_READ = 22
"""Linux 5.14; the mmap module has no name for it."""
STEP_BYTES = 4 << 20

_libc = ctypes.CDLL(None)


class PoolMap:
    """Maps the pool of a lifeline when it is first read, once.

    The first copy out of a page costs a fault, and with it four times as much as the copy itself; asking the kernel for
    many pages at once costs a quarter of the copy. So pages are asked for before they are read first, in steps, and
    never for what nobody reads: a pool may have hundreds of GiB.

    Args:
        lifeline: attached; it has checked that the pool can't shrink.
    """

    def __init__(self, lifeline: LifelineClient) -> None:
        self.lifeline = lifeline
        self._bytes: npt.NDArray[np.uint8] | None = None
        self._populated: npt.NDArray[np.bool_] = np.zeros(
            -(-lifeline.pool_bytes // STEP_BYTES), dtype=np.bool_
        )

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
            mapped = mmap.mmap(self.lifeline.pool_fd, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
            self._bytes = np.frombuffer(mapped, dtype=np.uint8)
        return self._bytes

    def read(self, lease_id: int, reads: Sequence[ChunkRead], threads: int) -> None:
        """See `Source`. It can't tell whether the lease holds: `Session.still_leased` does, behind the last byte."""
        copies: list[Copy] = []
        for one in reads:
            begin, end = one.chunk.offset, one.chunk.offset + one.chunk.nbytes
            self.populate(begin, one.chunk.nbytes)
            copies += one.copies(self.bytes()[begin:end])
        copy_all(copies, threads)

    def populate(self, offset: int, nbytes: int) -> None:
        """Get the pages of a range of the pool that is about to be read; a kernel that can't leaves it to faults."""
        address = self.bytes().ctypes.data
        first, last = offset // STEP_BYTES, -(-(offset + nbytes) // STEP_BYTES)
        for step in np.flatnonzero(~self._populated[first:last]) + first:
            start = int(step) * STEP_BYTES
            length = min(STEP_BYTES, self.nbytes - start)
            _libc.madvise(
                ctypes.c_void_p(address + start), ctypes.c_size_t(length), MADV_POPULATE_READ
            )
            self._populated[step] = True
