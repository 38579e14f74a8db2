"""Layout ids, object keys, salts and stamps: different things have different names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lmcache_qprotocol.keys import (
    FEATURE_SUFFIX,
    KeyFamily,
    ObjectKey,
    feature_model_name,
    kv_rank,
    salt_digest,
)
from lmcache_qprotocol.layout import LAYOUT_ID_BYTES, Layout, layout_id
from lmcache_qprotocol.limits import MAX_POSITION
from lmcache_qprotocol.stamps import EMPTY, NONCE_LIMIT, first_stamp
from tests.protocol.strategies import of_type

LAYOUT = Layout(
    feature="transfer_query",
    layer_ids=(0, 1, 2),
    first_head=8,
    num_heads=4,
    total_heads=16,
    head_dim=64,
    dtype="bfloat16",
    tp_rank=1,
    tp_size=4,
    pp_rank=1,
    pp_size=4,
)
OTHER_LAYOUT: dict[str, Any] = {
    "feature": "transfer_key",
    "layer_ids": (0, 2, 1),
    "first_head": 4,
    "num_heads": 8,
    "total_heads": 32,
    "head_dim": 128,
    "dtype": "float16",
    "tp_rank": 2,
    "tp_size": 2,
    "pp_rank": 2,
    "pp_size": 2,
    "model_revision": "main",
    "all_layer_ids": (0, 1, 2, 3),
    "scales": (1.0, 0.5, 2.0),
}
FAMILY = KeyFamily(model_name="m##query", world_size=2, kv_rank=kv_rank(2, 0), cache_salt="a")
OTHER_FAMILY: dict[str, Any] = {
    "model_name": "m",
    "world_size": 1,
    "kv_rank": kv_rank(2, 1),
    "cache_salt": "b",
    "layout_id": b"\x01" * LAYOUT_ID_BYTES,
}
KEY = ObjectKey(family=FAMILY, chunk_hash=b"\x01" * 32)

layouts = of_type(Layout)
families = of_type(KeyFamily)
row_ranges = st.lists(st.integers(0, MAX_POSITION), min_size=2, max_size=2, unique=True).map(
    lambda pair: (min(pair), max(pair))
)
keys = st.builds(
    lambda family, digest, rows: ObjectKey(family=family, chunk_hash=digest, rows=rows),
    families,
    st.binary(min_size=32, max_size=32),
    st.none() | row_ranges,
)


@pytest.mark.parametrize("field", Layout.__struct_fields__)
def test_a_layout_id_changes_with_every_field(field: str) -> None:
    changed = msgspec.structs.replace(LAYOUT, **{field: OTHER_LAYOUT[field]})
    assert layout_id(changed) != layout_id(LAYOUT)


@given(layouts, layouts)
def test_layout_ids_are_equal_when_layouts_are(one: Layout, other: Layout) -> None:
    assert len(layout_id(one)) == LAYOUT_ID_BYTES
    assert layout_id(msgspec.structs.replace(one)) == layout_id(one)
    assert (layout_id(one) == layout_id(other)) == (one == other)


@pytest.mark.parametrize(
    "changes",
    [
        {"all_layer_ids": ()},
        {"all_layer_ids": (0, 1, 2)},
        {"all_layer_ids": (0, 1, 3, 4)},
        {"all_layer_ids": (2, 1, 0, 3)},
        {"all_layer_ids": (0, 1, 2, 3, 3)},
        {"scales": ()},
        {"scales": (1.0, 1.0)},
        {"scales": (1.0, 1.0, float("inf"))},
    ],
)
def test_a_layout_that_contradicts_itself(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes)).rstrip("s")):
        msgspec.structs.replace(LAYOUT, **changes)


@given(layouts)
def test_a_layout_id_survives_the_wire(layout: Layout) -> None:
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout)
    assert layout_id(travelled) == layout_id(layout)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bf16"},
        {"layer_ids": (1, 1)},
        {"first_head": 13},
        {"tp_rank": 4},
        {"pp_rank": 4},
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        msgspec.structs.replace(LAYOUT, **change)


def test_sizes_of_a_layout() -> None:
    assert LAYOUT.hidden_dim == 4 * 64
    assert LAYOUT.token_bytes == 3 * 4 * 64 * 2


@pytest.mark.parametrize("field", KeyFamily.__struct_fields__)
def test_an_object_digest_changes_with_every_field_of_the_family(field: str) -> None:
    family = msgspec.structs.replace(FAMILY, **{field: OTHER_FAMILY[field]})
    assert msgspec.structs.replace(KEY, family=family).digest() != KEY.digest()


@pytest.mark.parametrize(
    "change", [{"chunk_hash": b"\x02" * 32}, {"rows": (0, 16)}, {"rows": (1, 16)}, {"rows": (0, 1)}]
)
def test_an_object_digest_changes_with_hash_and_rows(change: dict[str, Any]) -> None:
    assert msgspec.structs.replace(KEY, **change).digest() != KEY.digest()


@given(keys, keys)
def test_object_digests_are_equal_when_keys_are(one: ObjectKey, other: ObjectKey) -> None:
    assert len(one.digest()) == 32
    assert (one.digest() == other.digest()) == (one == other)


@given(st.text(), st.text())
def test_no_two_fields_can_trade_characters(name: str, salt: str) -> None:
    assume(name and salt)
    family = msgspec.structs.replace(FAMILY, model_name=name + salt, cache_salt="")
    traded = msgspec.structs.replace(FAMILY, model_name=name, cache_salt=salt)
    glued, apart = (ObjectKey(family=f, chunk_hash=b"\x01" * 32) for f in (family, traded))
    assert glued.digest() != apart.digest()


@pytest.mark.parametrize("rows", [(3, 3), (4, 3)])
def test_rows_must_not_be_empty(rows: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="rows"):
        ObjectKey(family=FAMILY, chunk_hash=b"\x01" * 32, rows=rows)


@pytest.mark.parametrize("length", [1, 15, 17])
def test_a_layout_id_has_its_length_or_none(length: int) -> None:
    with pytest.raises(ValueError, match="layout id"):
        msgspec.structs.replace(FAMILY, layout_id=b"\x00" * length)


@given(st.text(), st.text())
def test_a_salt_digest_may_stand_in_a_path_and_tells_salts_apart(one: str, other: str) -> None:
    assert set(salt_digest(one)) <= set("0123456789abcdef")
    assert len(salt_digest(one)) == (32 if one else 0)
    assert (salt_digest(one) == salt_digest(other)) == (one == other)


@given(st.integers(1, 255), st.data())
def test_kv_rank_holds_world_size_and_rank_a_byte_each(world: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world - 1))
    assert kv_rank(world, rank).to_bytes(4, "big") == bytes([world, rank, world, rank])


@pytest.mark.parametrize(("world", "rank"), [(0, 0), (256, 0), (1, 1), (2, -1)])
def test_kv_rank_refuses_what_does_not_fit(world: int, rank: int) -> None:
    with pytest.raises(ValueError, match="world_size"):
        kv_rank(world, rank)


def test_feature_names() -> None:
    assert feature_model_name("org/model", "transfer_query") == "org/model##query"
    assert len(set(FEATURE_SUFFIX.values())) == len(FEATURE_SUFFIX)
    with pytest.raises(ValueError, match="transfer_query"):
        feature_model_name("org/model", "transfer_nothing")


nonces = st.integers(1, NONCE_LIMIT - 1)
positions = st.integers(0, MAX_POSITION)


@given(nonces, positions, nonces, positions)
def test_stamps_name_one_nonce_and_one_position(n1: int, p1: int, n2: int, p2: int) -> None:
    assert (first_stamp(n1, p1) == first_stamp(n2, p2)) == ((n1, p1) == (n2, p2))
    assert EMPTY < 0 < first_stamp(n1, p1) < 1 << 63
    assert divmod(first_stamp(n1, p1), 1 << 32) == (n1, p1)


@given(nonces, st.integers(0, MAX_POSITION - 300), st.integers(0, 300))
def test_stamps_count_up_with_the_position(nonce: int, position: int, step: int) -> None:
    assert first_stamp(nonce, position) + step == first_stamp(nonce, position + step)


@pytest.mark.parametrize(
    ("nonce", "position"),
    [(0, 0), (-1, 0), (NONCE_LIMIT, 0), (1, -1), (1, MAX_POSITION + 1), (1, 1 << 32)],
)
def test_stamps_out_of_range_are_refused(nonce: int, position: int) -> None:
    with pytest.raises(ValueError, match="must be in"):
        first_stamp(nonce, position)
