"""One object: readable by safetensors alone, and accepted only as it was written."""

from __future__ import annotations

import itertools
import struct
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load as load_numpy
from safetensors.torch import load as load_torch

from lmcache_qprotocol.dtypes import DTYPE_BYTES
from lmcache_qprotocol.hashing import chunk_hash
from lmcache_qprotocol.identity import ItemIdentity
from lmcache_qprotocol.keys import KeyFamily, ObjectKey, kv_rank, salt_digest
from lmcache_qprotocol.layout import Layout, layout_id
from lmcache_qserver.tier import Corrupt
from lmcache_qserver.tier.format import (
    ALIGNMENT,
    MAX_HEADER_BYTES,
    Header,
    Proof,
    decode,
    encode,
    header_bytes,
    header_of,
    read_header,
)
from lmcache_qserver.tier.paths import address_of, name_of

CREATED = 1_800_000_000.123456
EXTRA = '{"a":[1,2,3]}'
PARENT = bytes(range(200, 232))
TOKENS = tuple(range(1000, 1008))


def layout_of(layers: tuple[int, ...] = (1, 9), dtype: str = "bfloat16", heads: int = 2) -> Layout:
    return Layout(
        feature="transfer_query",
        layer_ids=layers,
        first_head=0,
        num_heads=heads,
        total_heads=heads,
        head_dim=8,
        dtype=dtype,
        model_revision="abc",
    )


def key_of(
    layout: Layout,
    salt: str = "tenant",
    rows: tuple[int, int] | None = None,
    model: str = "org/model##query",
    chunk_hash: bytes = bytes(range(32)),
) -> ObjectKey:
    family = KeyFamily(
        model_name=model,
        world_size=1,
        kv_rank=kv_rank(1, 0),
        cache_salt=salt,
        layout_id=layout_id(layout),
    )
    return ObjectKey(family=family, chunk_hash=chunk_hash, rows=rows)


def object_of(
    layout: Layout | None = None, rows: tuple[int, int] | None = None, **options: Any
) -> tuple[ObjectKey, bytes, bytes]:
    """(key, header, data) of a chunk of 8 tokens in blocks of 4."""
    layout = layout or layout_of()
    key = key_of(layout, rows=rows)
    header = header_of(
        key, layout, 4, 8, rows or (0, 8), CREATED, start=options.pop("start", 16), **options
    )
    data = np.random.default_rng(0).integers(0, 255, header.data_bytes, np.uint8).tobytes()
    return key, encode(header, memoryview(data)), data


@cache
def small() -> tuple[ObjectKey, bytes, bytes]:
    return object_of()


def accepts(key: ObjectKey | None, head: bytes, data: bytes) -> Header:
    return decode(memoryview(head), memoryview(data), key)


def rejects(key: ObjectKey | None, whole: bytes) -> None:
    """As a reader does it: first the header's length, then the parts."""
    with pytest.raises(Corrupt):
        read(key, memoryview(whole))


def read(key: ObjectKey | None, whole: memoryview) -> Header:
    split = header_bytes(whole)
    return decode(whole[:split], whole[split:], key)


# --- what it is ---


def test_the_header_says_what_the_object_is() -> None:
    key, head, data = small()
    header = accepts(key, head, data)
    layout = layout_of()
    assert header == header_of(key, layout, 4, 8, (0, 8), CREATED, start=16)
    assert header.layout == layout
    assert header.address == address_of(key)
    assert header.address.name == name_of(key)
    assert (header.shape, header.data_bytes) == ((2, 2, 4, 16), 2 * 2 * 4 * 16 * 2)
    assert header.created == CREATED


def test_every_byte_of_the_header() -> None:
    """Frozen: objects of this form lie on people's disks."""
    _key, head, data = small()
    text = head[8:].rstrip(b" ").decode()
    parsed = msgspec.json.decode(text)
    assert len(head) == ALIGNMENT
    assert struct.unpack("<Q", head[:8]) == (ALIGNMENT - 8,)
    assert head[8 + len(text) :] == b" " * (ALIGNMENT - 8 - len(text))
    metadata = parsed["__metadata__"]
    assert metadata.pop("checksum") == CHECKSUM
    assert metadata == {
        "format": "lmcache-qserver/1",
        "key": small()[0].digest().hex(),
        "model_name": "org/model##query",
        "salt": salt_digest("tenant"),
        "world_size": "1",
        "kv_rank": "16777472",
        "chunk_hash": bytes(range(32)).hex(),
        "layout_id": layout_id(layout_of()).hex(),
        "piece": "null",
        "parent": "",
        "tokens": "[]",
        "items": "[]",
        "axes": '["block","layer","token_in_block","head_and_dim"]',
        "layout": '{"feature":"transfer_query","layer_ids":[1,9],"first_head":0,"num_heads":2,"total_heads":2,'
        '"head_dim":8,"dtype":"bfloat16","tp_rank":0,"tp_size":1,"pp_rank":0,"pp_size":1,"model_revision":"abc"}',
        "block_size": "4",
        "chunk_size": "8",
        "rows": "[0,8]",
        "token_range": "[16,24]",
        "created": "2027-01-15T08:00:00.123456+00:00",
        "extra": "{}",
    }
    assert parsed["q"] == {"dtype": "BF16", "shape": [2, 2, 4, 16], "data_offsets": [0, len(data)]}


CHECKSUM = "xxh3-64:5032d16183d89b9c"


def test_the_plain_salt_is_nowhere() -> None:
    _key, head, _data = small()
    assert b"tenant" not in head


# --- safetensors alone reads it ---


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_safetensors_reads_every_dtype(dtype: str) -> None:
    layout = layout_of(dtype=dtype)
    key, head, data = object_of(layout)
    if dtype == "bool":
        data = bytes(byte & 1 for byte in data)
        head = encode(accepts_header(head), memoryview(data))
    tensor = load_torch(head + data)["q"]
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.shape == (2, 2, 4, 16)
    assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == data
    accepts(key, head, data)


def accepts_header(head: bytes) -> Header:
    return read_header(memoryview(head))


def test_safetensors_reads_values_and_metadata_in_a_file(tmp_path: Any) -> None:
    values = np.arange(2 * 2 * 4 * 16, dtype=np.float32).reshape(2, 2, 4, 16)
    layout = layout_of(dtype="float32")
    key = key_of(layout)
    head = encode(header_of(key, layout, 4, 8, (0, 8), CREATED), values.data)
    path = tmp_path / "x.safetensors"
    path.write_bytes(head + values.tobytes())
    assert (load_numpy(path.read_bytes())["q"] == values).all()
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata()["model_name"] == "org/model##query"
        assert file.metadata()["token_range"] == "null"
        assert (file.get_slice("q")[1, 0] == values[1, 0]).all()


@pytest.mark.parametrize("layers", [1, 32, 61, 1000, 4096])
def test_data_begin_at_a_multiple_of_4096_whatever_the_header_needs(layers: int) -> None:
    layout = layout_of(tuple(range(layers)), heads=1)
    key, head, data = object_of(layout)
    assert len(head) == header_bytes(memoryview(head[:8]))
    assert len(head) % ALIGNMENT == 0
    assert (len(head) == ALIGNMENT) == (layers < 1000)
    assert accepts(key, head, data).layout == layout
    assert load_torch(head + data)["q"].shape == (2, layers, 4, 8)


def test_long_names_and_extras_fit() -> None:
    layout = layout_of()
    model = "\x01🙂" * 256
    key = key_of(layout, model=model)
    header = header_of(key, layout, 4, 8, (0, 8), CREATED, extra={"e": EXTRA * 1000, "ü": "🙂"})
    data = bytes(header.data_bytes)
    head = encode(header, memoryview(data))
    assert accepts(key, head, data).model_name == model
    assert accepts(key, head, data).extra["e"] == EXTRA * 1000
    assert load_torch(head + data)["q"].shape == header.shape
    with pytest.raises(ValueError, match="at most"):
        encode(
            header_of(key, layout, 4, 8, (0, 8), CREATED, extra={"x": "y" * MAX_HEADER_BYTES}),
            memoryview(data),
        )


@pytest.mark.parametrize(("rows", "blocks"), [((0, 4), 1), ((3, 5), 2), ((5, 6), 1), ((0, 8), 2)])
def test_pieces(rows: tuple[int, int], blocks: int) -> None:
    key, head, data = object_of(rows=rows)
    header = accepts(key, head, data)
    assert (header.piece, header.rows, header.shape[0]) == (rows, rows, blocks)
    assert b'"token_range":"[%d,%d]"' % (16 + rows[0], 16 + rows[1]) in head
    rejects(key_of(layout_of()), head + data)


def test_an_object_knows_its_tokens() -> None:
    picture = ItemIdentity("mm", "digest", 3)
    layout = layout_of()
    key = key_of(layout, chunk_hash=chunk_hash(PARENT, TOKENS, 0, [picture]))
    told: dict[str, Any] = {"parent": PARENT, "tokens": TOKENS, "items": (picture,)}
    header = header_of(key, layout, 4, 8, (0, 8), CREATED, **told)
    data = bytes(header.data_bytes)
    read = accepts(key, encode(header, memoryview(data)), data)
    assert (read.parent, read.tokens, read.items) == (PARENT, TOKENS, (picture,))
    assert read.address == address_of(key, PARENT)
    for other in (
        {"tokens": TOKENS[:-1]},
        {"tokens": (*TOKENS[:-1], 0)},
        {"items": ()},
        {"items": (ItemIdentity("mm", "digest", 4),)},
        {"items": (ItemIdentity("mm", "digest", 8),)},
        {"parent": bytes(32)},
        {"parent": b""},
    ):
        with pytest.raises(ValueError, match=r"tokens"):
            header_of(key, layout, 4, 8, (0, 8), CREATED, **(told | other))


def test_a_parent_may_be_known_without_tokens() -> None:
    layout = layout_of()
    key = key_of(layout)
    header = header_of(key, layout, 4, 8, (0, 8), CREATED, parent=PARENT)
    data = bytes(header.data_bytes)
    assert accepts(key, encode(header, memoryview(data)), data).parent == PARENT


@given(st.floats(1e9, 4e9))
def test_any_time_can_be_written(created: float) -> None:
    layout = layout_of()
    key = key_of(layout)
    header = header_of(key, layout, 4, 8, (0, 8), created)
    data = bytes(header.data_bytes)
    assert abs(accepts(key, encode(header, memoryview(data)), data).created - created) < 1e-6


# --- what the writer can't do ---


@pytest.mark.parametrize(
    "rows", [(0, 4), (0, 9), (-1, 8), (8, 8)], ids=lambda rows: f"{rows[0]}-{rows[1]}"
)
def test_rows_that_do_not_fit_the_key_are_refused(rows: tuple[int, int]) -> None:
    layout = layout_of()
    with pytest.raises(ValueError, match="rows"):
        header_of(key_of(layout), layout, 4, 8, rows, CREATED)


def test_another_layout_than_the_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="layout"):
        header_of(key_of(layout_of((1, 9))), layout_of((1, 8)), 4, 8, (0, 8), CREATED)


@pytest.mark.parametrize("nbytes", [0, 511, 513])
def test_data_of_another_length_are_refused(nbytes: int) -> None:
    layout = layout_of()
    header = header_of(key_of(layout), layout, 4, 8, (0, 8), CREATED)
    with pytest.raises(ValueError, match="make 512 bytes"):
        encode(header, memoryview(bytes(nbytes)))


# --- what a reader never accepts ---


def test_every_single_bit_of_the_whole_object() -> None:
    key, head, data = small()
    whole = bytearray(head + data)
    for bit in range(8 * len(whole)):
        whole[bit // 8] ^= 1 << bit % 8
        try:
            read(key, memoryview(whole))
        except Corrupt:
            pass
        else:
            raise AssertionError(f"bit {bit} was flipped, and the object was accepted")
        whole[bit // 8] ^= 1 << bit % 8
    accepts(key, bytes(whole[: len(head)]), bytes(whole[len(head) :]))


def test_every_length_but_the_right_one() -> None:
    key, head, data = small()
    whole = head + data
    for length in range(len(whole)):
        rejects(key, whole[:length])
    rejects(key, whole + b"\0")
    rejects(key, whole + whole)


def test_layers_1_and_9_never_pass_for_1_and_8() -> None:
    key, head, data = small()
    assert head.count(b"[1,9]") == 1
    rejects(key, head.replace(b"[1,9]", b"[1,8]") + data)
    rejects(None, head.replace(b"[1,9]", b"[1,8]") + data)


@settings(deadline=None)
@given(st.data())
def test_damage_of_any_kind(data: st.DataObject) -> None:
    key, head, body = small()
    whole = bytearray(head + body)
    before = bytes(whole)
    start = data.draw(st.integers(0, len(whole) - 1))
    kind = data.draw(st.sampled_from(["zeros", "noise", "move", "cut out", "put in"]))
    length = data.draw(st.integers(1, 600))
    if kind == "zeros":
        whole[start : start + length] = bytes(len(whole[start : start + length]))
    elif kind == "noise":
        noise = data.draw(st.binary(min_size=length, max_size=length))
        whole[start : start + length] = noise[: len(whole[start : start + length])]
    elif kind == "move":
        other = data.draw(st.integers(0, len(whole) - 1))
        part = whole[start : start + length]
        whole[other : other + len(part)] = part
    elif kind == "cut out":
        del whole[start : start + length]
    else:
        whole[start:start] = bytes(length)
    if bytes(whole) != before:
        rejects(key, bytes(whole))


@given(st.binary(max_size=300))
def test_any_bytes_are_refused(noise: bytes) -> None:
    rejects(None, noise)
    rejects(None, struct.pack("<Q", 4088) + noise.ljust(4088) + b"x")
    with pytest.raises(Corrupt):
        read_header(memoryview(noise))


@pytest.mark.parametrize(
    "length", [0, 4087, 4089, 8184 - 1, MAX_HEADER_BYTES * 2 - 8, 2**64 - 8, 2**64 - 1]
)
def test_impossible_header_lengths(length: int) -> None:
    _key, head, data = small()
    rejects(None, struct.pack("<Q", length) + head[8:] + data)


def test_another_keys_object() -> None:
    key, head, data = small()
    others = [
        key_of(layout_of(), salt="tenant2"),
        key_of(layout_of(), salt=""),
        key_of(layout_of(), model="org/model2##query"),
        key_of(layout_of(), chunk_hash=bytes(32)),
        key_of(layout_of(), rows=(0, 8)),
        key_of(layout_of((1, 8))),
        key_of(layout_of(dtype="float16")),
    ]
    for other in others:
        with pytest.raises(Corrupt, match="another key"):
            accepts(other, head, data)
    assert accepts(None, head, data) == accepts(key, head, data)


CHANGES = {
    b'"rows":"[0,8]"': b'"rows":"[0,7]"',
    b'"block_size":"4"': b'"block_size":"0"',
    b'"chunk_size":"8"': b'"chunk_size":"9"',
    b'"shape":[2,2,4,16]': b'"shape":[2,2,8,8] ',
    b'"dtype":"BF16"': b'"dtype":"F16" ',
    b'"piece":"null"': b'"piece":"None"',
    b"transfer_query": b"transfer_quert",
    b"+00:00": b"+01:00",
    b'"world_size":"1"': b'"world_size":"2"',
}


@pytest.mark.parametrize("old", CHANGES)
def test_a_header_that_contradicts_itself_is_refused_even_with_a_right_checksum(old: bytes) -> None:
    """Somebody else's writer, or a bug of ours."""
    key, head, data = small()
    assert old in head
    rejects(key, _with_checksum(head.replace(old, CHANGES[old]), data) + data)


def test_another_keys_digest_is_refused_even_where_all_that_is_in_words_agrees() -> None:
    """Salts whose digests collide, say."""
    key, head, data = small()
    digest = key.digest().hex().encode()
    other = head.replace(digest, digest[::-1])
    assert other != head
    rejects(key, _with_checksum(other, data) + data)


def test_data_of_another_length_are_told_as_such() -> None:
    key, head, data = small()
    with pytest.raises(Corrupt, match="511 bytes of data instead of 512"):
        accepts(key, head, data[:-1])


@settings(deadline=None)
@given(st.lists(st.integers(0, 512), max_size=6))
def test_data_may_come_in_any_stretches(cuts: list[int]) -> None:
    key, head, data = small()
    proof = Proof(memoryview(head), key)
    places = [0, *sorted(cuts), len(data)]
    for a, b in itertools.pairwise(places):
        proof.update(memoryview(data)[a:b])
    assert proof.finish() == accepts(key, head, data)
    with pytest.raises(Corrupt, match="bytes of data instead of"):
        proof.update(memoryview(b"x"))


def test_a_proof_knows_whose_object_it_must_be() -> None:
    _key, head, data = small()
    proof = Proof(memoryview(head), key_of(layout_of(), rows=(0, 4)))
    proof.update(memoryview(data))
    with pytest.raises(Corrupt, match="another key's"):
        proof.finish()


def _with_checksum(head: bytes, data: bytes) -> bytes:
    from lmcache_qserver.tier import format as module

    blank = module._blanked(head)
    return (
        blank[: module._DIGITS.start]
        + module._checksum(blank, memoryview(data))
        + blank[module._DIGITS.stop :]
    )


def test_the_checksum_is_over_the_header_with_blank_digits_and_the_data() -> None:
    import xxhash

    _key, head, data = small()
    digits = head.index(b"xxh3-64:") + len(b"xxh3-64:")
    blank = head[:digits] + b" " * 16 + head[digits + 16 :]
    assert head[digits : digits + 16].decode() == xxhash.xxh3_64_hexdigest(blank + data)
