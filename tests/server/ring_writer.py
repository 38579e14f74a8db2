"""Writes and stamps rows of a small ring, as a worker does between steps."""

from __future__ import annotations

import mmap
import os
import struct

from lmcache_qprotocol.stamps import first_stamp
from lmcache_qserver.testing.bare_client import SMALL_LAYOUT

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * SMALL_LAYOUT.token_bytes


class RingWriter:
    """A mapped ring of `small_ring`.

    Args:
        ring: (descriptor, bytes, stamps_offset); this object closes the descriptor.
    """

    def __init__(self, ring: tuple[int, int, int]) -> None:
        self.ring = ring
        self._fd, nbytes, self._stamps_offset = ring
        self._memory = mmap.mmap(self._fd, nbytes)
        self.nonce = 0
        """Of the last block that was written."""

    def write(self, block: int, start: int, rows: bytes | None = None) -> int:
        """Fill one block with the rows of [start, start + 16); returns its nonce.

        Args:
            rows: `BLOCK_BYTES` bytes; None: what lies there stays.
        """
        self.nonce += 1
        if rows is not None:
            self._memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = rows
        self.stamp(block, first_stamp(self.nonce, start))
        return self.nonce

    def stamp(self, block: int, first: int) -> None:
        """Stamp a block's rows with first, first + 1, ..."""
        stamps = struct.pack(f"={BLOCK_SIZE}q", *range(first, first + BLOCK_SIZE))
        at = self._stamps_offset + block * len(stamps)
        self._memory[at : at + len(stamps)] = stamps

    def close(self, *others: int) -> None:
        """Unmap, and close the descriptor and these others."""
        self._memory.close()
        for fd in (self._fd, *others):
            os.close(fd)
