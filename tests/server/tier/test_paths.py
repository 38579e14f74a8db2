"""Names of objects: reversible, safe whatever a client sends, and never shared by two keys."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_qprotocol.keys import KeyFamily, ObjectKey, kv_rank, salt_digest
from lmcache_qserver.tier.chunk_store import MAX_SEGMENT_CHARS, check_name, kept_name, name_before
from lmcache_qserver.tier.paths import (
    address_of,
    model_prefix,
    name_of,
    parse_name,
    quote,
    salt_segment,
    unquote,
)

SALTS = ["", "_default", "@", "/", "..", "🙂", "s" * 300, "nosalt", "\x00", "a/../../b", "0" * 32]
"""C24, and some more."""
MODELS = [
    "org/model##query",
    "../../etc/passwd",
    "..",
    ".",
    ".tmp",
    "/",
    "//",
    "a\x00b",
    "a\nb",
    "~root",
    "=2F",
    "=2E=2E",
    "%2e%2e%2f",
    "C:\\model",
    "модель",
    "🙂" * 512,
    "m" * 512,
    "m" * 511 + "n",
    "v1",
    " ",
    "a b",
    "Org/Model##query",
    "legacy",
]


def key_of(
    model: str = "org/model##query",
    salt: str = "",
    rows: tuple[int, int] | None = None,
    layout_id: bytes = bytes(range(16)),
    chunk_hash: bytes = bytes(range(32)),
    world_size: int = 2,
    rank: int = 1,
) -> ObjectKey:
    family = KeyFamily(
        model_name=model,
        world_size=world_size,
        kv_rank=kv_rank(world_size, rank),
        cache_salt=salt,
        layout_id=layout_id,
    )
    return ObjectKey(family=family, chunk_hash=chunk_hash, rows=rows)


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=512)
keys = st.builds(
    key_of,
    model=names,
    salt=st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
    rows=st.none() | st.tuples(st.integers(0, 255), st.integers(256, (1 << 31) - 1)),
    layout_id=st.just(b"") | st.binary(min_size=16, max_size=16),
    chunk_hash=st.binary(min_size=32, max_size=32),
    world_size=st.integers(2, 255),
    rank=st.integers(0, 1),
)


def test_a_name_as_it_stands_in_the_documentation() -> None:
    assert name_of(key_of(chunk_hash=b"\xab" * 32)) == (
        f"v1/org=2Fmodel=23=23query/000102030405060708090a0b0c0d0e0f-w2-r02010201/nosalt/ab/{'0' * 64}-{'ab' * 32}"
        ".safetensors"
    )
    piece = key_of(salt="tenant", rows=(16, 100), layout_id=b"")
    assert name_of(piece, b"\xcd" * 32) == (
        f"v1/org=2Fmodel=23=23query/legacy-w2-r02010201/{salt_digest('tenant')}/cd/{'cd' * 32}-"
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f.16-100.safetensors"
    )


@pytest.mark.parametrize("salt", SALTS, ids=ascii)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: ascii(model)[:20])
def test_whatever_a_client_sends_is_a_safe_name(model: str, salt: str) -> None:
    name = check_name(name_of(key_of(model, salt)))
    segments = name.split("/")
    assert len(segments) == 6
    assert all(re.fullmatch(r"[A-Za-z0-9_=~-][A-Za-z0-9._=~-]*", part) for part in segments)
    assert max(map(len, segments)) <= MAX_SEGMENT_CHARS
    assert not salt or salt not in segments


def test_the_longest_name_can_be_kept_in_quarantine_and_tells_what_it_was() -> None:
    longest = name_of(
        key_of("m" * 500, "tenant", rows=(2**31 - 2, 2**31 - 1), world_size=255, rank=254),
        b"\xcd" * 32,
    )
    kept = kept_name(longest)
    assert kept != kept_name(longest)
    assert name_before(kept) == longest
    assert parse_name(longest) is not None
    assert kept.startswith(f"quarantine/{longest.rpartition('/')[0]}/")


def test_no_two_of_them_share_a_name() -> None:
    keys = [key_of(model, salt) for model in MODELS for salt in SALTS]
    assert len({name_of(key) for key in keys}) == len(keys)


parents = st.just(b"") | st.binary(min_size=32, max_size=32).filter(any)


@given(keys, parents)
def test_a_name_tells_the_key_but_the_plain_salt(key: ObjectKey, parent: bytes) -> None:
    name = check_name(name_of(key, parent))
    address = parse_name(name)
    assert address == address_of(key, parent)
    assert address is not None
    assert address.name == name
    assert address.model_name in (key.family.model_name, None)
    assert address.salt == salt_digest(key.family.cache_salt)
    assert name.startswith(model_prefix(key.family.model_name) + "/")
    assert name.startswith(address.folder + "/")
    assert address.folder.startswith(address.salt_folder + "/")
    assert address.salt_folder == f"{address.layout_folder}/{salt_segment(key.family.cache_salt)}"


def test_what_hangs_on_one_parent_lies_in_one_folder() -> None:
    parent = bytes(range(100, 132))
    whole, piece = key_of(chunk_hash=b"\x01" * 32), key_of(chunk_hash=b"\x02" * 32, rows=(0, 9))
    assert address_of(whole, parent).folder == address_of(piece, parent).folder


def test_a_parent_of_nothing_but_zeros_is_an_unknown_one() -> None:
    assert name_of(key_of(), bytes(32)) == name_of(key_of())


@given(keys, keys)
def test_other_keys_have_other_names(one: ObjectKey, other: ObjectKey) -> None:
    assert (name_of(one) == name_of(other)) == (one == other)


@given(names)
def test_quoting_is_reversible_or_says_that_it_is_not(model: str) -> None:
    quoted = quote(model)
    assert len(quoted) <= 96
    assert unquote(quoted) in (model, None)
    assert quote(model) != quote(model + "x")


def test_no_name_at_all_is_no_reason_to_fail() -> None:
    """A header may say anything: what it says is compared with a name, and is not that."""
    assert quote("") == ""


def test_names_of_ordinary_length_are_reversible() -> None:
    for model in ("meta-llama/Llama-3.1-405B-Instruct-FP8##query", "org/модель##query"):
        assert unquote(quote(model)) == model


NAME = name_of(key_of(salt="x", rows=(1, 20)), bytes(31) + b"x")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "v1",
        NAME.upper(),
        NAME + "x",
        "x" + NAME,
        NAME.replace("v1/", "v2/"),
        NAME.replace("/00/", "/01/"),
        NAME.replace(".1-20.", ".01-20."),
        NAME.replace(".1-20.", ".20-1."),
        NAME.replace(".1-20.", ".20-20."),
        NAME.replace("-w2-", "-w02-"),
        NAME.replace("-w2-", "-w0-"),
        NAME.replace("=2F", "=2f"),
        NAME.replace("=2F", "/"),
        NAME.replace("=2F", "=41"),
        NAME.replace("=2F", "="),
        NAME.replace("=2F", "=FF"),
        NAME.replace("=2F", "~"),
        NAME.replace("org", "é"),
        NAME.replace("org=2F", ""[:0] + ".."),
        NAME.replace(".safetensors", ".safetensors.tmp"),
    ],
)
def test_a_name_that_no_key_has_is_told_from_ours(name: str) -> None:
    assert parse_name(name) is None


@given(st.text(max_size=300))
def test_any_text_is_a_name_of_ours_or_none(text: str) -> None:
    address = parse_name(text)
    assert address is None or address.name == text
