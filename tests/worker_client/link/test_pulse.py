"""The heartbeat's clockwork, with time as an argument."""

from __future__ import annotations

import pytest

from lmcache_qclient.link.pulse import Pulse


def test_pings_come_at_the_interval() -> None:
    pulse = Pulse(10.0, now=100.0)
    assert pulse.wait_s(100.0) == 10.0
    assert pulse.wait_s(109.0) == 1.0
    assert pulse.wait_s(111.0) == 0.0
    pulse.answered(111.0)
    assert pulse.wait_s(112.0) == 9.0


def test_beat_now() -> None:
    pulse = Pulse(10.0, now=0.0)
    pulse.beat_now(3.0)
    assert pulse.wait_s(3.0) == 0.0


def test_tries_are_spaced_ever_wider() -> None:
    pulse = Pulse(10.0, now=0.0)
    pulse.lost(0.0)
    assert not pulse.healthy
    waits = []
    for _ in range(7):
        waits.append(pulse.wait_s(0.0))
        pulse.failed(0.0)
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    pulse.restored(5.0)
    assert pulse.healthy
    assert pulse.wait_s(5.0) == 10.0
    pulse.lost(6.0)
    assert pulse.wait_s(6.0) == pytest.approx(0.1)
