"""Real objects for stores that are looked after, and what can befall them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lmcache_qprotocol.hashing import chunk_hash
from lmcache_qprotocol.keys import KeyFamily, ObjectKey, kv_rank
from lmcache_qprotocol.layout import Layout, layout_id
from lmcache_qserver.tier import ChunkStore
from lmcache_qserver.tier.format import encode, header_of
from lmcache_qserver.tier.paths import name_of
from tests.server.tier.conformance import put

CHUNK_SIZE, BLOCK_SIZE = 8, 4
START = 16
PARENT = bytes(range(200, 232))
CREATED = 1_800_000_000.0
QUERY, KEY = "org/model##query", "org/model##key"
FOREIGN = "v1/readme.txt"


@dataclass(frozen=True)
class Stored:
    """An object, as it lies in a store."""

    name: str
    content: bytes

    def flipped(self, bit: int) -> Stored:
        """With another bit."""
        changed = bytearray(self.content)
        changed[bit // 8] ^= 1 << bit % 8
        return Stored(self.name, bytes(changed))


def stored(
    number: int,
    model: str = QUERY,
    salt: str = "",
    rows: tuple[int, int] | None = None,
    rank: int = 0,
    hidden: int = 16,
) -> Stored:
    """The object of chunk `number`, as the daemon writes it; `hidden` makes it larger."""
    layout = Layout(
        feature="transfer_query",
        layer_ids=(1, 9),
        first_head=0,
        num_heads=1,
        total_heads=1,
        head_dim=hidden,
        dtype="bfloat16",
    )
    first, last = rows or (0, CHUNK_SIZE)
    tokens = tuple(range(number, number + last))
    key = ObjectKey(
        family=KeyFamily(
            model_name=model,
            world_size=2,
            kv_rank=kv_rank(2, rank),
            cache_salt=salt,
            layout_id=layout_id(layout),
        ),
        chunk_hash=chunk_hash(PARENT, tokens, 0, ()),
        rows=rows,
    )
    header = header_of(
        key,
        layout,
        BLOCK_SIZE,
        CHUNK_SIZE,
        (first, last),
        CREATED,
        start=START,
        parent=PARENT,
        tokens=tokens,
    )
    data = np.random.default_rng(number).integers(0, 256, header.data_bytes, np.uint8).data
    return Stored(name_of(key, PARENT), encode(header, data) + bytes(data))


async def fill(store: ChunkStore, objects: Iterable[Stored]) -> None:
    """Put them all."""
    for each in objects:
        await put(store, each.name, each.content)
