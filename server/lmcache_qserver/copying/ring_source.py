"""What a lane needs of a ring, wherever its bytes lie: the one interface of all copy backends.

    offered ─▶ claimed (loop) ─▶ open (lane) ─▶ copy, copy, ... (lane) ─▶ close (lane)

A source belongs to whoever made it until an instance claims it; then to that instance, whose lane closes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lmcache_qserver.copying.chunk_copy import ChunkCopy, StampFault
from lmcache_qserver.copying.ring_geometry import RingGeometry


class RingSource(Protocol):
    """A worker's ring.

    Attributes:
        claimed: an instance has taken it, and closes it.
    """

    claimed: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the ring's memory, as the worker announced."""

    @property
    def device(self) -> str:
        """Where the ring lies, as torch names it: "cpu", "cuda:0"."""

    @property
    def closed(self) -> bool:
        """Nothing of it is held any more."""

    @property
    def lost(self) -> bool:
        """Its memory is out of reach for good, so its instance has to go."""

    def abort(self) -> None:
        """A call has outlived its time: make it return, where that can be done. On the loop; never waits."""

    def open(self, geometry: RingGeometry) -> None:
        """Check the memory and make it readable. In the lane's thread.

        Raises:
            RequestError(ring_refused): the memory is not what it must be; `close` is still to be called.
        """

    def copy(self, chunks: Sequence[ChunkCopy], event: bytes) -> StampFault | None:
        """Copy chunks and prove them. Every byte is in place when it returns. In the lane's thread.

        Args:
            event: handle of the device event that says when the rows are there; empty in host memory.

        Returns:
            None when every row is proven.
        """

    def close(self) -> None:
        """Drop all that is held of the ring, when no copy runs any more. Idempotent.

        In the lane's thread, but while it is unclaimed on the loop: then it must not wait for anything.
        """
