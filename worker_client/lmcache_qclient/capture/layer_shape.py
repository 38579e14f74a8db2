"""The shape of one layer's rows: heads, elements per head, element type. Layers of unlike shape can't share a ring.

Duck-typed: no engine is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from lmcache_qclient.capture.tensor_kind import Heads, TensorKind

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
"""What an engine quantizes queries to, by the type of its KV cache."""


class Shape(NamedTuple):
    """What all layers of one ring have in common."""

    heads: Heads
    dtype: torch.dtype


def shapes_of(
    names: Iterable[str], kind: TensorKind, vllm_config: Any
) -> dict[Shape, dict[str, float]]:
    """The shapes of some layers, in the order of their first layers; under each its layers, and their scales.

    Raises:
        NotImplementedError: a layer has what no ring can hold; it is named.
    """
    layers = layers_of(vllm_config)
    shapes: dict[Shape, dict[str, float]] = {}
    for name in names:
        layer = layers.get(name)
        dtype, scale = vllm_config.model_config.dtype, 1.0
        if kind.tensor == "q" and getattr(layer, "query_quant", None) is not None:
            dtype, scale = _quantized(name, layer)
        shape = Shape(_heads_of(name, layer, kind, vllm_config), dtype)
        shapes.setdefault(shape, {})[name] = scale
    return shapes


def layers_of(vllm_config: Any) -> Mapping[str, Any]:
    """The engine's attention layers by name; empty where it does not show them."""
    compilation = getattr(vllm_config, "compilation_config", None)
    return getattr(compilation, "static_forward_context", None) or {}


def _heads_of(name: str, layer: Any, kind: TensorKind, vllm_config: Any) -> Heads:
    """As the layer says itself, else as the model's configuration does.

    Raises:
        NotImplementedError: the layer has other heads than the configuration says, and nobody tells which of them are
            this rank's.
    """
    said = kind.heads(vllm_config, layer)
    count, dim = kind.heads_of_layer(layer) or (said.num, said.dim)
    if count == said.num:
        return said._replace(dim=dim)
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    if said.total != said.num * ranks:
        raise NotImplementedError(
            f"{kind.name} of {name} can't be captured with tensor parallelism: it has {count} heads on this rank, the "
            f"model's configuration says {said.num} of {said.total}. Set lmcache.mp.transfer_intermediate_tensors to "
            "false, or leave this feature out"
        )
    return Heads(said.first // said.num * count, count, count * ranks, dim)


def _quantized(name: str, layer: Any) -> tuple[torch.dtype, float]:
    """Type and scale of queries that the engine has quantized before attention sees them.

    Raises:
        NotImplementedError: an unknown type, or a scale per head.
    """
    said = str(getattr(layer, "kv_cache_dtype", ""))
    scale = torch.as_tensor(getattr(layer, "_q_scale", 1.0))
    if said not in FP8 or scale.numel() != 1:
        raise NotImplementedError(
            f"queries of {name} can't be captured: the engine quantizes them for a KV cache of {said} with "
            f"{scale.numel()} scales, and only fp8_e4m3 with one scale per layer can be stored. Set --kv-cache-dtype "
            "to auto, or lmcache.mp.transfer_intermediate_tensors to false"
        )
    return FP8[said], float(scale)
