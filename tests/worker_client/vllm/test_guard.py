"""A scheduler hook that fails reaches nobody, and nothing wrong is stored afterwards (tracker, guard, ledger).

Engine block 4, chunk 4, ring block 4.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_qclient.capture.account import Account
from lmcache_qclient.capture.blocks import BlockAllocator
from lmcache_qclient.capture.ledger import Ledger
from lmcache_qclient.capture.step import StepMeta
from lmcache_qclient.vllm.guard import ScheduleGuard
from lmcache_qclient.vllm.schedule import ScheduleTracker
from lmcache_qprotocol.reasons import LossReason as Loss
from tests.worker_client.vllm.test_schedule import Cached, Request, cached, new, output


class Engine:
    """A guarded scheduler and one worker's ledger."""

    def __init__(self) -> None:
        self.guard = ScheduleGuard(ScheduleTracker(group_index=1, block_size=4))
        self.account = Account()
        self.blocks = BlockAllocator(20)
        self.ledger = Ledger(
            chunk_size=4,
            block_size=4,
            engine_block_size=4,
            allocate=self.blocks.allocate,
            free=self.blocks.free,
            account=self.account,
        )

    def tell(self, out: Any) -> StepMeta:
        """One step, up to the ledger; what it hands out is stored."""
        meta = self.guard.build(out)
        self.ledger.begin_step(meta)
        for chunk in self.ledger.end_step():
            self.account.captured += chunk.tokens
            self.blocks.free(chunk.blocks)
        return meta

    def start(self, name: str, count: int) -> Request:
        """A request of 20 tokens computes its first `count`."""
        request = Request(name, list(range(20)))
        self.guard.request_allocated(request)
        self.tell(output({name: count}, (new(name, 0, [11, 12, 13, 14, 15]),)))
        return request


@pytest.fixture
def engine() -> Engine:
    return Engine()


class Poison(Cached):
    """A `CachedRequestData` of another vLLM: its rows can be read, but for one thing."""

    @property
    def resumed_req_ids(self) -> set[str]:
        raise AttributeError("no such field in this version")

    @resumed_req_ids.setter
    def resumed_req_ids(self, value: set[str]) -> None:
        pass


def test_a_step_that_can_not_be_told_ends_capture_of_all_that_were_there(engine: Engine) -> None:
    a = engine.start("a", 6)
    poison = Poison(["a"], set(), [([900], [13])], [6])
    assert engine.tell(output({"a": 2}, old=poison)) == StepMeta(untold=2)
    (step,) = engine.tell(output({"a": 12}, old=cached(("a", 8, None)))).requests
    assert step.skip is Loss.CAPTURE_DISABLED
    engine.guard.request_finished(a)
    engine.start("b", 5)
    assert engine.account.captured == 4 + 4, "a's first chunk, b's first"
    assert engine.account.lost == {Loss.CAPTURE_DISABLED: 2 + 2 + 12}
    assert engine.account.pending == 1
    assert engine.blocks.num_free == 19


def test_the_ends_of_requests_survive_a_step_that_can_not_be_told(engine: Engine) -> None:
    a = engine.start("a", 6)
    engine.guard.request_finished(a)
    meta = engine.tell(output({"b": 2}, old=Poison(["b"])))
    assert [ended.request_id for ended in meta.finished] == ["a"]
    assert engine.blocks.num_free == 20


def test_an_allocation_that_was_missed(engine: Engine) -> None:
    engine.guard.request_allocated(SimpleNamespace())
    engine.tell(output({"a": 8}, (new("a", 0, [11, 12]),)))
    assert engine.guard.failures == 1
    assert engine.account.lost == {Loss.CAPTURE_DISABLED: 8}


def test_an_end_that_can_not_be_told_stores_nothing_more(engine: Engine) -> None:
    a = engine.start("a", 6)
    a.all_token_ids = None  # type: ignore[assignment]
    engine.guard.request_finished(a)
    engine.guard.request_finished(SimpleNamespace())
    engine.tell(output({}))
    assert engine.guard.failures == 2
    assert engine.account.lost == {Loss.CAPTURE_DISABLED: 2}
    assert engine.account.pending == 0


def test_an_output_of_which_nothing_can_be_read(engine: Engine) -> None:
    engine.start("a", 6)
    assert engine.tell(SimpleNamespace()) == StepMeta()
    (step,) = engine.tell(output({"a": 2}, old=cached(("a", 6, None)))).requests
    assert step.skip is Loss.CAPTURE_DISABLED


def test_each_hook_is_logged_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            engine.guard.build(SimpleNamespace())
            engine.guard.request_finished(SimpleNamespace())
    assert len(caplog.records) == 2
    assert engine.guard.failures == 6


# --- asked between steps --------------------------------------------------------------------------


def test_between_steps_each_end_is_told_once_and_no_more_than_asked_for(engine: Engine) -> None:
    for name in "abc":
        ended = engine.start(name, 6)
        engine.guard.request_finished(ended)
        meta = engine.tell(output({}))
        assert [one.request_id for one in meta.finished] == [name]
    for name in "def":
        engine.start(name, 4)
    meta = engine.tell(output({}))
    for name in "def":
        engine.guard.request_finished(engine.guard._tracker._requests[name].request)
    told = [[one.request_id for one in engine.guard.ended_since(meta, most=2)] for _ in range(3)]
    assert told == [["d", "e"], ["f"], []]
    assert engine.tell(output({})).finished == ()


def test_while_a_later_step_is_under_way_no_end_is_told(engine: Engine) -> None:
    a = engine.start("a", 6)
    done = engine.guard.build(output({"a": 1}, old=cached(("a", 6, None))))
    engine.guard.request_finished(a)
    engine.guard.build(output({}))
    b = Request("b", list(range(4)))
    engine.guard.request_allocated(b)
    engine.guard.build(output({"b": 4}, (new("b", 0, [11]),)))
    engine.guard.request_finished(b)
    assert engine.guard.ended_since(done, most=9) == ()
    assert engine.guard.ended_since(None, most=9) == ()
    assert [one.request_id for one in engine.tell(output({})).finished] == ["b"]
