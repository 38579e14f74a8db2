"""What a rank's attention layers look like, read from the engine's configuration. Duck-typed: no engine is imported."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import UNSET

from lmcache_qclient.capture.draft_layers import without_drafts
from lmcache_qclient.capture.layer_selection import LayerSelection
from lmcache_qclient.capture.layer_shape import Shape, layers_of, shapes_of
from lmcache_qclient.capture.tensor_kind import TensorKind
from lmcache_qprotocol.layout import Layout


@dataclass(frozen=True)
class Geometry:
    """One rank's tensors of one kind and shape.

    Attributes:
        layer_names: the engine's names of the layers that are captured, in the order of the ring's layers.
        reference_layer: the layer whose slot mapping attributes the rows of all layers; itself captured or not.
        group_index: the cache group of that layer; `block_ids` come from it.
        engine_block_size: tokens per block of that group.
        layout: what is stored.
        dtype: of the rows.
        device: where the engine keeps its cache.
        without: attention layers that have no such tensor of their own.
    """

    layer_names: tuple[str, ...]
    reference_layer: str
    group_index: int
    engine_block_size: int
    layout: Layout
    dtype: torch.dtype
    device: torch.device
    without: tuple[str, ...] = ()


def is_spec(spec: Any, name: str) -> bool:
    """Whether a cache spec is an instance of the engine's class `name`."""
    return any(cls.__name__ == name for cls in type(spec).__mro__)


def attention_layers(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> tuple[str, ...]:
    """Layers whose group's spec is an AttentionSpec, in `kv_caches` order; every layer when there are no groups."""
    groups = getattr(kv_cache_config, "kv_cache_groups", None) or ()
    if not groups:
        return tuple(kv_caches)
    named = {
        name
        for group in groups
        if _holds(group.kv_cache_spec, "AttentionSpec")
        for name in group.layer_names
    }
    return tuple(name for name in kv_caches if name in named)


def _holds(spec: Any, name: str) -> bool:
    """`is_spec`, or for a spec over specs (layers of one type with unlike sizes), of one of them."""
    inner = getattr(spec, "kv_cache_specs", None)
    if isinstance(inner, Mapping):
        return any(is_spec(item, name) for item in inner.values())
    return is_spec(spec, name)


def sharing_layers(
    kv_caches: Mapping[str, Any], kv_cache_config: Any, layers: Mapping[str, Any]
) -> tuple[str, ...]:
    """Layers that use the cache of an attention layer: they have queries, but are in none of the groups. `kv_caches`
    order.
    """
    owners = set(attention_layers(kv_caches, kv_cache_config))
    return tuple(
        name
        for name in kv_caches
        if name not in owners
        and getattr(layers.get(name), "kv_sharing_target_layer_name", None) in owners
    )


def layers_without_group(
    kv_caches: Mapping[str, Any], kv_cache_config: Any, vllm_config: Any
) -> tuple[str, ...]:
    """Layers that are in none of the groups, and of which the engine does not say whose cache they use: nobody knows
    whether they have queries. `kv_caches` order.
    """
    groups = getattr(kv_cache_config, "kv_cache_groups", None) or ()
    if not groups:
        return ()
    known = {name for group in groups for name in group.layer_names}
    known.update(sharing_layers(kv_caches, kv_cache_config, layers_of(vllm_config)))
    return tuple(name for name in kv_caches if name not in known)


def attends(layer: Any) -> bool:
    """Whether a layer has queries of the sequence's own tokens: no encoder's, and no cache beside an attention layer.

    True where the engine does not show its layers.
    """
    kind = getattr(layer, "attn_type", "decoder")
    is_decoder = getattr(kind, "value", kind) == "decoder"
    return layer is None or (is_decoder and hasattr(layer, "num_heads"))


def check_numbers(names: Sequence[str]) -> None:
    """Stored layers are told apart by their numbers: make sure that no two have the same.

    Raises:
        NotImplementedError: two do, as an encoder's and a decoder's may.
    """
    seen: dict[int, str] = {}
    for name in names:
        other = seen.setdefault(layer_id(name), name)
        if other != name:
            raise NotImplementedError(
                f"the attention layers {other} and {name} have one number, so their queries could not be told apart. "
                "Set lmcache.mp.transfer_intermediate_tensors to false"
            )


def reference_group(kv_cache_config: Any, vllm_config: Any) -> tuple[int, int, str | None]:
    """The group whose blocks and slots attribute rows: the first with full attention, else the first with attention.

    A group that holds layers of a draft model only does not count.

    Returns:
        Its index, its block size in tokens, and its first layer; (0, 0, None) when there are no attention groups.
    """
    best: tuple[int, int, str | None] = (0, 0, None)
    for index, group in enumerate(getattr(kv_cache_config, "kv_cache_groups", None) or ()):
        if not _holds(group.kv_cache_spec, "AttentionSpec"):
            continue
        own = without_drafts(group.layer_names, vllm_config, layer_id)
        if not own:
            continue
        found = index, int(group.kv_cache_spec.block_size), own[0]
        if _holds(group.kv_cache_spec, "FullAttentionSpec"):
            return found
        if best[2] is None:
            best = found
    return best


def layer_id(layer_name: str) -> int:
    """The layer's global index: the first number among the dotted parts of its name.

    Raises:
        ValueError: there is none.
    """
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", layer_name)
    if match is None:
        raise ValueError(f"no layer number in the name {layer_name!r}")
    return int(match.group(1))


def geometries_of(
    kv_caches: Mapping[str, Any],
    kv_cache_config: Any,
    vllm_config: Any,
    kind: TensorKind,
    selected: LayerSelection | None = None,
) -> tuple[Geometry, ...]:
    """Read this rank's geometries of one kind of tensor: one for all layers of one shape, in the order of their first
    layers. None at all when no layer has any.

    Args:
        selected: the layers to capture; None for all.

    Raises:
        NotImplementedError: see `check_numbers` and `shapes_of`.
        ValueError: the selection names layers that the model does not have, or none of a pipeline stage.
    """
    layers = layers_of(vllm_config)
    attention = captured_layers(kv_caches, kv_cache_config, vllm_config)
    if not attention:
        return ()
    check_numbers(attention)
    group_index, block_size, reference = reference_group(kv_cache_config, vllm_config)
    if reference is None or reference not in attention:
        reference = attention[0]
    names = tuple(name for name in attention if kind.has(layers.get(name)))
    if selected is not None:
        names = _select(names, selected, vllm_config)
    shapes = shapes_of(names, kind, vllm_config)
    return tuple(
        Geometry(
            layer_names=tuple(members),
            reference_layer=reference,
            group_index=group_index,
            engine_block_size=block_size or int(vllm_config.cache_config.block_size),
            layout=_layout_of(members, names, kind, shape, vllm_config),
            dtype=shape.dtype,
            device=kv_caches[attention[0]].device,
            without=tuple(name for name in attention if not kind.has(layers.get(name))),
        )
        for shape, members in shapes.items()
    )


def captured_layers(
    kv_caches: Mapping[str, Any], kv_cache_config: Any, vllm_config: Any
) -> tuple[str, ...]:
    """The model's own attention layers, those that use another layer's cache among them, in the model's order."""
    layers = layers_of(vllm_config)
    names = [
        *attention_layers(kv_caches, kv_cache_config),
        *sharing_layers(kv_caches, kv_cache_config, layers),
    ]
    own = without_drafts(names, vllm_config, layer_id)
    return tuple(sorted((name for name in own if attends(layers.get(name))), key=layer_id))


def _select(names: Sequence[str], selected: LayerSelection, vllm_config: Any) -> tuple[str, ...]:
    wanted = selected.of(int(vllm_config.model_config.get_total_num_hidden_layers()))
    kept = tuple(name for name in names if layer_id(name) in wanted)
    stages = int(vllm_config.parallel_config.pipeline_parallel_size)
    if not kept and names and stages > 1:
        raise ValueError(
            f"lmcache.q.layers={selected} selects none of the layers {layer_id(names[0])} to {layer_id(names[-1])} of "
            f"a pipeline stage, and a reader waits for all {stages} stages: select at least one of each"
        )
    return kept


def _layout_of(
    members: Mapping[str, float],
    names: Sequence[str],
    kind: TensorKind,
    shape: Shape,
    vllm_config: Any,
) -> Layout:
    heads = shape.heads
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    tp_size, pp_size = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
    rank = int(getattr(parallel, "rank", 0)) % (tp_size * pp_size)
    return Layout(
        feature=kind.name,
        layer_ids=tuple(layer_id(name) for name in members),
        first_head=heads.first,
        num_heads=heads.num,
        total_heads=heads.total,
        head_dim=heads.dim,
        dtype=str(shape.dtype).removeprefix("torch."),
        tp_rank=rank % tp_size,
        tp_size=tp_size,
        pp_rank=rank // tp_size,
        pp_size=pp_size,
        model_revision=str(getattr(model, "revision", None) or ""),
        all_layer_ids=UNSET if len(members) == len(names) else tuple(map(layer_id, names)),
        scales=UNSET if shape.dtype is model.dtype else tuple(members.values()),
    )


def ring_block_size(engine_block_size: int, chunk_size: int) -> int:
    """The engine's block size where it divides the chunk, else the greatest common divisor."""
    return math.gcd(engine_block_size, chunk_size)
