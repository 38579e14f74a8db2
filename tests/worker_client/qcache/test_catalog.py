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
