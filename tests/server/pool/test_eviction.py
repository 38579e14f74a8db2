"""Policies: who goes first."""

import pytest

from lmcache_qserver.pool.eviction import POLICIES, LeastRecentlyUsed, NoEviction
from lmcache_qserver.pool.slot import Slot


def slots(count: int) -> list[Slot]:
    return [Slot(4096 * i, 4096, 4096, f"owner {i}", i + 1) for i in range(count)]


def test_lru_goes_by_last_use() -> None:
    policy = LeastRecentlyUsed()
    a, b, c, d = slots(4)
    for slot in (b, a, c, d):
        policy.add(slot)
    assert list(policy) == [b, a, c, d]
    policy.touch(a)
    policy.remove(c)
    assert list(policy) == [b, d, a]
    policy.add(c)
    assert list(policy) == [b, d, a, c]


def test_lru_tells_of_slots_that_it_does_not_have() -> None:
    policy = LeastRecentlyUsed()
    (slot,) = slots(1)
    with pytest.raises(KeyError):
        policy.remove(slot)
    with pytest.raises(KeyError):
        policy.touch(slot)


def test_none_has_no_victims() -> None:
    policy = NoEviction()
    (slot,) = slots(1)
    policy.add(slot)
    policy.touch(slot)
    assert list(policy) == []
    policy.remove(slot)


def test_the_closed_set_of_policies() -> None:
    assert sorted(POLICIES) == ["lru", "none"]
