"""The pool's account: every operation in every state, eviction, views and usage."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import lmcache_qserver.pool as package
from lmcache_qserver.pool import Pool, PoolMemory, PoolStateError, PoolUsage, Slot, SlotState

UNIT = 4096
RESERVED, COMMITTED, LEASED, FREE = (
    SlotState.RESERVED,
    SlotState.COMMITTED,
    SlotState.LEASED,
    SlotState.FREE,
)


@pytest.fixture
def pool() -> Iterator[Pool]:
    """Four units."""
    with PoolMemory(4 * UNIT) as memory:
        pool = Pool(memory)
        yield pool
        pool.validate()


def reserved(pool: Pool, owner: str = "owner", nbytes: int = UNIT) -> Slot:
    slot = pool.reserve(nbytes, owner).slot
    assert slot is not None
    return slot


def committed(pool: Pool, owner: str = "owner", nbytes: int = UNIT) -> Slot:
    slot = reserved(pool, owner, nbytes)
    pool.commit(slot)
    return slot


def leased(pool: Pool, owner: str = "owner", nbytes: int = UNIT) -> Slot:
    slot = committed(pool, owner, nbytes)
    pool.lease(slot)
    return slot


def leased_twice(pool: Pool) -> Slot:
    slot = leased(pool)
    pool.lease(slot)
    return slot


def doomed(pool: Pool) -> Slot:
    slot = leased(pool)
    pool.discard(slot)
    return slot


def doomed_twice_leased(pool: Pool) -> Slot:
    slot = leased_twice(pool)
    pool.discard(slot)
    return slot


def aborted(pool: Pool) -> Slot:
    slot = reserved(pool)
    pool.abort(slot)
    return slot


REFUSED = None
OPERATIONS = ("commit", "abort", "lease", "release", "touch", "discard")
TABLE: list[tuple[Callable[[Pool], Slot], tuple[SlotState | None, ...]]] = [
    # from                 commit     abort    lease    release    touch      discard
    (reserved,            (COMMITTED, FREE,    REFUSED, REFUSED,   REFUSED,   REFUSED)),
    (committed,           (REFUSED,   REFUSED, LEASED,  REFUSED,   COMMITTED, FREE)),
    (leased,              (REFUSED,   REFUSED, LEASED,  COMMITTED, LEASED,    LEASED)),
    (leased_twice,        (REFUSED,   REFUSED, LEASED,  LEASED,    LEASED,    LEASED)),
    (doomed,              (REFUSED,   REFUSED, REFUSED, FREE,      REFUSED,   REFUSED)),
    (doomed_twice_leased, (REFUSED,   REFUSED, REFUSED, LEASED,    REFUSED,   REFUSED)),
    (aborted,             (REFUSED,   REFUSED, REFUSED, REFUSED,   REFUSED,   REFUSED)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "operation", "after"),
    [
        pytest.param(make, operation, after, id=f"{operation} {make.__name__}")
        for make, row in TABLE
        for operation, after in zip(OPERATIONS, row, strict=True)
    ],
)
def test_every_operation_in_every_state(
    pool: Pool, make: Callable[[Pool], Slot], operation: str, after: SlotState | None
) -> None:
    slot = make(pool)
    before, usage = slot.state, pool.usage()
    if after is REFUSED:
        with pytest.raises(PoolStateError, match=rf"^{operation} .*{before.name}"):
            getattr(pool, operation)(slot)
        assert (slot.state, pool.usage()) == (before, usage)
    else:
        getattr(pool, operation)(slot)
        assert slot.state is after
    pool.validate()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_slot_of_another_pool_is_refused(pool: Pool, operation: str) -> None:
    make = {"commit": reserved, "abort": reserved, "release": leased}.get(operation, committed)
    make(pool)
    with PoolMemory(UNIT) as memory:
        other = Pool(memory)
        with pytest.raises(PoolStateError, match="another pool"):
            getattr(other, operation)(make(pool))
        other.validate()


def test_reserve_gives_a_slot_that_is_the_owners_alone(pool: Pool) -> None:
    reservation = pool.reserve(UNIT + 1, ("key", 1))
    slot = reservation.slot
    assert slot is not None
    assert reservation.evicted == ()
    assert (slot.nbytes, slot.span, slot.owner) == (UNIT + 1, 2 * UNIT, ("key", 1))
    assert (slot.state, slot.leases, slot.offset) == (RESERVED, 0, 0)


def test_generations_count_up_and_are_never_used_again(pool: Pool) -> None:
    generations = [aborted(pool).generation, reserved(pool).generation, reserved(pool).generation]
    assert generations == [1, 2, 3]


@pytest.mark.parametrize("nbytes", [0, -1])
def test_reserving_nothing_is_refused(pool: Pool, nbytes: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        pool.reserve(nbytes, "owner")


def test_an_unknown_policy_is_refused_with_the_known_ones(pool: Pool) -> None:
    with pytest.raises(ValueError, match="lru, none"):
        Pool(pool.memory, policy="fifo")  # type: ignore[arg-type]


class TestEviction:
    def test_free_bytes_are_used_before_anybody_has_to_go(self, pool: Pool) -> None:
        for owner in "abc":
            committed(pool, owner)
        assert pool.reserve(UNIT, "d").evicted == ()

    def test_the_least_recently_used_goes_first(self, pool: Pool) -> None:
        a, b, _, _ = (committed(pool, owner) for owner in "abcd")
        pool.touch(a)
        pool.lease(b)
        pool.release(b)
        order = [pool.reserve(UNIT, "new").evicted for _ in range(4)]
        assert order == [("c",), ("d",), ("a",), ("b",)]
        assert (a.state, b.state) == (FREE, FREE)

    def test_commit_counts_as_use_and_reserve_does_not(self, pool: Pool) -> None:
        early, late = reserved(pool, "early"), reserved(pool, "late")
        pool.commit(late)
        pool.commit(early)
        reserved(pool, "fill", 2 * UNIT)
        assert pool.reserve(UNIT, "new").evicted == ("late",)

    def test_only_as_much_as_needed(self, pool: Pool) -> None:
        for owner in "adcb":  # places in the arena: a d c b
            committed(pool, owner)
        assert pool.reserve(UNIT + 1, "new").evicted == ("a", "d")
        assert pool.usage().committed_bytes == 2 * UNIT

    def test_victims_elsewhere_in_the_arena_are_spared(self, pool: Pool) -> None:
        first, _, _, _ = (committed(pool, owner) for owner in "abcd")
        pool.lease(first)
        pool.release(first)  # order b c d a, places a b c d
        b_and_c = pool.reserve(2 * UNIT, "new")
        assert b_and_c.evicted == ("b", "c")
        assert first.state is COMMITTED

    def test_nothing_leased_or_reserved_goes(self, pool: Pool) -> None:
        leased(pool, "leased", 2 * UNIT)
        reserved(pool, "reserved")
        committed(pool, "committed")
        refused = pool.reserve(2 * UNIT, "too large")
        assert (refused.slot, refused.evicted) == (None, ())
        assert pool.reserve(UNIT, "new").evicted == ("committed",)
        assert pool.reserve(UNIT, "newer").slot is None

    def test_if_no_room_can_be_made_nothing_is_evicted(self, pool: Pool) -> None:
        committed(pool, "a")
        leased(pool, "wall")
        committed(pool, "b", 2 * UNIT)
        usage = pool.usage()
        refused = pool.reserve(3 * UNIT, "would need both sides of the wall")
        assert (refused.slot, refused.evicted) == (None, ())
        assert pool.usage() == usage

    @pytest.mark.parametrize("unpin", ["commit", "abort", "release", "release doomed"])
    def test_a_refusal_holds_until_something_is_unpinned(self, pool: Pool, unpin: str) -> None:
        committed(pool, "a")
        wall = {"commit": reserved, "abort": reserved}.get(unpin, leased)(pool, "wall")
        committed(pool, "b", 2 * UNIT)
        if unpin == "release doomed":
            pool.discard(wall)
        for units in (3, 3, 4):
            assert pool.reserve(units * UNIT, "too large").slot is None
        getattr(pool, unpin.split()[0])(wall)
        assert pool.reserve(4 * UNIT, "new").slot is not None

    def test_a_refusal_says_nothing_about_less(self, pool: Pool) -> None:
        committed(pool, "a")
        leased(pool, "wall")
        committed(pool, "b", 2 * UNIT)
        assert pool.reserve(3 * UNIT, "too large").slot is None
        assert pool.reserve(2 * UNIT, "fits").evicted == ("b",)

    def test_more_than_the_pool_evicts_nothing(self, pool: Pool) -> None:
        committed(pool, "a")
        refused = pool.reserve(4 * UNIT + 1, "larger than the pool")
        assert (refused.slot, refused.evicted) == (None, ())

    def test_evictions_are_counted_with_the_bytes_that_they_freed(self, pool: Pool) -> None:
        committed(pool, "a", UNIT + 1)
        committed(pool, "b", 2 * UNIT)
        pool.reserve(4 * UNIT, "all")
        assert (pool.usage().evictions, pool.usage().evicted_bytes) == (2, 4 * UNIT)

    def test_policy_none_refuses(self, pool: Pool) -> None:
        none = Pool(pool.memory, policy="none")
        slot = committed(none, "a", 4 * UNIT)
        none.touch(slot)
        none.lease(slot)
        none.release(slot)
        assert none.reserve(1, "b").slot is None
        none.discard(slot)
        assert none.reserve(1, "b").slot is not None
        none.validate()


def test_a_doomed_slot_keeps_its_bytes_until_the_last_release(pool: Pool) -> None:
    slot = leased(pool, "a", 4 * UNIT)
    pool.lease(slot)
    pool.discard(slot)
    assert pool.reserve(1, "b").slot is None
    pool.release(slot)
    assert pool.reserve(1, "b").slot is None
    pool.release(slot)
    assert pool.reserve(1, "b").slot is not None


class TestView:
    def test_the_writer_writes_and_a_lease_reads_the_same_bytes(self, pool: Pool) -> None:
        reserved(pool)
        slot = reserved(pool, "a", 100)
        pool.view(slot)[:] = np.arange(100, dtype=np.uint8)
        pool.commit(slot)
        pool.lease(slot)
        assert pool.view(slot).tolist() == list(range(100))
        assert pool.memory.array[slot.offset : slot.offset + 100].tolist() == list(range(100))

    def test_it_has_exactly_the_slots_bytes(self, pool: Pool) -> None:
        view = pool.view(reserved(pool, "a", UNIT + 1))
        assert view.shape == (UNIT + 1,)
        assert view.dtype == np.uint8
        assert view.flags.c_contiguous

    def test_a_lease_cannot_write(self, pool: Pool) -> None:
        view = pool.view(leased(pool))
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1

    @pytest.mark.parametrize("make", [committed, aborted])
    def test_nobody_views_what_may_go_under_the_view(
        self, pool: Pool, make: Callable[[Pool], Slot]
    ) -> None:
        with pytest.raises(PoolStateError, match=r"^view "):
            pool.view(make(pool))


def test_usage_adds_up_and_says_what_is_padding(pool: Pool) -> None:
    reserved(pool, "r", 1)
    committed(pool, "c", UNIT)
    leased(pool, "l", UNIT - 10)
    assert pool.usage() == PoolUsage(
        capacity_bytes=4 * UNIT,
        free_bytes=UNIT,
        reserved_bytes=UNIT,
        committed_bytes=UNIT,
        leased_bytes=UNIT,
        padding_bytes=UNIT - 1 + 10,
        slots=3,
        evictions=0,
        evicted_bytes=0,
    )


def test_messages_do_not_name_the_owner(pool: Pool) -> None:
    with pytest.raises(PoolStateError) as caught:
        pool.release(reserved(pool, "a secret salt"))
    assert "salt" not in str(caught.value)


def test_the_packages_names() -> None:
    assert sorted(package.__all__) == [
        "Pool",
        "PoolMemory",
        "PoolStateError",
        "PoolUsage",
        "Reservation",
        "Slot",
        "SlotState",
    ]
