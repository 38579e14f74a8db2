"""Many scenarios of one family, until a number of scheduler steps is reached, and what became of all tokens."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.scheduler.scenario import Family, draw


@dataclass
class Totals:
    """What has been run.

    Attributes:
        seconds: wall time.
        outcomes: tokens by outcome, "captured" or a reason.
        seen: what happened, by name.
    """

    scenarios: int = 0
    steps: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)


def run_campaign(family: Family, steps: int, first_seed: int = 0) -> Totals:
    """Run scenarios of `family` with seeds from `first_seed` on.

    Raises:
        AssertionError: one of them did not hold.
    """
    # Here, because the tests are collected where vLLM is not installed.
    from tests.scheduler.engine import simulate

    totals, begin = Totals(), time.monotonic()
    for seed in itertools.count(first_seed):
        if totals.steps >= steps:
            break
        engine = simulate(draw(family, seed))
        totals.scenarios += 1
        totals.steps += engine.steps
        totals.outcomes += engine.worker.outcomes()
        totals.seen += engine.seen
    totals.seconds = time.monotonic() - begin
    return totals
