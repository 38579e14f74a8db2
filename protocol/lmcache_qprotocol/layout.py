"""What a stored tensor *is*, apart from its tokens, and the id that keeps unlike tensors apart."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec import UNSET, Meta, UnsetType

from lmcache_qprotocol.dtypes import DTYPE_BYTES
from lmcache_qprotocol.limits import MAX_LAYERS, MAX_NAME_CHARS

LAYOUT_CONTEXT = "lmcache-qserver 2026-11 layout v1"
LAYOUT_ID_BYTES = 16

Count = Annotated[int, Meta(ge=1, le=1 << 24)]
Index = Annotated[int, Meta(ge=0, lt=1 << 24)]
Scale = Annotated[float, Meta(gt=0)]

ALWAYS_HASHED = 12
"""Fields of a layout that its id always depends on; of those behind them, up to the last that is not left out."""


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
            that the rank stores, `layer_ids` among them, ascending. Left out: `layer_ids` are all.
        scales: one per layer, in the order of `layer_ids`: a stored element times its layer's scale is its value (fp8).
            Left out: 1 everywhere.
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
    all_layer_ids: Annotated[tuple[Index, ...], Meta(max_length=MAX_LAYERS)] | UnsetType = UNSET
    scales: Annotated[tuple[Scale, ...], Meta(max_length=MAX_LAYERS)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        if len(set(self.layer_ids)) != len(self.layer_ids):
            raise ValueError("a layer id occurs twice")
        if self.first_head + self.num_heads > self.total_heads:
            raise ValueError("the head range ends beyond total_heads")
        if self.tp_rank >= self.tp_size or self.pp_rank >= self.pp_size:
            raise ValueError("a rank must be smaller than its group's size")
        self._check_all_layers()
        self._check_scales()

    def _check_all_layers(self) -> None:
        if self.all_layer_ids is UNSET:
            return
        if not set(self.layer_ids) < set(self.all_layer_ids):
            raise ValueError("all_layer_ids must hold layer_ids and others, or be left out")
        if list(self.all_layer_ids) != sorted(set(self.all_layer_ids)):
            raise ValueError("all_layer_ids must ascend")

    def _check_scales(self) -> None:
        if self.scales is UNSET:
            return
        if len(self.scales) != len(self.layer_ids):
            raise ValueError("scales must be one per layer, or be left out")
        if not all(map(math.isfinite, self.scales)):
            raise ValueError("scales must be finite")

    @property
    def rank_layer_ids(self) -> tuple[int, ...]:
        """All layers that the rank stores, in this layout and in others."""
        return self.layer_ids if self.all_layer_ids is UNSET else self.all_layer_ids

    @property
    def layer_scales(self) -> tuple[float, ...]:
        """One per layer."""
        return (1.0,) * len(self.layer_ids) if self.scales is UNSET else self.scales

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
    declaration order, those from `all_layer_ids` on only up to the last that is not left out; one left out
    before it is nil.
    """
    fields = msgspec.structs.astuple(layout)
    while len(fields) > ALWAYS_HASHED and fields[-1] is UNSET:
        fields = fields[:-1]
    canonical = msgspec.msgpack.encode([None if field is UNSET else field for field in fields])
    return blake3(canonical, derive_key_context=LAYOUT_CONTEXT).digest(LAYOUT_ID_BYTES)
