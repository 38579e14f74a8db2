"""What a stored tensor *is*, apart from its tokens, and the id that keeps unlike tensors apart."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta

from lmcache_qprotocol.dtypes import DTYPE_BYTES
from lmcache_qprotocol.limits import MAX_LAYERS, MAX_NAME_CHARS

LAYOUT_CONTEXT = "lmcache-qserver 2026-11 layout v1"
LAYOUT_ID_BYTES = 16

Count = Annotated[int, Meta(ge=1, le=1 << 24)]
Index = Annotated[int, Meta(ge=0, lt=1 << 24)]
Scale = Annotated[float, Meta(gt=0)]

ALWAYS_HASHED = 12
"""Fields of a layout that its id always depends on; of those behind them, the ones up to the last that is not empty."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one model's tensors that one rank holds.

    Attributes:
        feature: the kind of tensor, e.g. "transfer_query".
        layer_ids: global indices of the layers, in the order in which they are stored.
        first_head, num_heads, total_heads: this rank holds heads [first_head, first_head +
            num_heads) of total_heads.
        head_dim: elements per head.
        dtype: a name of `DTYPE_BYTES`.
        tp_rank, tp_size, pp_rank, pp_size: the rank's place in tensor and pipeline parallelism.
        model_revision: revision of the weights; empty when unknown.
        all_layer_ids: where the rank's layers have unlike shapes, each shape has a layout of its own: then all layers
            that the rank stores, `layer_ids` among them, ascending. Empty: `layer_ids` are all.
        scales: one per layer, in the order of `layer_ids`: a stored element times its layer's scale is its value (fp8).
            Empty: 1 everywhere.
    """

    feature: Annotated[str, Meta(min_length=1, max_length=64)]
    layer_ids: Annotated[tuple[Index, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    first_head: Index
    num_heads: Count
    total_heads: Count
    head_dim: Count
    dtype: Annotated[str, Meta(max_length=32)]
    tp_rank: Index = 0
    tp_size: Count = 1
    pp_rank: Index = 0
    pp_size: Count = 1
    model_revision: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] = ""
    all_layer_ids: Annotated[tuple[Index, ...], Meta(max_length=MAX_LAYERS)] = ()
    scales: Annotated[tuple[Scale, ...], Meta(max_length=MAX_LAYERS)] = ()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        if len(set(self.layer_ids)) != len(self.layer_ids):
            raise ValueError("a layer id occurs twice")
        if self.first_head + self.num_heads > self.total_heads:
            raise ValueError("the head range ends beyond total_heads")
        if self.tp_rank >= self.tp_size or self.pp_rank >= self.pp_size:
            raise ValueError("a rank must be smaller than its group's size")
        if self.all_layer_ids and not set(self.layer_ids) < set(self.all_layer_ids):
            raise ValueError("all_layer_ids must hold layer_ids and others")
        if list(self.all_layer_ids) != sorted(set(self.all_layer_ids)):
            raise ValueError("all_layer_ids must ascend")
        if self.scales and len(self.scales) != len(self.layer_ids):
            raise ValueError("there must be one scale per layer")
        if not all(map(math.isfinite, self.scales)):
            raise ValueError("a scale must be finite")

    @property
    def hidden_dim(self) -> int:
        """Elements of one row of one layer on this rank."""
        return self.num_heads * self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one layer on this rank."""
        return self.hidden_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return len(self.layer_ids) * self.row_bytes


def layout_id(layout: Layout) -> bytes:
    """16 bytes that differ whenever two layouts differ.

    blake3 in key-derivation mode (context `LAYOUT_CONTEXT`) over one msgpack array of the fields in
    declaration order, those from `all_layer_ids` on only up to the last that is not empty.
    """
    fields = msgspec.structs.astuple(layout)
    while len(fields) > ALWAYS_HASHED and not fields[-1]:
        fields = fields[:-1]
    canonical = msgspec.msgpack.encode(fields)
    return blake3(canonical, derive_key_context=LAYOUT_CONTEXT).digest(LAYOUT_ID_BYTES)
