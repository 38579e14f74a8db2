"""transfer_query: queries after RoPE and query norm, softmax scale not folded in, of every attention layer."""

from __future__ import annotations

from lmcache_qclient.capture.tensor_kind import TensorKind
from lmcache_qclient.features.heads import is_mla, query_heads, says

FEATURE = TensorKind(
    name="transfer_query",
    tensor="q",
    heads=query_heads,
    heads_of_layer=lambda layer: says(
        layer, "num_heads", "qk_head_dim" if is_mla(layer) else "head_size"
    ),
)
