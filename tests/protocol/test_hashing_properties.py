"""What the hash chain promises, whatever the tokens: who shares a hash with whom, and who never does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lmcache_qprotocol.hashing import (
    HASH_BYTES,
    NONE_HASH,
    HashChain,
    chunk_hash,
    chunk_hashes,
    root_hash,
    token_bytes,
)
from lmcache_qprotocol.identity import PLAIN, Identity, ItemIdentity, LoraIdentity
from tests.protocol.strategies import of_type

token_ids = st.integers(0, (1 << 32) - 1)
sequences = st.lists(token_ids, max_size=40)
chunk_sizes = st.integers(1, 9)
loras = st.builds(LoraIdentity, st.text(min_size=1, max_size=5), st.text(max_size=5))
items = st.builds(
    ItemIdentity,
    st.sampled_from(["mm", "embeds"]),
    st.text(min_size=1, max_size=4),
    st.integers(0, 45),
)
item_lists = st.lists(items, max_size=4).map(tuple)
identities = st.builds(Identity, st.none() | loras, item_lists)


@given(sequences, chunk_sizes, identities, st.data())
def test_any_split_of_extend_gives_the_same_chain(
    tokens: list[int], size: int, identity: Identity, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5)))
    chain = HashChain(size, identity)
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        chain.extend(iter(tokens[start:end]))
        assert len(chain) == end
    assert chain.hashes == chunk_hashes(tokens, size, identity)
    assert len(chain.hashes) == len(tokens) // size
    assert chain.open_tokens == tuple(tokens[len(tokens) // size * size :])
    parents = [chain.parent(index) for index in range(len(chain.hashes) + 1)]
    assert parents == [root_hash(identity), *chain.hashes]
    assert all(len(digest) == HASH_BYTES for digest in parents)


@given(sequences, sequences, chunk_sizes, identities)
def test_a_common_prefix_shares_its_chunks_and_nothing_behind(
    one: list[int], other: list[int], size: int, identity: Identity
) -> None:
    left, right = chunk_hashes(one, size, identity), chunk_hashes(other, size, identity)
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        assert (a == b) == (one[: (index + 1) * size] == other[: (index + 1) * size])


@given(st.lists(token_ids, min_size=4, max_size=40), st.integers(1, 4), item_lists, items)
def test_an_item_changes_the_chunk_it_begins_in_and_all_later_ones(
    tokens: list[int], size: int, others: tuple[ItemIdentity, ...], item: ItemIdentity
) -> None:
    without = chunk_hashes(tokens, size, Identity(items=others))
    with_item = chunk_hashes(tokens, size, Identity(items=(*others, item)))
    first = item.offset // size
    assert with_item[:first] == without[:first]
    assert all(a != b for a, b in zip(with_item[first:], without[first:], strict=True))


@given(st.lists(token_ids, min_size=8, max_size=40), st.integers(1, 8), item_lists, items, items)
def test_two_unlike_items_never_give_the_same_hash(
    tokens: list[int],
    size: int,
    others: tuple[ItemIdentity, ...],
    one: ItemIdentity,
    other: ItemIdentity,
) -> None:
    assume(one != other)
    first = min(one.offset, other.offset) // size
    left = chunk_hashes(tokens, size, Identity(items=(*others, one)))
    right = chunk_hashes(tokens, size, Identity(items=(*others, other)))
    assert left[:first] == right[:first]
    assert all(a != b for a, b in zip(left[first:], right[first:], strict=True))


@given(sequences, chunk_sizes, item_lists, st.randoms(use_true_random=False))
def test_the_order_in_which_items_are_named_does_not_matter(
    tokens: list[int], size: int, named: tuple[ItemIdentity, ...], random: Any
) -> None:
    shuffled = list(named)
    random.shuffle(shuffled)
    expected = chunk_hashes(tokens, size, Identity(items=named))
    assert chunk_hashes(tokens, size, Identity(items=tuple(shuffled))) == expected


@given(st.lists(token_ids, min_size=1, max_size=40), item_lists, loras, loras)
def test_a_lora_shares_no_chunk_with_the_base_model_or_another_lora(
    tokens: list[int], named: tuple[ItemIdentity, ...], one: LoraIdentity, other: LoraIdentity
) -> None:
    assume(one != other)
    chains = [chunk_hashes(tokens, 1, Identity(lora, named)) for lora in (None, one, other)]
    assert len({digest for chain in chains for digest in chain}) == 3 * len(tokens)


def test_two_loras_of_one_name_differ_by_their_source() -> None:
    roots = {root_hash(Identity(LoraIdentity("sql", source))) for source in ("", "/a", "/b")}
    assert len(roots) == 3
    # Neither does a name borrow from a source: the two are not just glued together.
    assert root_hash(Identity(LoraIdentity("ab", "c"))) != root_hash(
        Identity(LoraIdentity("a", "bc"))
    )


@given(
    st.lists(token_ids, min_size=2, max_size=9), identities, st.integers(0, 5), token_ids, st.data()
)
def test_a_piece_that_ends_inside_its_chunk_never_has_a_whole_chunks_hash(
    chunk: list[int], identity: Identity, index: int, other: int, data: st.DataObject
) -> None:
    size = len(chunk)
    chain = HashChain(size, identity)
    chain.extend([other] * (size * index) + chunk)
    end = data.draw(st.integers(1, size - 1))
    piece = chunk_hash(chain.parent(index), chunk[:end], index * size, identity.items)
    assert piece not in chain.hashes
    assert piece != chain.root


@given(st.lists(token_ids, min_size=1, max_size=9), identities)
def test_a_piece_up_to_its_chunks_end_has_the_whole_chunks_hash(
    chunk: list[int], identity: Identity
) -> None:
    piece = chunk_hash(root_hash(identity), chunk, 0, identity.items)
    assert [piece] == chunk_hashes(chunk, len(chunk), identity)


@given(st.lists(token_ids, min_size=1, max_size=20), st.integers(0, 30), item_lists)
def test_only_items_that_begin_in_the_hashed_tokens_count(
    tokens: list[int], start: int, named: tuple[ItemIdentity, ...]
) -> None:
    inside = tuple(item for item in named if item.offset in range(start, start + len(tokens)))
    expected = chunk_hash(NONE_HASH, tokens, start, inside)
    assert chunk_hash(NONE_HASH, tokens, start, named) == expected


@given(of_type(Identity))
def test_every_identity_that_can_travel_can_be_hashed(identity: Identity) -> None:
    assert len(root_hash(identity)) == HASH_BYTES
    assert (root_hash(identity) == NONE_HASH) == (identity.lora is None)


@given(sequences)
def test_token_bytes_are_four_each_and_big_endian(tokens: list[int]) -> None:
    assert token_bytes(tokens) == b"".join(token.to_bytes(4, "big") for token in tokens)
    assert token_bytes(tuple(tokens)) == token_bytes(iter(tokens)) == token_bytes(tokens)


def test_a_byte_string_is_a_sequence_of_small_token_ids() -> None:
    assert token_bytes(b"\x01\x02\x03\x04\x05") == token_bytes([1, 2, 3, 4, 5])


@pytest.mark.parametrize("bad", [-1, 1 << 32, 1 << 70, 1.0, "1", None])
def test_token_ids_out_of_range_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="token ids"):
        token_bytes([1, bad])
    with pytest.raises(ValueError, match="token ids"):
        chunk_hashes([bad], 1)


@pytest.mark.parametrize("size", [0, -1])
def test_a_chunk_size_must_be_positive(size: int) -> None:
    with pytest.raises(ValueError, match="chunk_size"):
        HashChain(size)


def test_a_plain_identity_starts_where_lmcache_starts() -> None:
    assert HashChain(4).root == HashChain(4, PLAIN).root == NONE_HASH
