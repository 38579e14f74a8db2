"""Chunks in the pool to rows of the caller's tensor: the one transposition between ring order and reading order.

    pool:   [blocks, layers, block_size, heads * head_dim]        (block-major, as the ring had it)
    tensor: [layers, tokens, heads, head_dim]

Elements are moved as unsigned integers of their size, so that types which numpy does not know (bfloat16, float8) keep
every bit. One strided copy per block; numpy lets other threads run meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

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
    if blocks * block_size != chunk_size or chunk.rows != (0, chunk_size):
        raise _wrong(chunk, f"is not a whole chunk of {chunk_size} tokens")
    if chunk.offset % DTYPE_BYTES[chunk.dtype]:
        raise _wrong(chunk, "is not aligned to its elements")


def _wrong(chunk: StoredChunk, what: str) -> ProtocolError:
    return ProtocolError(
        ErrorCode.BAD_PAYLOAD,
        f"the server's chunk {chunk.index} {what}: {chunk}; is it of this version?",
    )


def copy_chunk(pool: npt.NDArray[np.uint8], chunk: StoredChunk, target: Bits) -> None:
    """Copy one checked chunk.

    Args:
        pool: uint8 `[pool_bytes]`.
        target: `[layers, blocks * block_size, heads, head_dim]` of the same width of element; any strides.
    """
    blocks, layers, block_size, _ = chunk.shape
    heads, head_dim = target.shape[2:]
    source = pool[chunk.offset : chunk.offset + chunk.nbytes].view(target.dtype)
    rows = source.reshape(blocks, layers, block_size, heads, head_dim)
    for block in range(blocks):
        np.copyto(target[:, block * block_size : (block + 1) * block_size], rows[block])
