"""Hypothesis strategies for every type that travels, made from the types themselves.

A new operation or field is covered without a line here; only types whose `__post_init__` ties fields together need a
strategy of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as mi

from lmcache_qprotocol.dtypes import DTYPE_BYTES
from lmcache_qprotocol.keys import KeyFamily
from lmcache_qprotocol.layout import LAYOUT_ID_BYTES, Layout
from lmcache_qprotocol.messages import ChunkQuery, RangeKey
from tests.protocol.plain_msgpack import pack

SMALL = 4
"""Most elements of a generated collection."""

plain_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=SMALL) | st.dictionaries(st.text(), inner, max_size=SMALL)
    ),
    max_leaves=6,
)
"""Anything that msgpack can carry but floats and extensions."""


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Values that are valid for a payload or result type."""
    return _of_info(mi.type_info(kind))


def _of_info(info: mi.Type) -> st.SearchStrategy[Any]:
    return _MAKERS[type(info)](info)


def _of_int(info: Any) -> st.SearchStrategy[int]:
    low = info.ge if info.ge is not None else -(1 << 63) if info.gt is None else info.gt + 1
    high = info.le if info.le is not None else (1 << 63) - 1 if info.lt is None else info.lt - 1
    return st.integers(low, high)


def _length(info: Any, most: int) -> dict[str, Any]:
    least = info.min_length or 0
    limit = most if info.max_length is None else min(info.max_length, max(most, least))
    return {"min_size": least, "max_size": limit}


def _of_struct(info: Any) -> st.SearchStrategy[Any]:
    special = _SPECIAL.get(info.cls)
    return _fields(info) if special is None else special(info)


def _fields(info: Any, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    made = {field.name: _of_info(field.type) for field in info.fields if field.name not in given}
    return st.builds(info.cls, **made, **given)


def _of_layout(info: Any) -> st.SearchStrategy[Layout]:
    heads = st.integers(1, 1 << 23)
    base = _fields(
        info,
        layer_ids=st.lists(
            st.integers(0, (1 << 24) - 1), min_size=1, max_size=SMALL, unique=True
        ).map(tuple),
        first_head=st.just(0),
        num_heads=st.just(1),
        total_heads=st.just(1 << 24),
        dtype=st.sampled_from(sorted(DTYPE_BYTES)),
        tp_rank=st.just(0),
        pp_rank=st.just(0),
        all_layer_ids=st.just(msgspec.UNSET),
        scales=st.just(msgspec.UNSET),
    )
    others = st.sets(st.integers(0, (1 << 24) - 1), max_size=SMALL)
    scale = st.floats(0, 1e6, exclude_min=True)
    return st.builds(
        lambda layout, first, count, more, scales: msgspec.structs.replace(
            layout,
            first_head=first,
            num_heads=count,
            tp_rank=layout.tp_size - 1,
            all_layer_ids=tuple(sorted(more.union(layout.layer_ids)))
            if more - set(layout.layer_ids)
            else msgspec.UNSET,
            scales=tuple(scales[: len(layout.layer_ids)]) or msgspec.UNSET,
        ),
        base,
        heads,
        heads,
        others,
        st.just([]) | st.lists(scale, min_size=SMALL, max_size=SMALL),
    )


layout_ids = st.just(b"") | st.binary(min_size=LAYOUT_ID_BYTES, max_size=LAYOUT_ID_BYTES)


def _of_range_key(info: Any) -> st.SearchStrategy[RangeKey]:
    position = st.integers(0, (1 << 31) - 1)
    return st.builds(
        lambda key, a, b: msgspec.structs.replace(key, start=min(a, b), end=max(a, b)),
        _fields(info, layout_id=layout_ids, start=st.just(0), end=st.just(0)),
        position,
        position,
    )


def _of_chunk_query(info: Any) -> st.SearchStrategy[ChunkQuery]:
    (partials,) = [field.type for field in info.fields if field.name == "partials"]
    by_place = _of_info(partials).map(
        lambda made: tuple(
            sorted({one.index: one for one in made}.values(), key=lambda one: one.index)
        )
    )
    return _fields(info, partials=by_place)


_SPECIAL: dict[type, Callable[[Any], st.SearchStrategy[Any]]] = {
    Layout: _of_layout,
    RangeKey: _of_range_key,
    ChunkQuery: _of_chunk_query,
    KeyFamily: lambda info: _fields(info, layout_id=layout_ids),
}

_MAKERS: dict[type, Callable[[Any], st.SearchStrategy[Any]]] = {
    mi.NoneType: lambda info: st.none(),
    mi.BoolType: lambda info: st.booleans(),
    mi.IntType: _of_int,
    mi.StrType: lambda info: st.text(**_length(info, 8)),
    mi.MemoryViewType: lambda info: st.binary(max_size=40).map(memoryview),
    mi.BytesType: lambda info: st.binary(**_length(info, 8)),
    mi.RawType: lambda info: plain_values.map(lambda value: msgspec.Raw(pack(value))),
    mi.ExtType: lambda info: st.builds(
        msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=20)
    ),
    mi.LiteralType: lambda info: st.sampled_from(info.values),
    mi.EnumType: lambda info: st.sampled_from(info.cls),
    mi.StructType: _of_struct,
    mi.UnionType: lambda info: st.one_of([_of_info(kind) for kind in info.types]),
    mi.TupleType: lambda info: st.tuples(*[_of_info(kind) for kind in info.item_types]),
    mi.VarTupleType: lambda info: st.lists(_of_info(info.item_type), **_length(info, SMALL)).map(
        tuple
    ),
    mi.DictType: lambda info: st.dictionaries(
        _of_info(info.key_type), _of_info(info.value_type), **_length(info, SMALL)
    ),
}
