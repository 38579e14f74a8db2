"""Memory that chunks are laid out in as a ring has them, for the server to take them from.

    byte 0            rows    [slots * blocks of a chunk, layers, block_size, heads * head_dim]
    stamps_offset     stamps  [slots * blocks of a chunk, block_size]

A slot holds one chunk. It is filled again only when the server has answered for what it held.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lmcache_qclient.capture.ring_memory import RingMemory
from lmcache_qclient.qcache.stitch import Bits, bits_dtype
from lmcache_qprotocol.layout import Layout
from lmcache_qprotocol.stamps import EMPTY, STAMP_BYTES

BLOCK_TOKENS = 16
"""A tail takes whole blocks in the server's pool, so they are not long."""
MOST_BYTES = 64 << 20
MOST_SLOTS = 4
"""While the server copies one chunk the next is laid out; more slots than this gain nothing."""
PAGE = 4096


class Staging:
    """See the head of this file.

    Args:
        layout: of the rank whose chunks they are.
        chunk_size: tokens.
        shared: in memory that the server can map; else in this process's own, one slot of it.
    """

    def __init__(self, layout: Layout, chunk_size: int, *, shared: bool) -> None:
        self.block_size = math.gcd(chunk_size, BLOCK_TOKENS)
        self.blocks_per_chunk = chunk_size // self.block_size
        slot_bytes = chunk_size * layout.token_bytes
        self.slots = max(1, min(MOST_SLOTS, MOST_BYTES // slot_bytes)) if shared else 1
        self.num_blocks = self.slots * self.blocks_per_chunk
        self.stamps_offset = -(-self.slots * slot_bytes // PAGE) * PAGE
        self.nbytes = self.stamps_offset + self.num_blocks * self.block_size * STAMP_BYTES
        self.memory = RingMemory(self.nbytes) if shared else None
        raw = np.zeros(self.nbytes, dtype=np.uint8) if self.memory is None else self.memory.array
        self._slot_bytes = slot_bytes
        self._bytes = raw
        rows = raw[: self.slots * slot_bytes].view(bits_dtype(layout.dtype))
        shape = (self.num_blocks, len(layout.layer_ids), self.block_size, layout.num_heads)
        self._rows: Bits = rows.reshape(*shape, layout.head_dim)
        stamps = raw[self.stamps_offset :].view(np.int64)
        self._stamps = stamps.reshape(self.slots, chunk_size)
        self._stamps.fill(EMPTY)

    def fill(self, slot: int, values: Bits, stamp: int) -> tuple[int, ...]:
        """Lay out a chunk, or the first rows of one.

        Args:
            values: `[layers, rows, heads, head_dim]`, any strides.
            stamp: of the first row.

        Returns:
            The blocks that hold it.
        """
        layers, rows = values.shape[:2]
        first, size = slot * self.blocks_per_chunk, self.block_size
        whole, rest = divmod(rows, size)
        stamps = self._stamps[slot]
        stamps.fill(EMPTY)
        by_block = values[:, : whole * size].reshape(layers, whole, size, *values.shape[2:])
        np.copyto(self._rows[first : first + whole], by_block.swapaxes(0, 1))
        if rest:
            np.copyto(self._rows[first + whole, :, :rest], values[:, whole * size :])
        stamps[:rows] = np.arange(stamp, stamp + rows)
        return tuple(range(first, first + whole + (rest > 0)))

    def gather(self, slot: int, offset: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy the bytes from `offset` of a slot's blocks into `out`."""
        begin = slot * self._slot_bytes + offset
        np.copyto(out, self._bytes[begin : begin + len(out)])

    def stamps(self, slot: int, rows: int) -> npt.NDArray[np.int64]:
        """Those of a slot's first rows."""
        return self._stamps[slot, :rows]

    def close(self) -> None:
        """Give the descriptor back; what the server still has mapped stays as it is."""
        if self.memory is not None:
            self.memory.close()
