"""Workers, readers and servers are killed and stopped at random points of stores and retrieves; see docs/faults.md."""

from __future__ import annotations

import pytest

from tests.faults.__main__ import report
from tests.faults.campaign import run_campaign
from tests.faults.scenario import Fault, Victim

RUNS = 200
LEAST_HIT_SHARE = 0.6
"""Signals that meet nothing prove little. On an idle machine more than four of five meet something."""


@pytest.mark.faults
def test_every_object_is_right_or_absent_and_nothing_is_left() -> None:
    totals = run_campaign(RUNS, seed=4)
    print(report(totals))
    assert totals.runs == RUNS
    assert totals.hit_share >= LEAST_HIT_SHARE
    hit = {(victim, fault) for victim, fault, under_way in totals.outcomes if under_way != "idle"}
    assert hit >= {
        (victim.value, fault.value) for victim in Victim for fault in (Fault.KILL, Fault.PAUSE)
    }
