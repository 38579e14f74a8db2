"""What `/status` says is stored, put together: entries of single ranks make layouts of whole models.

One engine with TP x PP ranks stores one kind of object per rank and shape of layers; what belongs together has
everything in common but the rank's place, its heads (TP) and its layers (PP). All ranks of one PP stage hold the same
layers, so a stage that was captured with two selections of layers makes two layouts. Layers of unlike shape (heads,
elements per head, dtype) can't stand in one tensor: each shape has a layout of its own, and one of them, the first,
has the others as `unlike`.
"""

from __future__ import annotations

import dataclasses
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
        missing_ranks: ranks of which nothing is stored, or not all shapes of their layers.
        layer_ids: global layer indices of the layer axis.
        chunk_size: tokens per chunk; 0 = the server's.
        scales: one per layer: a stored element times it is the value; empty where it is 1 for all.
        unlike: the layouts of the model's layers of other shapes.
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
    scales: tuple[float, ...] = ()
    unlike: tuple[StoredLayout, ...] = ()

    @property
    def groups(self) -> tuple[StoredLayout, ...]:
        """One layout for each shape of layers, this one's first; they have no `unlike`."""
        return (dataclasses.replace(self, unlike=()), *self.unlike)

    @property
    def all_layer_ids(self) -> tuple[int, ...]:
        """Global indices of the layers of all shapes, ascending."""
        return tuple(sorted(layer for group in self.groups for layer in group.layer_ids))

    @property
    def complete(self) -> bool:
        """Something is stored of every rank, and the ranks of every stage hold all heads."""
        return not self.missing_ranks and all(group.tiled for group in self.groups)

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
        shapes = " and ".join(
            f"{len(group.layer_ids)} layers x {group.num_heads} heads x {group.head_dim} {group.dtype}"
            for group in self.groups
        )
        return (
            f"{self.model_name}: {shapes}, TP {self.tp_size}, PP {self.pp_size}{revision}{missing}"
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


def of_one_rank(model_name: str, layout: Layout, chunk_size: int) -> StoredLayout:
    """The layout of what nobody has stored yet.

    Args:
        model_name: without a feature's suffix.
        chunk_size: the server's.

    Raises:
        ValueError: it is one rank of several.
    """
    if (layout.tp_size, layout.pp_size) != (1, 1):
        raise ValueError(
            f"a Layout says what one rank holds, and this one has TP {layout.tp_size}, PP {layout.pp_size}: "
            "pass one with all heads and layers, or a StoredLayout of the context's"
        )
    name = feature_model_name(model_name, layout.feature)
    entry = StoredEntry(
        model_name=name,
        world_size=1,
        kv_rank=kv_rank(1, 0),
        layout_id=layout_id(layout).hex(),
        layout=layout,
        chunk_size=chunk_size,
    )
    (stored,) = stored_layouts([entry], name)
    return stored


def _common(entry: StoredEntry) -> tuple[Any, ...]:
    layout = entry.layout
    return (
        entry.world_size,
        entry.chunk_size,
        layout.feature,
        layout.tp_size,
        layout.pp_size,
        layout.model_revision,
    )


Shape = tuple[int, int, str]
"""total_heads, head_dim, dtype."""


def _shape(layout: Layout) -> Shape:
    return layout.total_heads, layout.head_dim, layout.dtype


Way = tuple[StoredEntry, ...]
"""One way in which a stage is stored: entries of all its ranks and shapes."""


def _combinations(together: Sequence[StoredEntry]) -> Iterable[StoredLayout]:
    """One layout per combination of the stages' ways."""
    stages: dict[int, list[StoredEntry]] = {}
    for entry in together:
        stages.setdefault(entry.layout.pp_rank, []).append(entry)
    ways = [_ways_of(stages[pp_rank]) for pp_rank in sorted(stages)]
    combined = list(itertools.islice(itertools.product(*ways), MAX_LAYOUTS))
    return [_assemble(list(itertools.chain(*one))) for one in _coherent(combined)]


def _ways_of(stage: Sequence[StoredEntry]) -> list[Way]:
    """A way for each selection of layers, and where layers are stored in several shapes, for each choice of these."""
    selections: dict[tuple[int, ...], dict[tuple[int, ...], dict[Any, list[StoredEntry]]]] = {}
    for entry in stage:
        layout = entry.layout
        slices = selections.setdefault(layout.rank_layer_ids, {})
        variants = slices.setdefault(layout.layer_ids, {})
        variants.setdefault((_shape(layout), layout.layer_scales), []).append(entry)
    return [
        tuple(itertools.chain(*choice))
        for slices in selections.values()
        for choice in itertools.product(*(variants.values() for variants in slices.values()))
    ]


def _coherent(combined: Sequence[tuple[Way, ...]]) -> Sequence[tuple[Way, ...]]:
    """Without those that mix two engines: all of their entries have a place in others of fewer shapes or dtypes."""
    least: dict[StoredEntry, tuple[int, int]] = {}
    for stages in combined:
        for entry in itertools.chain(*stages):
            variety = _variety(stages)
            least[entry] = min(least.get(entry, variety), variety)
    return [
        stages
        for stages in combined
        if _variety(stages) <= max(least[entry] for entry in itertools.chain(*stages))
    ]


def _variety(stages: Sequence[Way]) -> tuple[int, int]:
    """How many shapes, and dtypes."""
    shapes = {_shape(entry.layout) for way in stages for entry in way}
    return len(shapes), len({dtype for *_, dtype in shapes})


def _assemble(entries: Sequence[StoredEntry]) -> StoredLayout:
    """The layouts of one engine's layers, by shape; the first has the others."""
    missing = _missing_ranks(entries)
    shapes: dict[Shape, list[StoredEntry]] = {}
    for entry in sorted(entries, key=lambda entry: (_rank(entry.layout), entry.layout.layer_ids)):
        shapes.setdefault(_shape(entry.layout), []).append(entry)
    first, *others = (_of_one_shape(alike, missing) for alike in shapes.values())
    return dataclasses.replace(first, unlike=tuple(others))


def _missing_ranks(entries: Sequence[StoredEntry]) -> tuple[int, ...]:
    """Ranks of which not all layers are stored."""
    first = entries[0].layout
    stored: dict[int, set[int]] = {}
    for entry in entries:
        stored.setdefault(_rank(entry.layout), set(entry.layout.rank_layer_ids))
    for entry in entries:
        stored[_rank(entry.layout)] -= set(entry.layout.layer_ids)
    return tuple(rank for rank in range(first.tp_size * first.pp_size) if stored.get(rank, True))


def _of_one_shape(entries: Sequence[StoredEntry], missing_ranks: tuple[int, ...]) -> StoredLayout:
    """Place every rank: stages one after the other on the layer axis, TP ranks at their first head."""
    first = entries[0].layout
    layer_ids: list[int] = []
    scales: list[float] = []
    first_layer: dict[tuple[int, tuple[int, ...]], int] = {}
    parts = []
    for entry in entries:
        layout = entry.layout
        place = layout.pp_rank, layout.layer_ids
        if place not in first_layer:
            first_layer[place] = len(layer_ids)
            layer_ids.extend(layout.layer_ids)
            scales.extend(layout.layer_scales)
        start = first_layer[place]
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
    return StoredLayout(
        model_name=entries[0].model_name,
        world_size=entries[0].world_size,
        feature=first.feature,
        chunk_size=entries[0].chunk_size,
        parts=tuple(parts),
        missing_ranks=missing_ranks,
        layer_ids=tuple(layer_ids),
        num_heads=first.total_heads,
        head_dim=first.head_dim,
        dtype=first.dtype,
        tp_size=first.tp_size,
        pp_size=first.pp_size,
        model_revision=first.model_revision,
        scales=tuple(scales) if any(scale != 1 for scale in scales) else (),
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
