"""What hangs on something is never kept without it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_qserver.tier import Entry
from lmcache_qserver.tier.paths import Address, links_of, parse_name
from lmcache_qserver.upkeep.gc import surplus
from lmcache_qserver.upkeep.usefulness import most_useful_first

BASE = Address("m", "", 1, 0, b"", bytes(32), None)
SALT = "5" * 32


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def entry(
    chunk: int,
    parent: int = 0,
    used: float = 0.0,
    salt: str = "",
    rows: tuple[int, int] | None = None,
    nbytes: int = 1,
) -> Entry:
    """Of a chunk by its number; 0 is no parent."""
    address = replace(
        BASE,
        salt=salt,
        chunk_hash=digest(chunk),
        parent=digest(parent) if parent else b"",
        rows=rows,
    )
    return Entry(address.name, nbytes, used, used)


def above(entries: list[Entry]) -> list[tuple[Entry, Entry]]:
    """(object, what it hangs on directly): told by what names mean, not by how they are cut."""
    addresses = {each: parse_name(each.name) for each in entries}
    return [
        (each, other)
        for each, mine in addresses.items()
        for other, its in addresses.items()
        if mine is not None
        and its is not None
        and (its.salt_folder, its.chunk_hash) == (mine.salt_folder, mine.parent)
    ]


@st.composite
def trees(draw: st.DrawFn) -> list[Entry]:
    """Sequences that branch, some of whose chunks have gone, in two salts, with pieces, and used anyhow."""
    entries = []
    for chunk in range(1, draw(st.integers(1, 14))):
        parent = draw(st.integers(0, chunk - 1))
        for salt in draw(st.sampled_from([("",), (SALT,), ("", SALT), ()])):
            for rows in draw(st.sampled_from([(None,), (None, (3, 8)), ((0, 8), (3, 8))])):
                knows = draw(st.integers(0, 5)) > 0  # some writers do not tell the parent
                used, nbytes = draw(st.integers(0, 6)), draw(st.integers(1, 50))
                entries.append(entry(chunk, parent * knows, used, salt, rows, nbytes))
    return draw(st.permutations(entries))


@given(trees(), st.integers(0, 1000))
def test_whatever_goes_all_that_hangs_on_it_goes_too(entries: list[Entry], max_bytes: int) -> None:
    gone = surplus(entries, max_bytes)
    ordered = most_useful_first(entries)
    assert sorted(ordered, key=lambda each: each.name) == sorted(
        entries, key=lambda each: each.name
    )
    # What is larger than the limit alone goes in any case.
    goes_for_worth = {parent for parent in gone if parent.nbytes <= max_bytes}
    assert all(each in gone for each, parent in above(entries) if parent in goes_for_worth)


@given(trees())
def test_an_object_counts_as_used_when_what_hangs_on_it_was(entries: list[Entry]) -> None:
    used = {each.name: each.used for each in entries}
    pairs = above(entries)
    for _ in entries:
        for each, parent in pairs:
            used[parent.name] = max(used[parent.name], used[each.name])
    worth = [used[each.name] for each in most_useful_first(entries)]
    assert worth == sorted(worth, reverse=True)


def test_the_head_of_the_oldest_sequence_goes_last_of_it() -> None:
    old = [entry(1, 0, 10.0), entry(2, 1, 11.0), entry(3, 2, 12.0)]
    new = [
        entry(4, 0, 1.0),
        entry(5, 4, 20.0),
    ]  # its head has been in memory, and was not read here
    shared = entry(6, 1, 15.0)
    everything = [*old, *new, shared]
    order = most_useful_first(everything)
    assert order == [new[0], new[1], old[0], shared, old[1], old[2]]


def test_of_what_was_used_at_once_the_end_goes_first() -> None:
    chain = [entry(number, number - 1, 7.0) for number in range(1, 50)]
    mixed = random.Random(1).sample(chain, len(chain))
    assert most_useful_first(mixed) == chain


def test_other_salts_have_nothing_to_do_with_it() -> None:
    mine, theirs = entry(1, 0, 1.0), entry(2, 1, 9.0, salt=SALT)
    assert surplus([mine, theirs, entry(3, 0, 5.0)], 2) == [mine]


@pytest.mark.parametrize("length", [1, 2, 7])
def test_circles_end(length: int) -> None:
    circle = [entry(number, number % length + 1, number) for number in range(1, length + 1)]
    assert set(most_useful_first([*circle, entry(99, 1, 50.0)])) == {*circle, entry(99, 1, 50.0)}


@given(trees())
def test_cutting_a_name_gives_what_it_tells(entries: list[Entry]) -> None:
    for each in entries:
        address = parse_name(each.name)
        assert address is not None
        parent = (address.parent or bytes(32)).hex()
        assert links_of(each.name) == (address.salt_folder, parent, address.chunk_hash.hex())
