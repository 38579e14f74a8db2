"""The ledger against a toy engine: whatever is scheduled, a chunk is handed out right or not at all."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from lmcache_qprotocol.reasons import LossReason
from tests.worker_client.capture.engine import Chances, Engine
from tests.worker_client.capture.worker import Worker

MANY = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))

rings = st.sampled_from([(8, 4), (8, 8), (6, 3), (12, 4), (4, 1), (1, 1)])
"""(chunk size, ring block size)"""
chances = st.builds(
    Chances,
    preempt=st.sampled_from([0.0, 0.1, 0.4]),
    abort=st.sampled_from([0.0, 0.05]),
    drafts=st.sampled_from([0.0, 0.7]),
    prefix_hit=st.sampled_from([0.0, 0.6]),
    stop_early=st.sampled_from([0.0, 0.1]),
)


def simulate(
    seed: int,
    ring: tuple[int, int],
    engine_block: int,
    budget: int,
    ring_blocks: int,
    chances: Chances,
    fail: float = 0.0,
    pieces: bool = False,
    idle: float = 0.0,
) -> Worker:
    """Ten requests (some under a former one's id) until all are done; returns the worker after its flush."""
    random = Random(seed)
    engine = Engine(random, block_size=engine_block, budget=budget, max_running=3, chances=chances)
    worker = Worker(
        random,
        chunk_size=ring[0],
        block_size=ring[1],
        engine_block_size=engine_block,
        ring_blocks=ring_blocks,
        pieces=pieces,
    )
    ids = iter(["a", "b", "c", "d", "a", "b", "e", "a", "f", "g"])
    busy: set[str] = set()
    for _ in range(400):
        busy = {request.request_id for request in [*engine.waiting, *engine.running]}
        while len(busy) < 4 and (name := next(ids, None)) is not None:
            if name in busy:
                continue
            engine.add(name, random.randint(1, 30), random.randint(1, 20))
            busy.add(name)
        worker.step(engine.step(), fail=fail)
        if random.random() < idle:
            worker.idle(None)
        if not engine.busy:
            break
    assert worker.account.computed == engine.computed
    if random.random() < 0.5:
        worker.step(
            engine.step()
        )  # a server's idle step tells of the last ends; an in-process engine runs none
    worker.end()
    return worker


@MANY
@given(
    st.integers(0, 1 << 32),
    rings,
    st.sampled_from([1, 3, 4, 5, 16]),
    st.sampled_from([1, 5, 7, 13, 64]),
    st.sampled_from([2, 5, 11, 200]),
    chances,
    st.sampled_from([0.0, 0.3]),
    st.booleans(),
    st.sampled_from([0.0, 0.0, 0.3]),
)
def test_right_or_absent_and_every_token_is_counted(
    seed: int,
    ring: tuple[int, int],
    engine_block: int,
    budget: int,
    ring_blocks: int,
    chances: Chances,
    fail: float,
    pieces: bool,
    idle: float,
) -> None:
    worker = simulate(seed, ring, engine_block, budget, ring_blocks, chances, fail, pieces, idle)
    for reason, count in worker.account.lost.items():
        event(f"lost to {reason.value}: {count > 0}")
    event(f"captured: {worker.account.captured > 0}")


@MANY
@given(st.integers(0, 1 << 32), rings, st.sampled_from([1, 4, 5]), chances, st.booleans())
def test_token_ids_that_come_late_bind_late(
    seed: int, ring: tuple[int, int], engine_block: int, chances: Chances, pieces: bool
) -> None:
    """Async scheduling: the scheduler knows a step's tokens one step later. (Drafts are another matter there.)"""
    late = Chances(
        preempt=chances.preempt, abort=chances.abort, prefix_hit=chances.prefix_hit, lag=1
    )
    simulate(seed, ring, engine_block, 11, 40, late, pieces=pieces)


@pytest.mark.parametrize("drafts", [0.0, 0.7])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    ring=rings,
    engine_block=st.sampled_from([1, 4, 5, 16]),
    budget=st.sampled_from([1, 7, 13, 64]),
    prefix_hit=st.sampled_from([0.0, 0.6]),
)
def test_with_room_and_without_preemption_all_whole_chunks_are_captured(
    drafts: float,
    seed: int,
    ring: tuple[int, int],
    engine_block: int,
    budget: int,
    prefix_hit: float,
) -> None:
    """Whole chunks inside [first computed position, length - 1): the last sampled token never gets a row."""
    random = Random(seed)
    chances = Chances(drafts=drafts, prefix_hit=prefix_hit)
    engine = Engine(random, block_size=engine_block, budget=budget, max_running=4, chances=chances)
    worker = Worker(
        random,
        chunk_size=ring[0],
        block_size=ring[1],
        engine_block_size=engine_block,
        ring_blocks=500,
    )
    for name in "abcdef":
        engine.add(name, random.randint(1, 40), random.randint(1, 25))
    while engine.busy:
        worker.step(engine.step())
    worker.step(engine.step())
    worker.end()
    size = ring[0]
    for request in engine.ended:
        first, last = -(-request.first_start // size), (len(request.tokens) - 1) // size
        assert worker.received[request.request_id] == size * max(0, last - first)
    allowed = {LossReason.TAIL_OFF, LossReason.REJECTED_DRAFT, LossReason.POOL_FULL}
    allowed.add(LossReason.DISCARDED_AFTER_FINISH)
    assert {reason for reason, count in worker.account.lost.items() if count} <= allowed


def run(
    seed: int, ring: tuple[int, int], engine_block: int, budget: int, chances: Chances
) -> tuple[Engine, Worker]:
    """Six requests with all the room they need, to their ends, pieces and all."""
    random = Random(seed)
    engine = Engine(random, block_size=engine_block, budget=budget, max_running=4, chances=chances)
    worker = Worker(
        random,
        chunk_size=ring[0],
        block_size=ring[1],
        engine_block_size=engine_block,
        ring_blocks=500,
        pieces=True,
    )
    for name in "abcdef":
        engine.add(name, random.randint(1, 40), random.randint(1, 25))
    while engine.busy:
        worker.step(engine.step())
    worker.step(engine.step())
    worker.end()
    return engine, worker


everything = given(
    seed=st.integers(0, 1 << 32),
    ring=rings,
    engine_block=st.sampled_from([1, 3, 4, 5, 16]),
    budget=st.sampled_from([1, 7, 13, 64]),
    preempt=st.sampled_from([0.0, 0.1, 0.4]),
    prefix_hit=st.sampled_from([0.0, 0.6, 1.0]),
)


@settings(max_examples=150, deadline=None)
@everything
def test_with_pieces_every_computed_token_is_captured_once(
    seed: int,
    ring: tuple[int, int],
    engine_block: int,
    budget: int,
    preempt: float,
    prefix_hit: float,
) -> None:
    """Whatever was preempted and resumed wherever: what was computed again is all that is lost."""
    chances = Chances(preempt=preempt, prefix_hit=prefix_hit, abort=0.02)
    engine, worker = run(seed, ring, engine_block, budget, chances)
    computed = {(one.request_id, position) for one in engine.ended for position in one.written}
    assert worker.positions == dict.fromkeys(computed, 1)
    lost = {reason for reason, count in worker.account.lost.items() if count}
    assert lost <= {LossReason.RECOMPUTED, LossReason.POOL_FULL}
    assert worker.account.lost[LossReason.RECOMPUTED] == engine.computed - len(computed)


@settings(max_examples=60, deadline=None)
@everything
def test_with_pieces_and_drafts_every_accepted_token_is_captured(
    seed: int,
    ring: tuple[int, int],
    engine_block: int,
    budget: int,
    preempt: float,
    prefix_hit: float,
) -> None:
    """[first computed position, length - 1), without preemption: the last sampled token never has a row."""
    engine, worker = run(
        seed, ring, engine_block, budget, Chances(drafts=0.7, prefix_hit=prefix_hit)
    )
    for one in engine.ended:
        positions = {at for name, at in worker.positions if name == one.request_id}
        assert positions == set(range(one.first_start, len(one.tokens) - 1))
    assert set(worker.positions.values()) <= {1}
    lost = {reason for reason, count in worker.account.lost.items() if count}
    assert lost <= {
        LossReason.REJECTED_DRAFT,
        LossReason.DISCARDED_AFTER_FINISH,
        LossReason.POOL_FULL,
    }
