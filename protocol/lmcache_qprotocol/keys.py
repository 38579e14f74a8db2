"""Object keys: the address of one stored chunk (or piece) of one feature of one rank.

Everything but the model name's suffix is as for a KV cache, so whoever has token ids can build the
key of a query, and Q and KV never collide. The layout id keeps tensors apart that share tokens but
not shape, layers or heads.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta

from lmcache_qprotocol.hashing import HASH_BYTES
from lmcache_qprotocol.layout import LAYOUT_ID_BYTES
from lmcache_qprotocol.limits import (
    MAX_NAME_CHARS,
    MAX_POSITION,
    MAX_SALT_CHARS,
)

KEY_CONTEXT = "lmcache-qserver 2026-11 object key v1"
SALT_CONTEXT = "lmcache-qserver 2026-11 salt v1"

FEATURE_SUFFIX = {
    "transfer_query": "##query",
    "transfer_key": "##key",
    "transfer_value": "##value",
    "transfer_attention_output": "##attention_output",
}
"""What a feature adds to the model's name in keys; the list of known features."""

Hash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
ModelName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Salt = Annotated[str, Meta(max_length=MAX_SALT_CHARS)]
LayoutId = Annotated[bytes, Meta(max_length=LAYOUT_ID_BYTES)]
WorldSize = Annotated[int, Meta(ge=1, le=255)]
Position = Annotated[int, Meta(ge=0, le=MAX_POSITION)]


def feature_model_name(model_name: str, feature: str) -> str:
    """`<model>##query` for queries.

    Raises:
        ValueError: no such feature.
    """
    if feature not in FEATURE_SUFFIX:
        raise ValueError(f"unknown feature {feature!r}; known: {', '.join(FEATURE_SUFFIX)}")
    return model_name + FEATURE_SUFFIX[feature]


def kv_rank(world_size: int, rank: int) -> int:
    """LMCache's rank word: world size, rank, local world size and local rank, a byte each.

    The local pair equals the global pair, as the peer's clients send it.
    """
    if not 1 <= world_size <= 255 or not 0 <= rank < world_size:
        raise ValueError(
            f"need 1 <= world_size <= 255 and 0 <= rank < world_size, not {world_size}, {rank}"
        )
    return world_size << 24 | rank << 16 | world_size << 8 | rank


def salt_digest(salt: str) -> str:
    """What may stand in a path or a metric for the salt: 32 hex digits; empty for no salt."""
    return blake3(salt.encode(), derive_key_context=SALT_CONTEXT).hexdigest(16) if salt else ""


class KeyFamily(msgspec.Struct, frozen=True, kw_only=True):
    """All of an object key that does not depend on the tokens.

    Attributes:
        model_name: with the feature's suffix, e.g. "org/model##query".
        world_size: TP size times PP size.
        kv_rank: see `kv_rank`.
        cache_salt: any text, empty for none; it never becomes part of a path or a metric but as
            `salt_digest`.
        layout_id: 16 bytes; empty only for legacy clients.
    """

    model_name: ModelName
    world_size: WorldSize
    kv_rank: Annotated[int, Meta(ge=0, lt=1 << 32)]
    cache_salt: Salt = ""
    layout_id: LayoutId = b""

    def __post_init__(self) -> None:
        if len(self.layout_id) not in (0, LAYOUT_ID_BYTES):
            raise ValueError(f"a layout id has {LAYOUT_ID_BYTES} bytes, or none")

    def __repr__(self) -> str:
        """With the salt's digest: this ends up in tracebacks, and they in logs."""
        return (
            f"KeyFamily(model_name={self.model_name!r}, world_size={self.world_size}, kv_rank={self.kv_rank:#x}, "
            f"salt_digest={salt_digest(self.cache_salt)!r}, layout_id={self.layout_id.hex()!r})"
        )


class ObjectKey(msgspec.Struct, frozen=True, kw_only=True):
    """The address of one object.

    Attributes:
        family: see `KeyFamily`.
        chunk_hash: hash of the whole chunk, or for a piece that of the chunk's tokens up to the
            piece's end.
        rows: None for a whole chunk, (a, b) for a piece: rows [a, b) of the chunk.
    """

    family: KeyFamily
    chunk_hash: Hash
    rows: tuple[Position, Position] | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and not self.rows[0] < self.rows[1]:
            raise ValueError(f"rows [a, b) need a < b, not {self.rows}")

    def digest(self) -> bytes:
        """32 bytes that name the object everywhere: in files, in object stores, in logs.

        blake3 in key-derivation mode over one msgpack array: model_name, world_size, kv_rank,
        chunk_hash, cache_salt, layout_id, rows.
        """
        family = self.family
        canonical = msgspec.msgpack.encode(
            (
                family.model_name,
                family.world_size,
                family.kv_rank,
                self.chunk_hash,
                family.cache_salt,
                family.layout_id,
                self.rows,
            )
        )
        return blake3(canonical, derive_key_context=KEY_CONTEXT).digest()
