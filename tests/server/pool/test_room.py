"""Choosing victims. An arena is a row of slots, one letter per unit: `aab.` is a, a, b, free."""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_qserver.pool.extents import Extents
from lmcache_qserver.pool.room import choose_victims
from lmcache_qserver.pool.slot import Slot

UNIT = 4096


def arena(row: str) -> tuple[Extents, dict[str, Slot]]:
    extents = Extents(len(row) * UNIT)
    slots: dict[str, Slot] = {}
    holes: list[tuple[int, int]] = []
    for letter, run in groupby(row):
        nbytes = len(list(run)) * UNIT
        offset = extents.allocate(nbytes)
        assert offset is not None
        if letter == ".":
            holes.append((offset, nbytes))
        else:
            slots[letter] = Slot(offset, nbytes, nbytes, letter, len(slots) + 1)
    for offset, nbytes in holes:
        extents.free(offset, nbytes)
    return extents, slots


@pytest.mark.parametrize(
    ("row", "order", "units", "victims"),
    [
        pytest.param("abcd", "abcd", 1, "a", id="the first victim is large enough"),
        pytest.param("abcd", "cabd", 1, "c", id="order, not place"),
        pytest.param("abcd", "adcb", 2, "cd", id="victims elsewhere are spared, order of use kept"),
        pytest.param("abcd", "abcd", 2, "ab", id="two neighbours"),
        pytest.param("a.b.", "ab", 2, "a", id="with the hole to its right"),
        pytest.param(".a.b", "ab", 2, "a", id="with the hole to its left"),
        pytest.param(".a.b", "ba", 2, "b", id="with a hole that no other victim has"),
        pytest.param("a.b", "ab", 3, "ab", id="the hole between two victims counts once"),
        pytest.param(".a.b.", "ab", 5, "ab", id="everything"),
        pytest.param("aaabccc", "acb", 4, "ab", id="the later used of two edges is spared"),
        pytest.param("aaabccc", "cab", 4, "bc", id="and the other way round"),
        pytest.param("aabcc", "acb", 4, "acb", id="no edge can be spared"),
        pytest.param("axb", "ab", 2, None, id="what may not be evicted stands between"),
        pytest.param("axb", "", 1, None, id="no candidates"),
        pytest.param("ab", "ab", 3, None, id="larger than the arena"),
    ],
)
def test_rows(row: str, order: str, units: int, victims: str | None) -> None:
    extents, slots = arena(row)
    chosen = choose_victims(extents, [slots[letter] for letter in order], units * UNIT)
    got = None if chosen is None else "".join(str(slot.owner) for slot in chosen)
    wanted = None if victims is None else "".join(sorted(victims, key=order.index))
    assert got == wanted
    extents.validate()
    assert len(extents.allocated()) == len(slots)


def largest_hole(row: str, gone: str) -> int:
    return max(
        len(hole) for hole in "".join(" " if c in gone + "." else "#" for c in row).split("#")
    )


@st.composite
def crowded_arenas(draw: st.DrawFn) -> tuple[str, str]:
    runs = draw(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=12))
    letters = iter("abcdefghijklmnopqrst")
    row = "".join("." * n if is_free else next(letters) * n for is_free, n in runs)
    order = draw(st.permutations(sorted(set(row) - {"."})))
    return row, "".join(order)[: draw(st.integers(0, len(order)))]


@given(crowded_arenas(), st.integers(1, 20))
def test_victims_reach_least_far_and_none_could_be_spared(
    case: tuple[str, str], units: int
) -> None:
    row, order = case
    if largest_hole(row, "") >= units:
        return
    extents, slots = arena(row)
    chosen = choose_victims(extents, [slots[letter] for letter in order], units * UNIT)
    if chosen is None:
        assert largest_hole(row, order) < units
        return
    victims = "".join(str(slot.owner) for slot in chosen)
    assert list(victims) == sorted(victims, key=order.index)
    assert largest_hole(row, victims) >= units
    for victim in victims:
        assert largest_hole(row, victims.replace(victim, "")) < units
    assert largest_hole(row, order[: order.index(victims[-1])]) < units
