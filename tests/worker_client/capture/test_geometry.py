"""What is read from the engine's configuration: layers, reference group, heads, ring size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_qclient.capture.geometry import (
    Geometry,
    attends,
    attention_layers,
    geometries_of,
    layer_id,
    reference_group,
    ring_block_size,
    sharing_layers,
)
from lmcache_qclient.capture.ring_size import RingSettings, ring_blocks
from lmcache_qclient.features.attention_output import FEATURE as OUTPUT
from lmcache_qclient.features.key import FEATURE as KEY
from lmcache_qclient.features.query import FEATURE as QUERY
from tests.worker_client.capture.fake_vllm import (
    AttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    cache_config,
    caches,
    group,
    layer_names,
    vllm_config,
)

NAMES = layer_names(6)


def geometry_of(*arguments: Any) -> Geometry | None:
    """The geometry of layers of one shape."""
    found = geometries_of(*arguments)
    assert len(found) < 2
    return found[0] if found else None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, NAMES),
        (SimpleNamespace(), NAMES),
        (SimpleNamespace(kv_cache_groups=None), NAMES),
        (cache_config(), NAMES),
        (cache_config(group(MambaSpec(16), NAMES)), []),
        (cache_config(group(FullAttentionSpec(16), NAMES[::-1])), NAMES),
        (
            cache_config(
                group(MambaSpec(544), NAMES[:2]),
                group(SlidingWindowSpec(32), NAMES[4:]),
                group(MLAAttentionSpec(16), NAMES[2:3]),
            ),
            [NAMES[2], *NAMES[4:]],
        ),
        (
            cache_config(
                group(
                    UniformTypeKVCacheSpecs(16, {name: AttentionSpec(16) for name in NAMES[:2]}),
                    NAMES[:2],
                ),
                group(UniformTypeKVCacheSpecs(16, {NAMES[3]: MambaSpec(16)}), NAMES[3:4]),
            ),
            NAMES[:2],
        ),
        (cache_config(group(FullAttentionSpec(16), ["model.layers.99.elsewhere"])), []),
    ],
    ids=[
        "none", "no groups attribute", "groups None", "no groups", "mamba only", "caches' order",
        "hybrid", "uniform", "another rank's layer",
    ],
)  # fmt: skip
def test_attention_layers(config: object, expected: list[str]) -> None:
    assert attention_layers(caches(NAMES), config) == tuple(expected)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], (0, 0, None)),
        ([group(MambaSpec(16), NAMES)], (0, 0, None)),
        ([group(SlidingWindowSpec(32), NAMES[:1])], (0, 32, NAMES[0])),
        (
            [group(SlidingWindowSpec(32), NAMES[:2]), group(FullAttentionSpec(16), NAMES[2:])],
            (1, 16, NAMES[2]),
        ),
        (
            [
                group(MambaSpec(528), NAMES[:2]),
                group(AttentionSpec(22), NAMES[2:3]),
                group(SlidingWindowSpec(32), NAMES[3:]),
            ],
            (1, 22, NAMES[2]),
        ),
        (
            [
                group(SlidingWindowSpec(32), NAMES[:1]),
                group(UniformTypeKVCacheSpecs(16, {NAMES[1]: FullAttentionSpec(16)}), NAMES[1:2]),
            ],
            (1, 16, NAMES[1]),
        ),
    ],
    ids=["none", "mamba", "sliding only", "C10 full behind sliding", "C9 own block", "uniform"],
)
def test_reference_group(groups: list[object], expected: tuple[int, int, str | None]) -> None:
    assert reference_group(cache_config(*groups), vllm_config()) == expected


DRAFTS = [*layer_names(2, first=6), "mtp.layers.0.self_attn.attn", "draft_model.layers.3.attn"]


def test_layers_of_a_draft_model_are_not_captured() -> None:
    groups = cache_config(
        group(FullAttentionSpec(32), DRAFTS[:1]),
        group(FullAttentionSpec(16), [DRAFTS[1], *NAMES, *DRAFTS[2:]]),
    )
    config = vllm_config(layers=6, speculative=object())
    geometry = geometry_of(caches([*DRAFTS, *NAMES]), groups, config, QUERY)
    assert geometry is not None
    assert geometry.layer_names == tuple(NAMES)
    assert (geometry.group_index, geometry.engine_block_size) == (1, 16)
    assert geometry.reference_layer == NAMES[0]


def test_without_a_draft_model_every_layer_is_the_models_own() -> None:
    groups = cache_config(group(FullAttentionSpec(16), [*NAMES, *DRAFTS[:2]]))
    geometry = geometry_of(caches([*NAMES, *DRAFTS[:2]]), groups, vllm_config(layers=6), QUERY)
    assert geometry is not None
    assert len(geometry.layer_names) == 8


def test_two_layers_with_one_number_are_refused() -> None:
    names = [*NAMES, "encoder.layers.3.attn"]
    groups = cache_config(group(FullAttentionSpec(16), names))
    with pytest.raises(NotImplementedError, match=r"encoder\.layers\.3\.attn have one number"):
        geometry_of(caches(names), groups, vllm_config(), QUERY)


@pytest.mark.parametrize(
    ("name", "number"),
    [("model.layers.12.self_attn.attn", 12), ("transformer.h.0.attn", 0), ("7", 7), ("a.3.b.4", 3)],
)
def test_layer_id(name: str, number: int) -> None:
    assert layer_id(name) == number


@pytest.mark.parametrize("name", ["model.layers.attn", "attn2", "layer3.attn"])
def test_a_layer_without_a_number(name: str) -> None:
    with pytest.raises(ValueError, match="no layer number"):
        layer_id(name)


def test_geometry_of_one_rank_of_tp2_pp2() -> None:
    names = layer_names(2, first=2)
    config = vllm_config(
        heads=4, head_dim=80, dtype=torch.bfloat16, tp=2, pp=2, rank=7, revision="main"
    )
    geometry = geometry_of(
        caches(names), cache_config(group(FullAttentionSpec(528), names)), config, QUERY
    )
    assert geometry is not None
    layout = geometry.layout
    assert (layout.layer_ids, layout.first_head, layout.num_heads) == ((2, 3), 4, 4)
    assert (layout.total_heads, layout.head_dim, layout.dtype) == (8, 80, "bfloat16")
    assert (layout.tp_rank, layout.tp_size, layout.pp_rank, layout.pp_size) == (1, 2, 1, 2)
    assert (layout.model_revision, layout.hidden_dim) == ("main", 320)
    assert (geometry.layer_names, geometry.reference_layer) == (tuple(names), names[0])
    assert (geometry.engine_block_size, geometry.dtype) == (528, torch.bfloat16)
    assert geometry.device.type == "cpu"


def test_geometry_without_groups_takes_the_engines_block_size() -> None:
    geometry = geometry_of(caches(NAMES), cache_config(), vllm_config(block_size=48), QUERY)
    assert geometry is not None
    assert (geometry.engine_block_size, geometry.group_index) == (48, 0)
    assert geometry.reference_layer == NAMES[0]


def with_layers(**heads_and_size: tuple[int, int]) -> object:
    """A configuration of 2 heads of 3 whose layers i say otherwise."""
    config = vllm_config()
    layers = {name: SimpleNamespace(num_heads=2, head_size=3) for name in NAMES}
    for index, (heads, size) in heads_and_size.items():
        layers[NAMES[int(index[1:])]] = SimpleNamespace(num_heads=heads, head_size=size)
    config.compilation_config = SimpleNamespace(static_forward_context=layers)
    return config


@pytest.mark.parametrize(
    ("unlike", "index", "heads", "dim"), [({"i1": (2, 4)}, 1, 2, 4), ({"i5": (3, 3)}, 5, 3, 3)]
)
def test_c11_layers_of_each_shape_have_a_geometry_of_their_own(
    unlike: dict[str, tuple[int, int]], index: int, heads: int, dim: int
) -> None:
    groups = cache_config(group(FullAttentionSpec(16), NAMES))
    usual, other = geometries_of(caches(NAMES), groups, with_layers(**unlike), QUERY)
    assert (usual.layout.num_heads, usual.layout.head_dim) == (2, 3)
    assert usual.layer_names == tuple(name for name in NAMES if name != NAMES[index])
    layout = other.layout
    assert (layout.num_heads, layout.total_heads, layout.head_dim) == (heads, heads, dim)
    assert other.layer_names == (NAMES[index],)
    assert usual.layout.all_layer_ids == other.layout.all_layer_ids == tuple(range(6))
    assert usual.reference_layer == other.reference_layer == NAMES[0]


def one_unlike(config: Any, **fields: Any) -> Any:
    """The configuration with layers of 2 heads of 3, but for the last."""
    usual = {"num_heads": 2, "head_size": 3, "num_kv_heads": 1}
    layers = {name: SimpleNamespace(**usual) for name in NAMES}
    layers[NAMES[5]] = SimpleNamespace(**{**usual, **fields})
    config.compilation_config = SimpleNamespace(static_forward_context=layers)
    return config


def test_unlike_heads_are_divided_among_ranks_as_the_others_are() -> None:
    config = one_unlike(vllm_config(heads=2, tp=4, rank=3), num_heads=4)
    _, other = geometries_of(caches(NAMES), cache_config(), config, QUERY)
    layout = other.layout
    assert (layout.first_head, layout.num_heads, layout.total_heads) == (12, 4, 16)


def test_unlike_kv_heads_that_lie_on_several_ranks_are_refused() -> None:
    config = one_unlike(vllm_config(heads=2, tp=4, rank=3), num_kv_heads=2)
    config.model_config.get_num_kv_heads = lambda parallel: 1
    config.model_config.get_total_num_kv_heads = lambda: 2
    with pytest.raises(NotImplementedError, match=NAMES[5]):
        geometries_of(caches(NAMES), cache_config(), config, KEY)


def test_c16_mla_queries_are_as_wide_as_before_they_are_absorbed() -> None:
    mla = SimpleNamespace(
        num_heads=2,
        num_kv_heads=1,
        head_size=576,
        qk_head_dim=192,
        v_head_dim=128,
        kv_lora_rank=512,
    )
    config = vllm_config(head_dim=576)
    config.compilation_config = SimpleNamespace(static_forward_context=dict.fromkeys(NAMES, mla))
    groups = cache_config(group(MLAAttentionSpec(64), NAMES))
    queries = geometry_of(caches(NAMES), groups, config, QUERY)
    output = geometry_of(caches(NAMES), groups, config, OUTPUT)
    assert queries is not None
    assert output is not None
    assert (queries.layout.num_heads, queries.layout.head_dim) == (2, 192)
    assert (output.layout.num_heads, output.layout.head_dim) == (2, 128)
    assert geometry_of(caches(NAMES), groups, config, KEY) is None


def quantized(**changes: Any) -> Any:
    """A layer that attends with fp8 queries."""
    fields = {"num_heads": 2, "head_size": 3, "query_quant": object(), "kv_cache_dtype": "fp8"}
    return SimpleNamespace(**{**fields, "_q_scale": torch.tensor(0.5), **changes})


def test_c18_quantized_queries_keep_their_type_and_scale() -> None:
    config = vllm_config(dtype=torch.bfloat16)
    layers: dict[str, Any] = {name: quantized() for name in NAMES}
    layers[NAMES[2]] = quantized(query_quant=None)
    layers[NAMES[4]] = quantized(_q_scale=torch.tensor([2.0]))
    config.compilation_config = SimpleNamespace(static_forward_context=layers)
    fp8, plain = geometries_of(caches(NAMES), cache_config(), config, QUERY)
    assert (fp8.dtype, fp8.layout.dtype) == (torch.float8_e4m3fn, "float8_e4m3fn")
    assert fp8.layout.layer_ids == (0, 1, 3, 4, 5)
    assert fp8.layout.scales == (0.5, 0.5, 0.5, 2.0, 0.5)
    assert (plain.dtype, plain.layout.dtype) == (torch.bfloat16, "bfloat16")
    assert plain.layout.layer_scales == (1.0,)


@pytest.mark.parametrize(
    "changes", [{"_q_scale": torch.ones(2)}, {"kv_cache_dtype": "nvfp4"}], ids=["per head", "nvfp4"]
)
def test_quantized_queries_that_no_layout_can_tell_are_refused(changes: dict[str, Any]) -> None:
    config = vllm_config(dtype=torch.bfloat16)
    layers = {**{name: quantized() for name in NAMES}, NAMES[3]: quantized(**changes)}
    config.compilation_config = SimpleNamespace(static_forward_context=layers)
    with pytest.raises(NotImplementedError, match=NAMES[3]):
        geometries_of(caches(NAMES), cache_config(), config, QUERY)


def test_layers_come_in_the_models_order_whatever_the_engines() -> None:
    shuffled = [NAMES[place] for place in (3, 0, 5, 2, 1, 4)]
    geometry = geometry_of(caches(shuffled), cache_config(), vllm_config(), QUERY)
    assert geometry is not None
    assert geometry.layer_names == tuple(NAMES)


def test_encoders_and_caches_without_queries_are_no_layers() -> None:
    decoder = SimpleNamespace(num_heads=2, head_size=3, attn_type="decoder")
    assert attends(None)
    assert attends(decoder)
    assert not attends(SimpleNamespace(head_dim=128))
    for kind in ("encoder", "encoder_only", "encoder_decoder"):
        assert not attends(SimpleNamespace(num_heads=2, attn_type=kind))
    names = [*NAMES, "model.layers.0.self_attn.indexer.k_cache"]
    config = vllm_config()
    layers = {**dict.fromkeys(NAMES, decoder), names[-1]: SimpleNamespace(head_dim=128)}
    config.compilation_config = SimpleNamespace(static_forward_context=layers)
    geometry = geometry_of(caches(names), cache_config(), config, QUERY)
    assert geometry is not None
    assert geometry.layer_names == tuple(NAMES)


def test_what_is_not_captured_may_have_any_heads() -> None:
    groups = cache_config(group(FullAttentionSpec(16), NAMES[:5]))
    assert geometry_of(caches(NAMES), groups, with_layers(i0=(2, 3), i5=(9, 9)), QUERY) is not None


def test_layers_that_use_another_layers_cache() -> None:
    """Only that of an attention layer: a Mamba layer's is no reason to have queries."""
    groups = cache_config(group(MambaSpec(16), NAMES[:2]), group(FullAttentionSpec(16), NAMES[2:4]))
    layers = {
        NAMES[4]: SimpleNamespace(kv_sharing_target_layer_name=NAMES[2]),
        NAMES[5]: SimpleNamespace(kv_sharing_target_layer_name=NAMES[0]),
    }
    assert sharing_layers(caches(NAMES), groups, layers) == (NAMES[4],)
    assert sharing_layers(caches(NAMES), groups, {}) == ()
    assert sharing_layers(caches(NAMES), None, layers) == ()


def test_no_layer_no_geometry() -> None:
    assert geometry_of({}, cache_config(), vllm_config(), QUERY) is None


@pytest.mark.parametrize(
    ("engine", "chunk", "ring"),
    [(16, 256, 16), (1, 256, 1), (256, 256, 256), (528, 256, 16), (544, 256, 32), (512, 256, 256),
     (7, 256, 1), (1568, 1024, 32)],
)  # fmt: skip
def test_ring_block_size(engine: int, chunk: int, ring: int) -> None:
    assert ring_block_size(engine, chunk) == ring


def size(settings: RingSettings, chunk: int = 256, **more: int | None) -> tuple[int, int]:
    """(total, steps) for ring blocks of 16 tokens of 72 bytes."""
    names = layer_names(3)
    geometry = geometry_of(caches(names), cache_config(), vllm_config(), QUERY)
    assert geometry is not None
    assert geometry.layout.token_bytes == 3 * 2 * 3 * 4
    scheduler = vllm_config(**more).scheduler_config  # type: ignore[arg-type]
    blocks = ring_blocks(settings, geometry.layout, 16, chunk, scheduler)
    return blocks.total, blocks.steps


def test_ring_size_is_steps_and_open_chunks() -> None:
    assert size(RingSettings(), batched=500, seqs=4) == (32 * 2 + 4 * 16, 64)
    assert size(RingSettings(depth=3), batched=512, seqs=1) == (32 * 3 + 16, 96)
    assert size(RingSettings(), batched=None, seqs=1) == (512 * 2 + 16, 1024)


@pytest.mark.parametrize(("given", "blocks"), [(5, 5), (1, 1), (0, 1), (-7, 1), (10**6, 10**6)])
def test_ring_blocks_given_is_taken(given: int, blocks: int) -> None:
    assert size(RingSettings(blocks=given, max_bytes=1)) == (blocks, blocks)


def test_ring_size_keeps_the_budget_but_holds_a_chunk() -> None:
    per_block = 72 * 16
    assert size(RingSettings(max_bytes=per_block * 50 + 1)) == (50, 50)
    assert size(RingSettings(max_bytes=0)) == (16, 16)
