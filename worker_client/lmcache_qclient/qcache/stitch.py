"""Chunks and pieces in the pool to rows of the caller's tensor: the one transposition from ring to reading order.

    pool:   [blocks, layers, block_size, heads * head_dim]        (block-major, as the ring had it)
    tensor: [layers, tokens, heads, head_dim]

Elements are moved as unsigned integers of their size, so that types which numpy does not know (bfloat16, float8) keep
every bit. One strided copy per block, at the speed of plain ones; numpy lets other threads run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_qclient.qcache.copies import Copy
from lmcache_qprotocol.dtypes import DTYPE_BYTES
from lmcache_qprotocol.errors import ErrorCode, ProtocolError
from lmcache_qprotocol.layout import Layout
from lmcache_qprotocol.messages import StoredChunk

Bits = npt.NDArray[Any]
"""An array of unsigned integers as wide as the elements they stand for."""

BITS: dict[int, type[np.unsignedinteger[Any]]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}


def bits_dtype(dtype: str) -> np.dtype[Any]:
    """The unsigned integer that is as wide as an element of `dtype` (a name of `DTYPE_BYTES`)."""
    return np.dtype(BITS[DTYPE_BYTES[dtype]])


def check_chunk(chunk: StoredChunk, layout: Layout, chunk_size: int, pool_bytes: int) -> None:
    """Make sure that a chunk lies in the pool and is what was asked for, before a byte of it is touched.

    Raises:
        ProtocolError(bad_payload): it does not, or it is not.
    """
    blocks, layers, block_size, hidden_dim = chunk.shape
    if chunk.dtype not in DTYPE_BYTES or chunk.offset + chunk.nbytes > pool_bytes:
        raise _wrong(chunk, f"does not lie in a pool of {pool_bytes} bytes")
    if blocks * layers * block_size * hidden_dim * DTYPE_BYTES[chunk.dtype] != chunk.nbytes:
        raise _wrong(chunk, "has a shape that does not make its bytes")
    if (layers, hidden_dim, chunk.dtype) != (
        len(layout.layer_ids),
        layout.hidden_dim,
        layout.dtype,
    ):
        raise _wrong(chunk, "does not have the layout that was asked for")
    first, end = chunk.rows
    if not 0 <= first < end <= chunk_size or not block_size:
        raise _wrong(chunk, f"has rows outside a chunk of {chunk_size} tokens")
    if blocks != -(-end // block_size) - first // block_size:
        raise _wrong(chunk, "has blocks that do not hold its rows")
    if chunk.valid is None and chunk.rows != (0, chunk_size):
        raise _wrong(chunk, f"is not a whole chunk of {chunk_size} tokens")
    if chunk.valid is not None and not first <= chunk.valid[0] < chunk.valid[1] <= end:
        raise _wrong(chunk, "says that rows are valid which it does not have")
    if chunk.offset % DTYPE_BYTES[chunk.dtype]:
        raise _wrong(chunk, "is not aligned to its elements")


def _wrong(chunk: StoredChunk, what: str) -> ProtocolError:
    return ProtocolError(
        ErrorCode.BAD_PAYLOAD,
        f"the server's chunk {chunk.index} {what}: {chunk}; is it of this version?",
    )


def row_copies(
    chunk_bytes: npt.NDArray[np.uint8],
    chunk: StoredChunk,
    rows: tuple[int, int],
    target: Bits,
    stored_layers: slice = slice(None),
) -> Iterator[Copy]:
    """The copies that bring rows [a, b) of a checked chunk to the caller's tensor, one per block.

    Args:
        chunk_bytes: uint8 `[chunk.nbytes]`.
        rows: among `chunk.rows`, counted from the chunk's start as they are.
        target: `[layers, b - a, heads, head_dim]` of the same width of element; any strides.
        stored_layers: those of the chunk that go there, as many as `target` has.
    """
    blocks, layers, block_size, _ = chunk.shape
    heads, head_dim = target.shape[2:]
    source = chunk_bytes.view(target.dtype)
    by_block = source.reshape(blocks, layers, block_size, heads, head_dim)
    first_block = chunk.rows[0] // block_size
    row, end = rows
    while row < end:
        block, offset = divmod(row, block_size)
        count = min(end - row, block_size - offset)
        yield (
            target[:, row - rows[0] : row - rows[0] + count],
            by_block[block - first_block, stored_layers, offset : offset + count],
        )
        row += count
