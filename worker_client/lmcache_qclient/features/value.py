"""transfer_value: values as they go into the KV cache; the KV heads of this rank, as wide as the model's values are.

A layer that uses another layer's cache computes no values, and is not among the stored layers.
"""

from __future__ import annotations

from lmcache_qclient.capture.tensor_kind import TensorKind
from lmcache_qclient.features.heads import kv_heads, owns_kv, says, value_dim

FEATURE = TensorKind(
    name="transfer_value",
    tensor="v",
    heads=lambda vllm_config, layer: value_dim(kv_heads(vllm_config, layer), layer),
    heads_of_layer=lambda layer: says(layer, "num_kv_heads", "head_size_v"),
    has=owns_kv,
)
