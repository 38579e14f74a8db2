"""Transposing chunks, against indexing one value at a time; and the checks before it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_qclient.qcache.copies import copy_all
from lmcache_qclient.qcache.stitch import bits_dtype, check_chunk, row_copies
from lmcache_qprotocol.dtypes import DTYPE_BYTES
from lmcache_qprotocol.errors import ProtocolError
from lmcache_qprotocol.messages import StoredChunk
from tests.worker_client.qcache.engine import expected, layout_of

SMALL = st.integers(1, 4)


@given(
    blocks=SMALL,
    layers=SMALL,
    block_size=SMALL,
    heads=SMALL,
    head_dim=SMALL,
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    offset=st.integers(0, 5),
)
def test_every_value_lands_where_it_belongs(
    blocks: int, layers: int, block_size: int, heads: int, head_dim: int, dtype: str, offset: int
) -> None:
    tokens = blocks * block_size
    want = expected(range(100, 100 + tokens), range(layers), range(heads), head_dim, dtype)
    chunk = np.zeros((blocks, layers, block_size, heads * head_dim), bits_dtype(dtype))
    for token in range(tokens):
        for layer in range(layers):
            row = want[layer, token].reshape(-1)
            chunk[token // block_size, layer, token % block_size] = row
    start = 8 * offset
    pool = np.concatenate([np.full(start, 0xEE, np.uint8), chunk.reshape(-1).view(np.uint8)])
    pool.flags.writeable = False
    stored = StoredChunk(
        index=0,
        offset=start,
        nbytes=chunk.nbytes,
        shape=chunk.shape,
        dtype=dtype,
        rows=(0, tokens),
        generation=1,
    )
    # a part of a larger tensor, as one rank's layers and heads are
    whole = np.full((layers + 1, tokens + 2, heads + 1, head_dim), 7, bits_dtype(dtype))
    chunk_bytes = pool[stored.offset : stored.offset + stored.nbytes]
    copy_all(list(row_copies(chunk_bytes, stored, (0, tokens), whole[1:, 1:-1, :-1])), threads=1)
    assert np.array_equal(whole[1:, 1:-1, :-1], want)
    assert (whole[0] == 7).all()
    assert (whole[:, [0, -1]] == 7).all()
    assert (whole[:, :, -1] == 7).all()


def good() -> StoredChunk:
    layout = layout_of()
    return StoredChunk(
        index=0,
        offset=4096,
        nbytes=16 * layout.token_bytes,
        shape=(4, 3, 4, 32),
        dtype="bfloat16",
        rows=(0, 16),
        generation=1,
    )


POOL_BYTES = 4096 + good().nbytes


def test_a_good_chunk_passes() -> None:
    check_chunk(good(), layout_of(), 16, POOL_BYTES)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offset": 4098}, "lie in a pool"),
        ({"offset": 1 << 61}, "lie in a pool"),
        ({"dtype": "float128"}, "lie in a pool"),
        ({"nbytes": good().nbytes - 2}, "make its bytes"),
        ({"shape": (4, 3, 4, 31)}, "make its bytes"),
        ({"shape": (4, 4, 3, 32)}, "layout"),
        ({"shape": (0, 3, 4, 32), "nbytes": 0}, "blocks"),
        ({"dtype": "float16"}, "layout"),
        ({"rows": (0, 12)}, "blocks"),
        ({"rows": (4, 16)}, "blocks"),
        ({"shape": (2, 3, 4, 32), "nbytes": good().nbytes // 2}, "blocks"),
        ({"shape": (4, 3, 0, 32), "nbytes": 0}, "rows outside"),
        ({"rows": (0, 15)}, "whole chunk"),
        ({"rows": (0, 17)}, "rows outside"),
        ({"rows": (3, 3)}, "rows outside"),
        ({"rows": (2, 15), "valid": (1, 15)}, "valid"),
        ({"rows": (2, 15), "valid": (2, 16)}, "valid"),
        ({"rows": (2, 15), "valid": (5, 5)}, "valid"),
        ({"offset": 4095}, "aligned"),
    ],
)
def test_a_chunk_that_is_not_what_was_asked_for(change: dict[str, object], words: str) -> None:
    fields = {name: getattr(good(), name) for name in good().__struct_fields__}
    chunk = StoredChunk(**{**fields, **change})
    with pytest.raises(ProtocolError, match=words):
        check_chunk(chunk, layout_of(), 16, POOL_BYTES)
