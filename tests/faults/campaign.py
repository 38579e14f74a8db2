"""Many runs, and what became of them."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.run import Outcome, Run
from tests.faults.scenario import Fault, Scenario, draw
from tests.faults.stage import Patience, Stage

IMPATIENT = Patience(reap_timeout_s=0.4, lease_timeout_s=0.3, reply_timeout_s=0.4)
CHECK_EVERYTHING_EVERY = 25


@dataclass
class Totals:
    """What has been run.

    Attributes:
        outcomes: runs by (victim, fault, what was under way).
        stored: runs by (victim, how much of the prompt was there afterwards).
        gone_s, back_s: of each run that has one, see `Outcome`.
        boots: servers started.
    """

    runs: int = 0
    seconds: float = 0.0
    boots: int = 0
    outcomes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    stored: Counter[tuple[str, str]] = field(default_factory=Counter)
    gone_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)

    def note(self, scenario: Scenario, outcome: Outcome) -> None:
        """Count a run."""
        victim = scenario.victim.value
        self.runs += 1
        self.outcomes[victim, scenario.fault.value, outcome.under_way] += 1
        self.stored[f"{victim}, {scenario.fault.value}", outcome.stored] += 1
        if outcome.gone_s is not None:
            self.gone_s.append(outcome.gone_s)
        if outcome.back_s is not None:
            self.back_s.append(outcome.back_s)

    @property
    def hit_share(self) -> float:
        """Part of the runs in which something was under way."""
        idle = sum(count for (_, _, what), count in self.outcomes.items() if what == "idle")
        return 1 - idle / max(self.runs, 1)


def run_campaign(count: int, seed: int, first: int = 0) -> Totals:
    """`count` runs of a seed, from number `first` on.

    Raises:
        AssertionError: one of them did not hold; its scenario is in the message.
    """
    totals, began = Totals(), time.monotonic()
    stages: dict[bool, Stage] = {}
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="qserver-faults-"))
        for number in range(first, first + count):
            scenario = draw(seed, number)
            is_long = scenario.fault is Fault.LONG_PAUSE
            if is_long not in stages:
                place = Path(folder) / ("impatient" if is_long else "patient")
                place.mkdir()
                stages[is_long] = Stage(place, IMPATIENT if is_long else Patience())
                cleanup.callback(stages[is_long].abandon)
                stages[is_long].open()
            _play(stages[is_long], scenario, totals, seed)
        for stage in stages.values():
            stage.check_everything()
            totals.boots += stage.boots
            stage.close()
    totals.seconds = time.monotonic() - began
    return totals


def _play(stage: Stage, scenario: Scenario, totals: Totals, seed: int) -> None:
    try:
        totals.note(scenario, Run(stage, scenario).play())
        if totals.runs % CHECK_EVERYTHING_EVERY == 0:
            stage.check_everything()
    except Exception as error:
        log = stage.daemon.log()[-3000:]
        raise AssertionError(
            f"seed {seed}: {scenario}\n{type(error).__name__}: {error}\n{log}"
        ) from error
