"""Ranks of `/status` put together to whole models."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lmcache_qclient.qcache.catalog import base_names, read_status, stored_layouts
from lmcache_qprotocol.keys import kv_rank
from lmcache_qprotocol.layout import Layout, layout_id
from tests.worker_client.qcache.engine import layout_of

NAME = "org/model##query"


def stored(layout: Layout, world_size: int = 1, rank: int = 0, name: str = NAME) -> dict[str, Any]:
    return {
        "model_name": name,
        "world_size": world_size,
        "kv_rank": kv_rank(world_size, rank),
        "layout_id": layout_id(layout).hex(),
        "layout": msgspec.to_builtins(layout),
        "chunk_size": 16,
        "chunks": 1,
        "bytes": 1,
    }


def tp(rank: int, **changes: Any) -> Layout:
    return layout_of(tp_rank=rank, tp_size=2, first_head=2 * rank, num_heads=2, **changes)


def test_one_rank() -> None:
    (layout,) = stored_layouts(read_status({"models": [stored(layout_of())]}), NAME)
    assert layout.complete
    assert (layout.layer_ids, layout.num_heads, layout.head_dim) == ((0, 1, 2), 4, 8)
    assert (layout.chunk_size, layout.missing_ranks) == (16, ())
    assert layout.family(layout.parts[0], "s").layout_id == layout_id(layout_of())


def test_tensor_and_pipeline_parallel_ranks_have_their_places() -> None:
    parts = [
        tp(tp_rank, pp_rank=pp_rank, pp_size=2, layer_ids=(2 * pp_rank, 2 * pp_rank + 1))
        for pp_rank in range(2)
        for tp_rank in range(2)
    ]
    models = [stored(part, 4, rank) for rank, part in enumerate(parts)]
    (layout,) = stored_layouts(read_status({"models": models[::-1]}), NAME)
    assert layout.complete
    assert layout.layer_ids == (0, 1, 2, 3)
    assert [(part.rank, part.layers, part.heads) for part in layout.parts] == [
        (0, (0, 2), (0, 2)),
        (1, (0, 2), (2, 4)),
        (2, (2, 4), (0, 2)),
        (3, (2, 4), (2, 4)),
    ]


def test_a_missing_rank_is_named() -> None:
    (layout,) = stored_layouts(read_status({"models": [stored(tp(1), 2, 1)]}), NAME)
    assert not layout.complete
    assert layout.missing_ranks == (0,)
    assert "[0]" in str(layout)


def test_ranks_that_overlap_are_not_complete() -> None:
    overlapping = msgspec.structs.replace(tp(1), first_head=1)
    models = [stored(tp(0), 2, 0), stored(overlapping, 2, 1)]
    (layout,) = stored_layouts(read_status({"models": models}), NAME)
    assert not layout.missing_ranks
    assert not layout.complete


def test_layouts_of_two_captures_are_two() -> None:
    models = [stored(layout_of()), stored(layout_of(layer_ids=(1, 2)))]
    layouts = stored_layouts(read_status({"models": models}), NAME)
    assert [layout.layer_ids for layout in layouts] == [(0, 1, 2), (1, 2)]


def test_complete_layouts_come_before_others() -> None:
    models = [stored(tp(1), 2, 1), stored(layout_of())]
    (layout,) = stored_layouts(read_status({"models": models}), NAME)
    assert layout.tp_size == 1


def shapes(*ids: tuple[int, ...], **changes: Any) -> list[Layout]:
    """Layouts of a rank whose layers have unlike shapes: heads of 8, 16, ..."""
    every = tuple(sorted(layer for layers in ids for layer in layers))
    return [
        layout_of(layer_ids=layers, all_layer_ids=every, head_dim=8 << place, **changes)
        for place, layers in enumerate(ids)
    ]


def test_layers_of_unlike_shapes_are_one_layout_of_several_groups() -> None:
    models = [stored(layout) for layout in shapes((0, 1, 3), (2, 4))]
    (whole,) = stored_layouts(read_status({"models": models[::-1]}), NAME)
    assert whole.complete
    assert whole.all_layer_ids == (0, 1, 2, 3, 4)
    assert [(group.layer_ids, group.head_dim) for group in whole.groups] == [
        ((0, 1, 3), 8),
        ((2, 4), 16),
    ]
    assert all(group.unlike == () for group in whole.groups)
    assert "3 layers x 4 heads x 8 bfloat16 and 2 layers x 4 heads x 16 bfloat16" in str(whole)


def test_a_rank_of_which_a_shape_is_missing_is_missing() -> None:
    one, _ = shapes((0, 1, 3), (2, 4))
    (whole,) = stored_layouts(read_status({"models": [stored(one)]}), NAME)
    assert whole.missing_ranks == (0,)
    assert not whole.complete


def test_stages_with_other_shapes_make_one_layout() -> None:
    """The first stage has layers of one shape, the second of both."""
    first = layout_of(layer_ids=(0, 1), pp_rank=0, pp_size=2)
    second = shapes((3,), (2, 4), pp_rank=1, pp_size=2)
    models = [stored(first, 2, 0), *(stored(layout, 2, 1) for layout in second)]
    (whole,) = stored_layouts(read_status({"models": models}), NAME)
    assert whole.complete
    assert [group.layer_ids for group in whole.groups] == [(0, 1, 3), (2, 4)]


def test_stages_of_two_engines_are_not_mixed() -> None:
    """The same model once in bfloat16, once in float32: two layouts, not four."""
    parts = [
        layout_of(layer_ids=(2 * rank, 2 * rank + 1), pp_rank=rank, pp_size=2, dtype=dtype)
        for dtype in ("bfloat16", "float32")
        for rank in range(2)
    ]
    models = [stored(part, 2, part.pp_rank) for part in parts]
    layouts = stored_layouts(read_status({"models": models}), NAME)
    assert [(layout.dtype, layout.layer_ids) for layout in layouts] == [
        ("bfloat16", (0, 1, 2, 3)),
        ("float32", (0, 1, 2, 3)),
    ]


def test_two_engines_of_unlike_shapes_are_not_mixed_either() -> None:
    models = [
        stored(layout)
        for dtype in ("bfloat16", "float32")
        for layout in shapes((0, 1), (2,), dtype=dtype)
    ]
    layouts = stored_layouts(read_status({"models": models}), NAME)
    assert {tuple(group.dtype for group in layout.groups) for layout in layouts} == {
        ("bfloat16", "bfloat16"),
        ("float32", "float32"),
    }


def test_a_quantized_engines_scales_are_its_layers() -> None:
    first = layout_of(layer_ids=(0, 1), pp_rank=0, pp_size=2, dtype="int8", scales=(0.5, 2.0))
    second = layout_of(layer_ids=(2,), pp_rank=1, pp_size=2, dtype="int8", scales=(4.0,))
    models = [stored(second, 2, 1), stored(first, 2, 0)]
    (layout,) = stored_layouts(read_status({"models": models}), NAME)
    assert (layout.layer_ids, layout.scales) == ((0, 1, 2), (0.5, 2.0, 4.0))


def test_an_engine_that_has_stored_nothing_yet() -> None:
    ring = {"num_layers": 3, "layout": msgspec.to_builtins(layout_of())}
    meta = {"7": {"model_name": "org/model", "world_size": 1, "q_ring_layout": ring}}
    entries = read_status({"models": [], "q_context_meta": meta})
    assert base_names(entries) == (NAME.removesuffix("##query"),)
    (layout,) = stored_layouts(entries, NAME)
    assert layout.complete
    assert layout.parts[0].kv_rank == kv_rank(1, 0)
    entries = read_status({"models": [stored(layout_of())], "q_context_meta": meta})
    assert len(entries) == 1


def test_legacy_rings_are_passed_over() -> None:
    meta = {"7": {"model_name": "m", "world_size": 1, "q_ring_layout": {"num_layers": 3}}}
    assert read_status({"q_context_meta": meta}) == ()


@pytest.mark.parametrize("status", [{"models": 3}, {"models": [{}]}, {"q_context_meta": [1]}])
def test_something_else_than_a_status(status: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not the /status"):
        read_status(status)
