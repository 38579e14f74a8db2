"""vLLM's real schedulers before our worker's side: whatever they schedule, a chunk is stored right or not at all.

`QSERVER_SCHEDULER_STEPS=50000` runs longer than the default; `python -m tests.scheduler` prints what became of the
tokens. A failure tells its scenario: `simulate(draw(family, seed))` runs it again.
"""

from __future__ import annotations

import functools
import os
from collections import Counter

import pytest

from lmcache_qprotocol.reasons import LossReason as Loss
from tests.scheduler.campaign import Totals, run_campaign
from tests.scheduler.scenario import FAMILIES, Family, Scenario, draw

pytestmark = pytest.mark.vllm

STEPS = int(os.environ.get("QSERVER_SCHEDULER_STEPS", "10000"))
by_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@functools.cache
def campaign(family: Family) -> Totals:
    """A family's share of the steps; run once."""
    return run_campaign(family, STEPS // len(FAMILIES))


@by_family
def test_right_or_absent_and_every_token_is_counted(family: Family) -> None:
    totals = campaign(family)
    assert totals.outcomes["captured"] > 0


def test_the_scenarios_are_about_something() -> None:
    """Every reason that a scheduler can cause occurs, and so does all that the scenarios are made for."""
    outcomes: Counter[str] = sum((campaign(family).outcomes for family in FAMILIES), Counter())
    seen: Counter[str] = sum((campaign(family).seen for family in FAMILIES), Counter())
    for reason in (
        Loss.RING_FULL,
        Loss.RECOMPUTED,
        Loss.REJECTED_DRAFT,
        Loss.DISCARDED_AFTER_FINISH,
        Loss.TAIL_OFF,
        Loss.POOL_FULL,
        Loss.SERVER_UNAVAILABLE,
        Loss.CAPTURE_DISABLED,
        Loss.UNMATCHED,
        Loss.LAYER_MISSING,
        Loss.NOT_SELECTED,
    ):
        assert outcomes[reason.value] > 0, reason
    for what in (
        "resumed as cached",
        "resumed as new",
        "prefix hit",
        "drafts",
        "aborted",
        "reset",
        "foretold with preemption",
        "foretold with idle times",
        "ended while idle",
        "idle apart",
        "server gone",
        "selected otherwise than the engine says",
    ):
        assert seen[what] > 0, what
    assert seen["foretold"] >= len(FAMILIES)


@by_family
def test_a_worker_that_stops_at_any_step_stores_only_what_is_right(family: Family) -> None:
    """At shutdown there is no step that tells of ends: what is whole and named is stored, the rest is counted."""
    from tests.scheduler.engine import Engine

    for seed in range(3):
        engine = Engine(draw(family, 1000 + seed))
        for _ in range(engine.scenario.requests):
            engine.add_random()
        engine.run_rounds(5 + 9 * seed)
        engine.stop()


@pytest.mark.parametrize("pieces", [True, False])
@by_family
def test_c27_little_cache_two_long_requests(family: Family, pieces: bool) -> None:
    """10 cache blocks of 16, chunk 32, 101 new tokens each: preempted, resumed, and no whole chunk is lost."""
    from tests.scheduler.engine import Engine

    scenario = Scenario(
        family,
        seed=27,
        pieces=pieces,
        num_blocks=10,
        max_running=2,
        reserve=False,
        accept=0.7,
        drafts=family.drafts,
    )
    engine = Engine(scenario)
    engine.add("a", list(range(20)), 101)
    engine.add("b", list(range(40, 69)), 101)
    engine.finish()
    assert sum(life.request.num_preemptions for life in engine.lives) > 0
    assert engine.seen["resumed as new" if family.new_form else "resumed as cached"] > 0
    # 121 and 130 tokens; the last one of each is sampled and never computed.
    sizes = {"a": 120, "b": 129}
    stored = Counter(
        (item.chunk.request_id, position)
        for item in engine.worker.adapter.stored
        for position in range(item.chunk.start, item.chunk.end)
    )
    must = {
        (name, at)
        for name, size in sizes.items()
        for at in range(size if pieces else size // 32 * 32)
    }
    assert set(stored.values()) == {1}
    assert set(stored) == must


@pytest.mark.parametrize("pieces", [True, False])
@by_family
def test_what_a_prefix_hit_cut_off_is_captured_after_a_resume_from_the_beginning(
    family: Family, pieces: bool
) -> None:
    """A hit of 48 tokens leaves chunk [32, 64) without its head; computed again from 0 on it is all there."""
    from tests.scheduler.engine import Engine

    scenario = Scenario(family, seed=1, budget=200, drafts=family.drafts, pieces=pieces)
    engine = Engine(scenario)
    text = [5, 6, 7, 8] * 12
    engine.add("first", text, 1)
    while engine.busy:
        engine.round()
    engine.add("second", [*text, *range(9, 29)], 30)
    engine.run_rounds(3)
    assert engine.lives[1].steps[0].start == 48
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.finish()
    assert engine.lives[1].last_run[0].start == 0
    stored = sorted(
        (item.chunk.start, item.chunk.end)
        for item in engine.worker.adapter.stored
        if item.chunk.request_id == "second"
    )
    begin = [(0, 32), (32, 48), (48, 64)] if pieces else [(0, 32), (32, 64)]
    assert stored[: len(begin)] == begin


def test_drafts_under_asynchronous_scheduling_are_refused_at_start() -> None:
    from tests.scheduler.engine import Engine

    family = Family("async-drafts", asynchronous=True, depth=2, drafts=2)
    with pytest.raises(ValueError, match="--no-async-scheduling"):
        Engine(Scenario(family, seed=0, drafts=2))
