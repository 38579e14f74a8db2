"""Finding by tokens: against brute force over all objects, and the cover against all subsets' union."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from lmcache_qprotocol.identity import ItemIdentity
from lmcache_qprotocol.keys import ObjectKey
from lmcache_qserver.qstore.by_tokens import ByTokens, Candidate, agreement, content_of
from lmcache_qserver.qstore.cover import cover
from tests.server.qstore.fake_worker import FAMILY

PARENTS = (b"p" * 32, b"q" * 32)
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
items = st.lists(
    st.builds(
        ItemIdentity, st.sampled_from(["mm", "embeds"]), st.sampled_from("xy"), st.integers(0, 5)
    ),
    max_size=2,
)


def rows_that_agree(
    one: tuple[int, ...],
    mine: list[ItemIdentity],
    other: tuple[int, ...],
    theirs: list[ItemIdentity],
) -> int:
    """Row by row: equal tokens, and equal items begin there."""
    rows = 0
    for a, b in zip(one, other, strict=False):
        here = [
            sorted((item.kind, item.digest) for item in some if item.offset == rows)
            for some in (mine, theirs)
        ]
        if a != b or here[0] != here[1]:
            break
        rows += 1
    return rows


def inside(some: list[ItemIdentity], length: int) -> list[ItemIdentity]:
    return [item for item in some if item.offset < length]


@given(tokens, items, tokens, items)
def test_agreement_is_row_by_row(
    one: tuple[int, ...],
    mine: list[ItemIdentity],
    other: tuple[int, ...],
    theirs: list[ItemIdentity],
) -> None:
    mine, theirs = inside(mine, len(one)), inside(theirs, len(other))
    a, b = content_of(PARENTS[0], one, mine), content_of(PARENTS[0], other, theirs)
    assert agreement(a, b) == agreement(b, a) == rows_that_agree(one, mine, other, theirs)


objects = st.lists(
    st.tuples(st.sampled_from(PARENTS), st.integers(0, 5), tokens, items), max_size=12
)


@given(objects, tokens, items, st.data())
def test_the_best_candidate_of_every_first_row_is_found(
    some: list[tuple[bytes, int, tuple[int, ...], list[ItemIdentity]]],
    asked: tuple[int, ...],
    asked_items: list[ItemIdentity],
    data: st.DataObject,
) -> None:
    asked_items = inside(asked_items, len(asked))
    index = ByTokens()
    left = {}
    for number, (parent, first, held, its) in enumerate(some):
        if first >= len(held):
            continue
        key = ObjectKey(
            family=FAMILY, chunk_hash=number.to_bytes(32, "big"), rows=(first, len(held))
        )
        index.add(key, content_of(parent, held, inside(its, len(held))))
        left[key] = parent, first, held, inside(its, len(held))
        index.validate()
    for key in list(left):
        if data.draw(st.booleans()):
            index.remove(key)
            index.remove(key)  # once more does nothing
            del left[key]
            index.validate()
    best: dict[int, int] = {}
    for parent, first, held, its in left.values():
        agreed = rows_that_agree(held, its, asked, asked_items)
        if parent == PARENTS[0] and agreed > first:
            best[first] = max(best.get(first, 0), agreed)
    found = list(index.candidates(FAMILY, content_of(PARENTS[0], asked, asked_items)))
    assert {one.first: one.agreed for one in found} == best
    assert len(found) == len(best)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10)), max_size=8), st.integers(1, 10))
def test_a_cover_leaves_out_nothing_and_takes_no_more_than_it_needs(
    spans: list[tuple[int, int]], asked: int
) -> None:
    candidates = [
        Candidate(ObjectKey(family=FAMILY, chunk_hash=bytes([number] * 32)), a, min(b, asked))
        for number, (a, b) in enumerate(spans)
        if a < min(b, asked)
    ]
    chosen, gaps = cover(candidates, asked)
    union = {row for one in candidates for row in range(one.first, one.agreed)}
    assert {row for one in chosen for row in range(one.first, one.agreed)} == union
    assert {row for a, b in gaps for row in range(a, b)} == set(range(asked)) - union
    assert all(a < b for a, b in gaps)
    assert [one.first for one in chosen] == sorted(one.first for one in chosen)
    for one in chosen:
        rest = {
            row for other in chosen if other is not one for row in range(other.first, other.agreed)
        }
        assert rest != union


def test_salts_do_not_see_each_other() -> None:
    index = ByTokens()
    content = content_of(PARENTS[0], (1, 2, 3))
    index.add(ObjectKey(family=FAMILY, chunk_hash=b"h" * 32, rows=(0, 3)), content)
    other = msgspec.structs.replace(FAMILY, cache_salt="s")
    assert not list(index.candidates(other, content))
    assert len(list(index.candidates(FAMILY, content))) == 1
