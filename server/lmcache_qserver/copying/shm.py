"""A ring in shared memory that its worker passed by descriptor.

The worker is not trusted: it could shrink the memory under our feet, and the next read would kill the daemon with
SIGBUS. So before a byte is read

    F_GET_SEALS has F_SEAL_SHRINK     what fstat says now stays true (and it is a memfd, not a file or a socket)
    the page size is the ordinary one  a huge page that the kernel can't give is a SIGBUS as well
    fstat's size covers what was announced

and the mapping is read-only, so no bug here can hurt the engine.

Life:  RingMemory(fd) ─▶ claim (loop) ─▶ open (lane) ─▶ rows, stamps: copies (lane) ─▶ close (lane)

The descriptor belongs to the RingMemory from its first moment; `close` is what gives it up, on every path.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qserver.closing import close_aside, close_at_once
from lmcache_qserver.copying.chunk_copy import ChunkCopy, StampFault, copy_chunks
from lmcache_qserver.copying.crew import ALONE, Crew
from lmcache_qserver.copying.ring_geometry import RingGeometry

logger = logging.getLogger(__name__)


class RingMemory:
    """A worker's ring, mapped for reading; a RingSource.

    Args:
        fd: what came over the lifeline; this object closes it.
        nbytes: its size as announced by the worker.
        crew: helps with large chunks.
    """

    device = "cpu"
    lost = False

    def __init__(self, fd: int, nbytes: int, crew: Crew = ALONE) -> None:
        self.nbytes = nbytes
        self.claimed = False
        """An instance has taken this memory, and closes it."""
        self._fd = fd
        self._crew = crew
        self._map: mmap.mmap | None = None
        self._rows: npt.NDArray[np.uint8] | None = None
        self._stamps: npt.NDArray[np.int64] | None = None

    @property
    def closed(self) -> bool:
        """The descriptor is gone and nothing can be mapped any more."""
        return self._fd < 0 and self._map is None

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """uint8 `[num_blocks, block_bytes]`, read-only; the worker writes to it at any time.

        Keep no view beyond one call: a view keeps the mapping alive.

        Raises:
            ValueError: the memory is not open.
        """
        if self._rows is None:
            raise ValueError("the ring's memory is not open")
        return self._rows

    @property
    def stamps(self) -> npt.NDArray[np.int64]:
        """int64 `[num_blocks, block_size]`, read-only; as for `rows`."""
        if self._stamps is None:
            raise ValueError("the ring's memory is not open")
        return self._stamps

    def open(self, geometry: RingGeometry) -> None:
        """Check and map. Call it in the lane's thread; the descriptor is closed when it succeeds.

        Raises:
            RequestError(ring_refused): the memory is not what it must be; `close` is still to be called.
        """
        if self._fd < 0:
            raise _refused("this ring's memory was used before: offer it again under a new token")
        geometry.check(self.nbytes)
        _check_descriptor(self._fd, self.nbytes)
        try:
            # mmap duplicates the descriptor and closes its own one with the mapping.
            mapping = mmap.mmap(self._fd, self.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, OverflowError) as error:
            raise _refused(f"the ring's memory can't be mapped for reading: {error}") from None
        self._map = mapping
        self._rows = np.frombuffer(mapping, np.uint8, geometry.rows_bytes).reshape(
            geometry.num_blocks, geometry.block_bytes
        )
        stamps = np.frombuffer(
            mapping, np.int64, geometry.num_blocks * geometry.block_size, geometry.stamps_offset
        )
        self._stamps = stamps.reshape(geometry.num_blocks, geometry.block_size)
        os.close(self._fd)
        self._fd = -1

    def copy(self, chunks: Sequence[ChunkCopy], event: bytes) -> StampFault | None:
        """See `copy_chunks`; in host memory there is no event to wait for."""
        return copy_chunks(self, chunks, self._crew)

    def abort(self) -> None:
        """Nothing can be done: a thread that copies memory ends by itself or not at all."""

    def close(self) -> None:
        """Drop descriptor and mapping, when no copy runs any more. Idempotent.

        Unmapping is work for the lane; what was never claimed is closed by the loop, which can't wait for a descriptor.
        """
        self._close_descriptor()
        self._rows = self._stamps = None
        mapping, self._map = self._map, None
        if mapping is None:
            return
        try:
            mapping.close()
        except BufferError:
            logger.error(
                "a view of a ring is still alive: %d bytes stay mapped until it goes", self.nbytes
            )

    def _close_descriptor(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            (close_at_once if self.claimed else close_aside)(fd)


def _check_descriptor(fd: int, nbytes: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        page_bytes = os.fstatvfs(fd).f_bsize
        size = os.fstat(fd).st_size
    except OSError as error:
        raise _refused(
            f"the ring's descriptor is no memfd ({error.strerror}): use memfd_create"
        ) from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise _refused(
            "the ring's memory can shrink: seal it with F_SEAL_SHRINK before offering it"
        )
    if page_bytes != mmap.PAGESIZE:
        raise _refused(
            f"the ring has pages of {page_bytes} bytes: create the memfd without MFD_HUGETLB"
        )
    if size < nbytes:
        raise _refused(
            f"the ring's memory has {size} bytes, {nbytes} were announced: ftruncate it first"
        )


def _refused(message: str) -> RequestError:
    return RequestError(ErrorCode.RING_REFUSED, message)
