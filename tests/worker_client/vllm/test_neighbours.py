"""A worker finds the scheduler side of its own engine, in its own process, and no other."""

from __future__ import annotations

import gc
import os

import pytest

from lmcache_qclient.vllm.guard import ScheduleGuard
from lmcache_qclient.vllm.neighbours import announce, neighbour
from lmcache_qclient.vllm.schedule import ScheduleTracker


def guard() -> ScheduleGuard:
    return ScheduleGuard(ScheduleTracker(0, 16))


def test_the_scheduler_of_the_same_engine() -> None:
    one, other = guard(), guard()
    announce("engine one", one)
    announce("engine other", other)
    assert neighbour("engine one") is one
    assert neighbour("engine other") is other
    assert neighbour("engine none") is None


def test_of_two_under_one_id_nobody_knows_whose_is_whose() -> None:
    pair = [guard(), guard()]
    for one in pair:
        announce("a shared id", one)
    assert neighbour("a shared id") is None


def test_a_scheduler_that_is_gone_is_not_found() -> None:
    announce("engine gone", guard())
    gc.collect()
    assert neighbour("engine gone") is None


def test_a_forked_child_does_not_ask_the_copy_of_its_parents_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = guard()
    announce("engine forked", kept)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert neighbour("engine forked") is None
