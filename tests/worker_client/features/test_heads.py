"""The heads that a rank has of each feature, by what the engine says of itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmcache_qclient.capture.geometry import geometries_of
from lmcache_qclient.capture.layer_selection import parse_layers
from lmcache_qclient.capture.tensor_kind import Heads
from lmcache_qclient.features.registry import FEATURE_REGISTRY
from tests.worker_client.capture.fake_vllm import (
    FullAttentionSpec,
    cache_config,
    caches,
    group,
    layer_names,
    vllm_config,
)

LAYER = SimpleNamespace(head_size_v=5)
NAMES = layer_names(2)


def heads(feature: str, rank: int, *, tp: int, of_model: int = 8, kv: int = 4) -> Heads:
    config = vllm_config(heads=of_model // tp, kv_heads=kv, head_dim=3, tp=tp, rank=rank)
    return FEATURE_REGISTRY[f"transfer_{feature}"].heads(config, LAYER)


@pytest.mark.parametrize(
    ("feature", "expected"),
    [
        ("query", Heads(4, 4, 8, 3)),
        ("key", Heads(2, 2, 4, 3)),
        ("value", Heads(2, 2, 4, 5)),
        ("attention_output", Heads(4, 4, 8, 5)),
    ],
)
def test_the_second_of_two_ranks(feature: str, expected: Heads) -> None:
    assert heads(feature, 1, tp=2) == expected


def test_c20_eight_ranks_with_four_kv_heads() -> None:
    assert [heads("key", rank, tp=8)[:3] for rank in range(8)] == [
        (0, 1, 4),
        (0, 1, 4),
        (1, 1, 4),
        (1, 1, 4),
        (2, 1, 4),
        (2, 1, 4),
        (3, 1, 4),
        (3, 1, 4),
    ]
    assert [heads("query", rank, tp=8)[:3] for rank in range(8)] == [
        (rank, 1, 8) for rank in range(8)
    ]


def test_one_kv_head_for_all() -> None:
    assert {heads("value", rank, tp=4, kv=1)[:3] for rank in range(4)} == {(0, 1, 1)}


@pytest.mark.parametrize("feature", ["key", "value", "attention_output"])
def test_layers_that_say_otherwise_are_a_group_of_their_own(feature: str) -> None:
    good = SimpleNamespace(num_heads=2, num_kv_heads=1, head_size=3, head_size_v=3)
    bad = SimpleNamespace(num_heads=4, num_kv_heads=2, head_size=3, head_size_v=3)
    config = vllm_config(kv_heads=1, attention=dict(zip(NAMES, (good, bad), strict=True)))
    groups = cache_config(group(FullAttentionSpec(16), NAMES))
    kind = FEATURE_REGISTRY[f"transfer_{feature}"]
    usual, other = geometries_of(caches(NAMES), groups, config, kind)
    assert (usual.layer_names, other.layer_names) == ((NAMES[0],), (NAMES[1],))
    assert other.layout.num_heads == 2 * usual.layout.num_heads


def test_a_stage_without_a_selected_layer_stops_the_start() -> None:
    config = vllm_config(pp=2, rank=1, layers=4)
    groups = cache_config(group(FullAttentionSpec(16), NAMES))
    kind = FEATURE_REGISTRY["transfer_query"]
    with pytest.raises(
        ValueError, match=r"lmcache\.q\.layers=2,3 selects none.*at least one of each"
    ):
        geometries_of(caches(NAMES), groups, config, kind, parse_layers("2,3"))
    (found,) = geometries_of(caches(NAMES), groups, config, kind, parse_layers("1,3"))
    assert found.layout.layer_ids == (1,)
