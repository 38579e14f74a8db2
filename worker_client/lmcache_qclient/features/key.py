"""transfer_key: keys as they go into the KV cache, after RoPE and key norm; the KV heads of this rank.

A layer that uses another layer's cache computes no keys, and is not among the stored layers.
"""

from __future__ import annotations

from lmcache_qclient.capture.tensor_kind import TensorKind
from lmcache_qclient.features.heads import kv_heads, owns_kv, says

FEATURE = TensorKind(
    name="transfer_key",
    tensor="k",
    heads=kv_heads,
    heads_of_layer=lambda layer: says(layer, "num_kv_heads", "head_size"),
    has=owns_kv,
)
