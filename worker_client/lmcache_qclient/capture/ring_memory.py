"""The ring's memory on a CPU engine: an anonymous file that another process can map, and that can't shrink under it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray

MADV_POPULATE_WRITE = 23
"""Linux 5.14; Python's mmap module has no name for it."""

_libc = ctypes.CDLL(None, use_errno=True)


class RingMemory:
    """`nbytes` of zeroed shared memory without a name.

    Attributes:
        fd: descriptor to hand to the server.
        array: uint8 `[nbytes]`.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("lmcache-q-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        fcntl.fcntl(
            self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        self._map = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def populate(self, nbytes: int) -> None:
        """Touch the first `nbytes` now, so that no forward pass pays for page faults. Best effort."""
        address = self.array.ctypes.data
        _libc.madvise(
            ctypes.c_void_p(address), ctypes.c_size_t(min(nbytes, self.nbytes)), MADV_POPULATE_WRITE
        )

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last tensor over it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
