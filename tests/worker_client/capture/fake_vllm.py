"""vLLM's configuration objects as far as geometry reads them, under their real class names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class KVCacheSpec:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size


class AttentionSpec(KVCacheSpec):
    pass


class FullAttentionSpec(AttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(AttentionSpec):
    pass


class MambaSpec(KVCacheSpec):
    pass


class UniformTypeKVCacheSpecs(KVCacheSpec):
    def __init__(self, block_size: int, kv_cache_specs: dict[str, KVCacheSpec]) -> None:
        super().__init__(block_size)
        self.kv_cache_specs = kv_cache_specs


def layer_names(count: int, first: int = 0) -> list[str]:
    """Names as vLLM gives them."""
    return [f"model.layers.{index}.self_attn.attn" for index in range(first, first + count)]


def group(spec: KVCacheSpec, names: list[str]) -> Any:
    """One cache group."""
    return SimpleNamespace(kv_cache_spec=spec, layer_names=names)


def cache_config(*groups: Any) -> Any:
    """`KVCacheConfig`."""
    return SimpleNamespace(kv_cache_groups=list(groups))


def vllm_config(
    *,
    heads: int = 2,
    head_dim: int = 3,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    tp: int = 1,
    pp: int = 1,
    rank: int = 0,
    batched: int | None = 512,
    seqs: int = 8,
    revision: str | None = None,
    layers: int = 1000,
    speculative: Any = None,
    kv_heads: int | None = None,
    attention: dict[str, Any] | None = None,
) -> Any:
    """`VllmConfig`; `heads` are this rank's, `kv_heads` (as many if None) the model's, `attention` are its layers."""
    total_kv = heads * tp if kv_heads is None else kv_heads
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel: heads,
            get_num_kv_heads=lambda parallel: max(1, total_kv // tp),
            get_total_num_kv_heads=lambda: total_kv,
            get_head_size=lambda: head_dim,
            dtype=dtype,
            revision=revision,
            get_total_num_hidden_layers=lambda: layers,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp, pipeline_parallel_size=pp, rank=rank
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=batched, max_num_seqs=seqs),
        cache_config=SimpleNamespace(block_size=block_size),
        speculative_config=speculative,
        compilation_config=SimpleNamespace(static_forward_context=attention or {}),
    )


def caches(names: list[str], device: str = "cpu") -> dict[str, torch.Tensor]:
    """`kv_caches`."""
    return {name: torch.empty(0, device=device) for name in names}
