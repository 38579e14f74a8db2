"""How many heads a rank has of a tensor, by what vLLM's configuration and its layers say. No vLLM is imported."""

from __future__ import annotations

from typing import Any

from lmcache_qclient.capture.tensor_kind import Heads


def query_heads(vllm_config: Any, layer: Any) -> Heads:
    """Query heads, divided among the ranks of tensor parallelism; of MLA as they are before they are absorbed."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    count = int(model.get_num_attention_heads(parallel))
    return Heads(
        tp_rank(parallel) * count,
        count,
        count * int(parallel.tensor_parallel_size),
        int(getattr(layer, "qk_head_dim", model.get_head_size())),
    )


def kv_heads(vllm_config: Any, layer: Any) -> Heads:
    """Heads of the KV cache: divided among the ranks, or where there are more ranks than heads, one on several."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    count, total = int(model.get_num_kv_heads(parallel)), int(model.get_total_num_kv_heads())
    first = tp_rank(parallel) * total // int(parallel.tensor_parallel_size)
    return Heads(first, count, total, int(model.get_head_size()))


def value_dim(heads: Heads, layer: Any) -> Heads:
    """The same heads, as wide as the layer's values: models may have values narrower than keys."""
    narrow = getattr(layer, "v_head_dim", heads.dim) if is_mla(layer) else heads.dim
    return heads._replace(dim=int(getattr(layer, "head_size_v", narrow)))


def says(layer: Any, count: str, dim: str) -> tuple[int, int] | None:
    """(heads, elements per head) by the names of the layer's own attributes; None where it lacks one."""
    has = getattr(layer, count, None), getattr(layer, dim, None)
    return None if None in has else (int(has[0]), int(has[1]))  # type: ignore[arg-type]  # neither is None


def owns_kv(layer: Any) -> bool:
    """Whether the layer computes keys and values, one a head: it does not use another layer's, and is no MLA."""
    return getattr(layer, "kv_sharing_target_layer_name", None) is None and not is_mla(layer)


def is_mla(layer: Any) -> bool:
    """Whether the layer keeps one latent vector a token instead of keys and values."""
    return hasattr(layer, "kv_lora_rank")


def tp_rank(parallel: Any) -> int:
    """This rank's place in tensor parallelism."""
    return int(getattr(parallel, "rank", 0)) % int(parallel.tensor_parallel_size)
