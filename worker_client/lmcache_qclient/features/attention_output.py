"""transfer_attention_output: what attention makes of a layer's values, before the output projection; query heads."""

from __future__ import annotations

from lmcache_qclient.capture.tensor_kind import TensorKind
from lmcache_qclient.features.heads import query_heads, says, value_dim

FEATURE = TensorKind(
    name="transfer_attention_output",
    tensor="o",
    heads=lambda vllm_config, layer: value_dim(query_heads(vllm_config, layer), layer),
    heads_of_layer=lambda layer: says(layer, "num_heads", "head_size_v"),
)
