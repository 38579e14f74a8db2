"""Finding identities by token ids: against brute force over all objects; and its bounds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_qprotocol.hashing import token_bytes
from lmcache_qprotocol.identity import ItemIdentity, LoraIdentity
from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.limits import MAX_IDENTITIES
from lmcache_qprotocol.messages import KnownIdentity, PartialChunk
from lmcache_qserver.qstore import by_identity
from lmcache_qserver.qstore.by_identity import ByIdentity, Claim, Claimed
from tests.server.qstore.fake_worker import FAMILY

CHUNK = 8
PARENTS = (b"p" * 32, b"q" * 32)
SALTS, LORAS = ("", "a"), (None, LoraIdentity("x", "/x"), LoraIdentity("x", "/x", "d"))
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=CHUNK).map(tuple)
claims = st.builds(
    Claim,
    st.sampled_from(SALTS),
    st.sampled_from(LORAS),
    st.lists(st.integers(0, 3 * CHUNK), max_size=2).map(
        lambda offsets: tuple(ItemIdentity("mm", "i", offset) for offset in sorted(offsets))
    ),
)
Stored = tuple[bytes, tuple[int, ...], int, Claim]
"""Plain parent, tokens, first row, claim."""


def key_of(number: int, rows: tuple[int, int] | None = None, model: str = "m##query") -> ObjectKey:
    family = msgspec.structs.replace(FAMILY, model_name=model)
    return ObjectKey(family=family, chunk_hash=number.to_bytes(32, "big"), rows=rows)


def claimed(
    claim: Claim, token_ids: tuple[int, ...] = (1, 2), parent: bytes = PARENTS[0]
) -> Claimed:
    return Claimed(claim, parent, token_bytes(token_ids))


def salted(salt: str) -> Claim:
    return Claim(salt, None, ())


def ask(
    index: ByIdentity, token_ids: tuple[int, ...], place: int = 0, parent: bytes = PARENTS[0]
) -> list[KnownIdentity]:
    chunk = PartialChunk(index=place, parent_hash=parent, tokens=token_ids)
    reply = index.find("m##query", [chunk], CHUNK)
    assert not reply.more
    return list(reply.identities)


def agreed_rows(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    rows = 0
    while rows < min(len(one), len(other)) and one[rows] == other[rows]:
        rows += 1
    return rows


objects = st.lists(
    st.tuples(st.sampled_from(PARENTS), tokens, st.integers(0, CHUNK - 1), claims).filter(
        lambda one: one[2] < len(one[1])
    ),
    max_size=12,
)


@given(objects, tokens, st.sampled_from(PARENTS), st.integers(0, 2), st.data())
def test_it_finds_what_brute_force_finds(
    stored: list[Stored],
    asked: tuple[int, ...],
    parent: bytes,
    place: int,
    data: st.DataObject,
) -> None:
    index = ByIdentity()
    for number, (of, token_ids, first, claim) in enumerate(stored):
        index.add(key_of(number, (first, len(token_ids))), claimed(claim, token_ids, of))
    gone = set(data.draw(st.lists(st.integers(0, 11), max_size=6)))
    for number in gone:
        if number < len(stored):
            of, token_ids, first, _ = stored[number]
            index.remove(key_of(number, (first, len(token_ids))))
    index.validate()
    expected: dict[KnownIdentity, int] = {}
    for number, (of, token_ids, first, claim) in enumerate(stored):
        agreed = agreed_rows(token_ids, asked)
        if number not in gone and of == parent and agreed > first:
            items = tuple(item for item in claim.items if item.offset < place * CHUNK + agreed)
            known = KnownIdentity(cache_salt=claim.cache_salt, lora=claim.lora, items=items)
            expected[known] = max(expected.get(known, 0), agreed)
    found = ask(index, asked, place, parent)
    assert set(found) == set(expected)
    assert len(found) == len(expected)
    reached = [expected[known] for known in found]
    assert reached == sorted(reached, reverse=True), "those that agree the furthest come first"


def test_items_are_told_up_to_where_the_tokens_agree() -> None:
    index = ByIdentity()
    at_ten, at_eleven = (ItemIdentity("mm", "i", CHUNK + offset) for offset in (2, 3))
    index.add(key_of(1), claimed(Claim("", None, (at_ten, at_eleven)), (1, 2, 3, 4)))
    assert ask(index, (1, 2, 3, 9), 1) == [KnownIdentity(items=(at_ten,))]
    assert ask(index, (1, 2, 9, 9), 1) == [KnownIdentity()]
    assert ask(index, (1, 2, 3, 4), 1) == [KnownIdentity(items=(at_ten, at_eleven))]


def test_an_empty_index_is_empty_again() -> None:
    index = ByIdentity()
    index.add(key_of(1), claimed(salted("s")))
    index.add(key_of(2), claimed(salted("s")))
    index.remove(key_of(1))
    index.remove(key_of(3))
    index.validate()
    assert ask(index, (1, 2)) == [KnownIdentity(cache_salt="s")]
    index.remove(key_of(2))
    assert (len(index), ask(index, (1, 2))) == (0, [])
    assert (index._parents, index._claims, index._chars) == ({}, {}, 0)


def test_another_model_is_not_told() -> None:
    index = ByIdentity()
    index.add(key_of(1, model="other##query"), claimed(salted("s")))
    assert ask(index, (1, 2)) == []


def test_claims_beyond_the_room_for_them_are_not_kept() -> None:
    index = ByIdentity(chars_kept=10)
    for number, salt in enumerate(["x" * 6, "y" * 6, "x" * 6, "z" * 4]):
        index.add(key_of(number), claimed(salted(salt)))
        index.validate()
    assert {known.cache_salt[:1] for known in ask(index, (1, 2))} == {"x", "z"}
    index.remove(key_of(1))
    index.remove(key_of(0))
    index.add(key_of(4), claimed(salted("y" * 6)))
    assert len(index) == 2, "the other x is still there"
    index.remove(key_of(2))
    index.add(key_of(5), claimed(salted("y" * 6)))
    index.validate()
    assert {known.cache_salt[:1] for known in ask(index, (1, 2))} == {"y", "z"}


def test_an_answer_has_a_bound_and_says_so() -> None:
    index = ByIdentity()
    for number in range(MAX_IDENTITIES + 1):
        index.add(key_of(number), claimed(salted(str(number)), (1, 2, 3)))
    index.add(key_of(9999), claimed(salted("agrees best"), (1, 2)))
    chunk = PartialChunk(index=0, parent_hash=PARENTS[0], tokens=(1, 2))
    reply = index.find("m##query", [chunk], CHUNK)
    assert (len(reply.identities), reply.more) == (MAX_IDENTITIES, True)
    last = PartialChunk(index=1, parent_hash=PARENTS[1], tokens=(5,))
    index.add(key_of(10_000), claimed(salted("last"), (5,), PARENTS[1]))
    reply = index.find("m##query", [chunk, last], CHUNK)
    assert reply.identities[0].cache_salt == "last", "the last chunk's come first"


@pytest.mark.parametrize("bound", ["MOST_CHARS_TOLD", "MOST_LOOKED_AT"])
def test_a_question_costs_no_more_than_it_may(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index = ByIdentity()
    for number in range(20):
        index.add(key_of(number), claimed(salted(f"{number:02}")))
    monkeypatch.setattr(by_identity, bound, 10)
    chunk = PartialChunk(index=0, parent_hash=PARENTS[0], tokens=(1, 2))
    reply = index.find("m##query", [chunk], CHUNK)
    assert (len(reply.identities), reply.more) == (5 if bound == "MOST_CHARS_TOLD" else 10, True)


def test_long_claims_are_not_looked_at_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    index = ByIdentity()
    items = tuple(ItemIdentity("mm", "i", 0) for _ in range(4))
    for number in range(20):
        index.add(key_of(number), claimed(Claim(f"{number:02}", None, items)))
    monkeypatch.setattr(by_identity, "MOST_ITEMS_LOOKED_AT", 14)
    chunk = PartialChunk(index=0, parent_hash=PARENTS[0], tokens=(1, 2))
    reply = index.find("m##query", [chunk], CHUNK)
    assert (len(reply.identities), reply.more) == (3, True)
