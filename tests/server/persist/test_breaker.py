"""When something that keeps failing is tried again."""

from __future__ import annotations

import pytest

from lmcache_qserver.qstore.persist.breaker import Breaker


@pytest.fixture
def breaker() -> Breaker:
    return Breaker(threshold=3, first_pause_s=1.0, longest_pause_s=4.0)


def test_it_opens_after_so_many_failures_in_a_row(breaker: Breaker) -> None:
    breaker.failed(0.0)
    breaker.failed(0.0)
    breaker.worked()
    breaker.failed(0.0)
    breaker.failed(0.0)
    assert breaker.allows(0.0)
    assert not breaker.is_open
    breaker.failed(10.0)
    assert breaker.is_open
    assert not breaker.allows(10.0)
    assert breaker.wait_s(10.25) == 0.75


def test_one_attempt_a_pause_for_who_asks_first(breaker: Breaker) -> None:
    for _ in range(3):
        breaker.failed(0.0)
    assert not breaker.allows(0.99)
    assert breaker.allows(1.0)
    assert not breaker.allows(1.0)
    assert not breaker.allows(1.99), "the attempt may take its time"
    assert breaker.allows(2.0), "nobody has said what became of it"


def test_pauses_double_up_to_the_longest_and_begin_anew(breaker: Breaker) -> None:
    now, pauses = 0.0, []
    for _ in range(3):
        breaker.failed(now)
    for _ in range(5):
        pauses.append(breaker.wait_s(now))
        now += pauses[-1]
        assert breaker.allows(now)
        breaker.failed(now)
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]
    breaker.worked()
    assert not breaker.is_open
    assert breaker.allows(now)
    assert breaker.wait_s(now) == 0.0
    for _ in range(3):
        breaker.failed(now)
    assert breaker.wait_s(now) == 1.0
