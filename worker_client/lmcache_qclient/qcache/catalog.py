"""What `/status` says is stored, put together: entries of single ranks make layouts of whole models.

One engine with TP x PP ranks stores one kind of object per rank; what belongs together has everything in common but the
rank's place, its heads (TP) and its layers (PP). All ranks of one PP stage hold the same layers, so a stage that was
captured with two selections of layers makes two layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from lmcache_qprotocol.keys import FEATURE_SUFFIX, KeyFamily, feature_model_name, kv_rank
from lmcache_qprotocol.layout import Layout, layout_id

MAX_LAYOUTS = 64
"""Per model; a limit on combinations of layer selections over PP stages."""


class StoredEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's objects, as in the `models` list of `/status`.

    Attributes:
        model_name: with the feature's suffix.
        layout_id: hexadecimal.
        chunk_size: tokens per chunk; 0 when only the server's own is known.
    """

    model_name: str
    world_size: Annotated[int, Meta(ge=1, le=255)]
    kv_rank: Annotated[int, Meta(ge=0, lt=1 << 32)]
    layout_id: str
    layout: Layout
    chunk_size: Annotated[int, Meta(ge=0)] = 0
    chunks: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class RankPart:
    """What one rank holds, and where it goes in the tensor of the whole model.

    Attributes:
        rank: pp_rank * tp_size + tp_rank.
        layers, heads: [from, to) on the layer and the head axis of the whole.
    """

    rank: int
    kv_rank: int
    layout_id: bytes
    layout: Layout
    layers: tuple[int, int]
    heads: tuple[int, int]


@dataclass(frozen=True)
class StoredLayout:
    """One way in which a model's tensors are stored; pass it as `layout=` where there are several.

    Attributes:
        model_name: with the feature's suffix.
        parts: the ranks that are known, in order.
        missing_ranks: ranks of which nothing is stored.
        layer_ids: global layer indices of the layer axis.
        chunk_size: tokens per chunk; 0 = the server's.
    """

    model_name: str
    world_size: int
    feature: str
    chunk_size: int
    parts: tuple[RankPart, ...]
    missing_ranks: tuple[int, ...]
    layer_ids: tuple[int, ...]
    num_heads: int
    head_dim: int
    dtype: str
    tp_size: int
    pp_size: int
    model_revision: str

    @property
    def complete(self) -> bool:
        """Something is stored of every rank, and the ranks of every stage hold all heads."""
        return not self.missing_ranks and self.tiled

    @property
    def tiled(self) -> bool:
        """The heads of the known ranks, of every stage of them, are all heads without gap or overlap."""
        stages: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for part in self.parts:
            stages.setdefault(part.layers, []).append(part.heads)
        return all(_tiles(heads, self.num_heads) for heads in stages.values())

    def family(self, part: RankPart, cache_salt: str) -> KeyFamily:
        """The key family of one rank's objects."""
        return KeyFamily(
            model_name=self.model_name,
            world_size=self.world_size,
            kv_rank=part.kv_rank,
            cache_salt=cache_salt,
            layout_id=part.layout_id,
        )

    def __str__(self) -> str:
        missing = f", ranks {list(self.missing_ranks)} missing" if self.missing_ranks else ""
        revision = f", revision {self.model_revision}" if self.model_revision else ""
        return (
            f"{self.model_name}: {len(self.layer_ids)} layers x {self.num_heads} heads x {self.head_dim} "
            f"{self.dtype}, TP {self.tp_size}, PP {self.pp_size}{revision}{missing}"
        )


def read_status(status: dict[str, Any]) -> tuple[StoredEntry, ...]:
    """Entries of what is stored, and behind them what registered engines are about to store.

    Raises:
        ValueError: this is no `/status` of an lmcache-qserver.
    """
    try:
        entries = list(msgspec.convert(status.get("models", ()), tuple[StoredEntry, ...]))
        known = {(entry.model_name, entry.kv_rank, entry.layout_id) for entry in entries}
        for instance in (status.get("q_context_meta") or {}).values():
            entry = _announced(instance)
            if (
                entry is not None
                and (entry.model_name, entry.kv_rank, entry.layout_id) not in known
            ):
                known.add((entry.model_name, entry.kv_rank, entry.layout_id))
                entries.append(entry)
    except (msgspec.MsgspecError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the answer is not the /status of an lmcache-qserver: {error}") from None
    return tuple(entries)


def _announced(instance: dict[str, Any]) -> StoredEntry | None:
    """An entry of `q_context_meta`; None for a legacy ring, which says nothing of its layout."""
    described = instance.get("q_ring_layout")
    if not isinstance(described, dict):
        return None
    layout_of_ring = described.get("layout", described)
    if not isinstance(layout_of_ring, dict) or "layer_ids" not in layout_of_ring:
        return None
    layout = msgspec.convert(layout_of_ring, Layout)
    name, suffix = instance["model_name"], FEATURE_SUFFIX.get(layout.feature, "")
    return StoredEntry(
        model_name=name if name.endswith(suffix) else feature_model_name(name, layout.feature),
        world_size=instance["world_size"],
        kv_rank=instance.get("kv_rank", kv_rank(instance["world_size"], _rank(layout))),
        layout_id=layout_id(layout).hex(),
        layout=layout,
        chunk_size=described.get("chunk_size", 0),
    )


def base_name(model_name: str) -> str:
    """As the engine calls the model, without a feature's suffix."""
    for suffix in FEATURE_SUFFIX.values():
        if model_name.endswith(suffix):
            return model_name.removesuffix(suffix)
    return model_name


def base_names(entries: Iterable[StoredEntry]) -> tuple[str, ...]:
    """Names of all models, without suffix, sorted."""
    return tuple(sorted({base_name(entry.model_name) for entry in entries}))


def stored_layouts(entries: Iterable[StoredEntry], model_name: str) -> tuple[StoredLayout, ...]:
    """The layouts of one model: complete ones if there are any, else the incomplete ones.

    Args:
        model_name: with the feature's suffix.
    """
    together: dict[tuple[Any, ...], list[StoredEntry]] = {}
    for entry in entries:
        if entry.model_name == model_name:
            together.setdefault(_common(entry), []).append(entry)
    layouts = [layout for group in together.values() for layout in _combinations(group)]
    complete = [layout for layout in layouts if layout.complete]
    return tuple(complete or layouts)


def _common(entry: StoredEntry) -> tuple[Any, ...]:
    layout = entry.layout
    return (
        entry.world_size,
        entry.chunk_size,
        layout.feature,
        layout.total_heads,
        layout.head_dim,
        layout.dtype,
        layout.tp_size,
        layout.pp_size,
        layout.model_revision,
    )


def _combinations(group: Sequence[StoredEntry]) -> Iterable[StoredLayout]:
    """One layout per combination of the stages' layer selections."""
    stages: dict[int, dict[tuple[int, ...], list[StoredEntry]]] = {}
    for entry in group:
        stage = stages.setdefault(entry.layout.pp_rank, {})
        stage.setdefault(entry.layout.layer_ids, []).append(entry)
    selections = [list(stages[pp_rank].values()) for pp_rank in sorted(stages)]
    for combination in itertools.islice(itertools.product(*selections), MAX_LAYOUTS):
        yield _assemble([entry for stage in combination for entry in stage])


def _assemble(entries: Sequence[StoredEntry]) -> StoredLayout:
    """Place every rank: stages one after the other on the layer axis, TP ranks at their first head."""
    first = entries[0].layout
    layer_ids: list[int] = []
    first_layer: dict[int, int] = {}
    parts = []
    for entry in sorted(entries, key=lambda entry: _rank(entry.layout)):
        layout = entry.layout
        if layout.pp_rank not in first_layer:
            first_layer[layout.pp_rank] = len(layer_ids)
            layer_ids.extend(layout.layer_ids)
        start = first_layer[layout.pp_rank]
        parts.append(
            RankPart(
                rank=_rank(layout),
                kv_rank=entry.kv_rank,
                layout_id=bytes.fromhex(entry.layout_id),
                layout=layout,
                layers=(start, start + len(layout.layer_ids)),
                heads=(layout.first_head, layout.first_head + layout.num_heads),
            )
        )
    present = {part.rank for part in parts}
    return StoredLayout(
        model_name=entries[0].model_name,
        world_size=entries[0].world_size,
        feature=first.feature,
        chunk_size=entries[0].chunk_size,
        parts=tuple(parts),
        missing_ranks=tuple(
            rank for rank in range(first.tp_size * first.pp_size) if rank not in present
        ),
        layer_ids=tuple(layer_ids),
        num_heads=first.total_heads,
        head_dim=first.head_dim,
        dtype=first.dtype,
        tp_size=first.tp_size,
        pp_size=first.pp_size,
        model_revision=first.model_revision,
    )


def _tiles(ranges: Iterable[tuple[int, int]], size: int) -> bool:
    """Ranks that hold the same heads (more ranks than KV heads) count once."""
    end = 0
    for start, stop in sorted(set(ranges)):
        if start != end:
            return False
        end = stop
    return end == size


def _rank(layout: Layout) -> int:
    return layout.pp_rank * layout.tp_size + layout.tp_rank
