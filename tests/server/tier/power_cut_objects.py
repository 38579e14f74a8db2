"""The objects that the power cut's writer writes and its reader expects: number i is known from i alone."""

from __future__ import annotations

import numpy as np

from lmcache_qprotocol.keys import KeyFamily, ObjectKey, kv_rank
from lmcache_qprotocol.layout import Layout, layout_id
from lmcache_qserver.tier.format import encode, header_of
from lmcache_qserver.tier.paths import name_of

LAYOUT = Layout(
    feature="transfer_query",
    layer_ids=(1, 9, 17, 25),
    first_head=0,
    num_heads=8,
    total_heads=8,
    head_dim=64,
    dtype="bfloat16",
)
BLOCK_SIZE, CHUNK_SIZE = 16, 256
FAMILY = KeyFamily(
    model_name="org/model##query",
    world_size=1,
    kv_rank=kv_rank(1, 0),
    layout_id=layout_id(LAYOUT),
)


def key_of(index: int) -> ObjectKey:
    """Its hash decides the fan-out folder: the first objects each need a new one."""
    return ObjectKey(family=FAMILY, chunk_hash=bytes([index % 256]) + index.to_bytes(31, "big"))


def object_parts(index: int) -> tuple[str, list[memoryview]]:
    """(name, header and 1 MiB of data)."""
    key = key_of(index)
    header = header_of(key, LAYOUT, BLOCK_SIZE, CHUNK_SIZE, (0, CHUNK_SIZE), 1.8e9)
    data = np.random.default_rng(index).integers(0, 256, header.data_bytes, np.uint8).data
    return name_of(key), [memoryview(encode(header, data)), data]
