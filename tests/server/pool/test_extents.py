"""The free list: rows, and a random walk against an arena that is a plain list of units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_qserver.pool.extents import Extents

UNIT = 4096


def test_a_new_arena_is_one_hole() -> None:
    extents = Extents(10 * UNIT)
    assert (extents.free_bytes, extents.largest_free) == (10 * UNIT, 10 * UNIT)
    extents.validate()


@pytest.mark.parametrize(
    ("nbytes", "alignment"), [(0, UNIT), (-UNIT, UNIT), (UNIT + 1, UNIT), (UNIT, 0), (UNIT, -1)]
)
def test_an_arena_that_is_not_whole_units_is_refused(nbytes: int, alignment: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        Extents(nbytes, alignment)


@pytest.mark.parametrize(
    ("nbytes", "span"), [(1, UNIT), (UNIT, UNIT), (UNIT + 1, 2 * UNIT), (2 * UNIT - 1, 2 * UNIT)]
)
def test_an_allocation_takes_whole_units(nbytes: int, span: int) -> None:
    extents = Extents(10 * UNIT)
    assert extents.span(nbytes) == span
    assert extents.allocate(nbytes) == 0
    assert extents.free_bytes == 10 * UNIT - span
    assert extents.allocated() == {0: span}


@pytest.mark.parametrize("nbytes", [0, -1])
def test_allocating_nothing_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        Extents(UNIT).allocate(nbytes)


def test_a_full_arena_has_no_hole() -> None:
    extents = Extents(2 * UNIT)
    assert extents.allocate(2 * UNIT) == 0
    assert (extents.free_bytes, extents.largest_free) == (0, 0)
    assert extents.allocate(1) is None
    extents.validate()


def test_enough_bytes_in_two_holes_are_no_room() -> None:
    extents = Extents(3 * UNIT)
    offsets = [extents.allocate(UNIT) for _ in range(3)]
    assert offsets == [0, UNIT, 2 * UNIT]
    extents.free(0, UNIT)
    extents.free(2 * UNIT, UNIT)
    assert (extents.free_bytes, extents.largest_free) == (2 * UNIT, UNIT)
    assert extents.allocate(2 * UNIT) is None


def with_holes(*holes: int) -> Extents:
    """Holes of these many units, each followed by one used unit."""
    extents = Extents((sum(holes) + len(holes)) * UNIT)
    starts = []
    for hole in holes:
        starts.append((extents.allocate(hole * UNIT), hole * UNIT))
        extents.allocate(UNIT)
    for start, nbytes in starts:
        assert start is not None
        extents.free(start, nbytes)
    return extents


def test_the_smallest_hole_that_fits_is_taken_and_cut_at_its_low_end() -> None:
    extents = with_holes(8, 2, 4)
    assert extents.allocate(3 * UNIT) == (8 + 1 + 2 + 1) * UNIT
    assert extents.allocate(2 * UNIT) == (8 + 1) * UNIT
    assert extents.allocate(UNIT) == (8 + 1 + 2 + 1 + 3) * UNIT
    assert extents.largest_free == 8 * UNIT
    extents.validate()


def test_of_equal_holes_the_one_freed_last_is_taken() -> None:
    extents = with_holes(2, 2, 2)
    assert [extents.allocate(2 * UNIT) for _ in range(3)] == [6 * UNIT, 3 * UNIT, 0]


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
)
def test_neighbours_merge_in_any_order_of_frees(order: tuple[int, ...]) -> None:
    extents = Extents(3 * UNIT)
    for _ in range(3):
        extents.allocate(UNIT)
    for index in order:
        extents.free(index * UNIT, UNIT)
        extents.validate()
    assert extents.largest_free == 3 * UNIT


@pytest.mark.parametrize(
    ("offset", "nbytes", "what"),
    [
        (0, 2 * UNIT, "not allocated|no extent"),  # freed before
        (6 * UNIT, UNIT, "no extent"),  # never allocated
        (3 * UNIT, UNIT, "no extent"),  # inside an extent
        (2 * UNIT, UNIT, "has 12288 bytes"),  # only its beginning
        (2 * UNIT, 4 * UNIT, "has 12288 bytes"),  # over its end
        (1, UNIT, "no extent"),
        (-UNIT, UNIT, "outside"),
        (10 * UNIT, UNIT, "outside"),
        (9 * UNIT, 2 * UNIT, "outside"),
        (2 * UNIT, 0, "outside"),
        (2 * UNIT, -UNIT, "outside"),
    ],
)
def test_freeing_what_is_no_extent_is_refused_and_changes_nothing(
    offset: int, nbytes: int, what: str
) -> None:
    extents = Extents(10 * UNIT)
    extents.allocate(2 * UNIT)
    extents.allocate(3 * UNIT)
    extents.free(0, 2 * UNIT)
    with pytest.raises(ValueError, match=what):
        extents.free(offset, nbytes)
    extents.validate()
    assert extents.allocated() == {2 * UNIT: 3 * UNIT}


def test_an_extent_is_freed_by_the_bytes_that_were_asked_for() -> None:
    extents = Extents(10 * UNIT)
    extents.allocate(UNIT + 1)
    extents.free(0, UNIT + 1)
    assert extents.free_bytes == 10 * UNIT


def test_hole_around_reaches_over_the_free_neighbours() -> None:
    extents = with_holes(3, 2)
    assert extents.hole_around(3 * UNIT, 4 * UNIT) == (0, 6 * UNIT)
    assert extents.hole_around(6 * UNIT, 7 * UNIT) == (4 * UNIT, 7 * UNIT)


ARENA_UNITS = 24


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 1 << 16))))
def test_it_agrees_with_a_list_of_units(steps: list[tuple[bool, int, int]]) -> None:
    extents = Extents(ARENA_UNITS * UNIT)
    units: list[int | None] = [None] * ARENA_UNITS  # who has this unit: the start of its extent
    live: list[tuple[int, int]] = []
    for is_allocation, count, pick in steps:
        if is_allocation:
            nbytes = count * UNIT - pick % UNIT
            holes = "".join(" " if unit is None else "#" for unit in units).split("#")
            fitting = [len(hole) for hole in holes if len(hole) >= count]
            offset = extents.allocate(nbytes)
            if offset is None:
                assert not fitting
                continue
            assert offset % UNIT == 0
            first = offset // UNIT
            # Best fit: the hole that was cut is the smallest of those that fit.
            hole_end = next((i for i in range(first, ARENA_UNITS) if units[i] is not None), None)
            assert (ARENA_UNITS if hole_end is None else hole_end) - first == min(fitting)
            assert first == 0 or units[first - 1] is not None
            units[first : first + count] = [first] * count
            live.append((offset, nbytes))
        elif live:
            offset, nbytes = live.pop(pick % len(live))
            extents.free(offset, nbytes)
            units = [None if unit == offset // UNIT else unit for unit in units]
        extents.validate()
        assert extents.free_bytes == units.count(None) * UNIT
