"""The stamp of a ring slot: who wrote this row, and for which position.

One int64 beside every row of the ring, zero bit ‖ nonce (31 bits) ‖ position (32 bits):

    stamp = nonce << 32 | position          EMPTY = -1: no row has been written

The nonce names the open chunk that owns the ring block now; a worker counts it up for every chunk
it opens. The writer sets the stamps of a block to EMPTY when it gives the block to a chunk, writes
rows, and stamps them last. The reader copies rows first and stamps second. So a stamp equal to the
expected one proves that the row was complete before the copy began, and that the block had not been
given away before the copy was over.
"""

from __future__ import annotations

EMPTY = -1
NONCE_LIMIT = 1 << 31
"""Nonces are in [1, NONCE_LIMIT)."""
STAMP_BYTES = 8


def first_stamp(nonce: int, position: int) -> int:
    """The stamp of the row at absolute token `position`; that of `position + i` is `i` more.

    Raises:
        ValueError: nonce or position is outside its range.
    """
    if not 0 < nonce < NONCE_LIMIT:
        raise ValueError(f"nonce must be in [1, {NONCE_LIMIT}), not {nonce}")
    if not 0 <= position < NONCE_LIMIT:
        raise ValueError(f"position must be in [0, {NONCE_LIMIT}), not {position}")
    return nonce << 32 | position


def nonce_of(stamp: int) -> int:
    """The nonce of a stamp that is not EMPTY."""
    return stamp >> 32
