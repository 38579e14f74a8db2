"""Pages come without being asked for twice, and a failure reaches whoever waits."""

from __future__ import annotations

import concurrent.futures
import errno
import mmap
import os
import threading

import pytest

from lmcache_qserver.pool import memory as memory_module
from lmcache_qserver.pool.populating import POPULATE_STEP_BYTES, Populating, begin

NBYTES = 3 * mmap.PAGESIZE


def test_all_steps_are_populated_then_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        memory_module.PoolMemory, "populate", lambda self, *step: asked.append(step)
    )
    nbytes = POPULATE_STEP_BYTES + NBYTES
    populating = Populating(nbytes)
    assert populating.done.result(20) is None
    assert asked == [(0, POPULATE_STEP_BYTES), (POPULATE_STEP_BYTES, NBYTES)]
    assert os.fstat(populating.memory.fd).st_blocks * 512 >= nbytes, "the pages are there"
    populating.memory.close()


def test_a_failure_is_the_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no pages")

    monkeypatch.setattr(memory_module.PoolMemory, "populate", refuse)
    populating = Populating(NBYTES)
    with pytest.raises(OSError, match="no pages"):
        populating.done.result(20)
    populating.memory.close()


def test_it_stops_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, gate = threading.Event(), threading.Event()
    steps: list[int] = []

    def wait(self: object, offset: int, nbytes: int) -> None:
        steps.append(offset)
        entered.set()
        assert gate.wait(20)

    monkeypatch.setattr(memory_module.PoolMemory, "populate", wait)
    populating = Populating(1 << 30)
    assert entered.wait(20)
    populating.stop()
    gate.set()
    populating._thread.join(20)
    assert steps == [0]
    with pytest.raises(concurrent.futures.CancelledError):
        populating.done.result(0)
    populating.memory.close()


def test_memory_that_cannot_be_had_is_left_to_the_daemon() -> None:
    assert begin(1 << 62) is None
