"""A full ring: who waits, how long, and for what."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import pytest
import torch

from lmcache_qclient.capture.account import Account
from lmcache_qclient.capture.adapter import QRingBufferAdapter
from lmcache_qclient.capture.full_ring import WaitForRoom
from lmcache_qclient.capture.ring import QRingBuffer


class Stores:
    """Stores under way, each of one block; the first is answered when somebody waits for it."""

    def __init__(self, ring: QRingBuffer, under_way: int, answers: bool = True) -> None:
        self.ring, self.answers = ring, answers
        self.blocks = ring.allocate(under_way) or []
        self.answered: list[int] = []
        self.waits: list[float] = []
        self.account = Account()

    @property
    def stores_under_way(self) -> int:
        return len(self.blocks)

    def wait_for_any_store(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        assert len(self.waits) < 100_000, "it waits without end"
        if self.answers:
            self.answered.append(self.blocks.pop(0))

    def reclaim_finished_q_stores(self) -> int:
        self.ring.free(self.answered)
        self.answered = []
        return 1


def room(stores: Stores, wait_s: float) -> WaitForRoom:
    return WaitForRoom(stores.ring, [cast(QRingBufferAdapter, stores)], wait_s)


@pytest.fixture
def ring() -> QRingBuffer:
    return QRingBuffer(1, 4, 2, 2, torch.float32)


def test_without_patience_a_full_ring_is_full(ring: QRingBuffer) -> None:
    stores = Stores(ring, 4)
    assert room(stores, 0.0).allocate(1) is None
    assert stores.waits == []


def test_room_that_is_there_is_given_at_once(ring: QRingBuffer) -> None:
    stores = Stores(ring, 2)
    assert room(stores, 5.0).allocate(2) == [2, 3]
    assert stores.waits == []


def test_it_waits_for_as_many_stores_as_it_takes(ring: QRingBuffer) -> None:
    stores = Stores(ring, 4)
    waiting = room(stores, 5.0)
    assert waiting.allocate(2) == [0, 1]
    assert len(stores.waits) == 2
    assert 0 < stores.account.waited_s < 5


def test_nothing_under_way_frees_nothing(ring: QRingBuffer) -> None:
    ring.allocate(4)
    assert room(Stores(ring, 0), 5.0).allocate(1) is None


def test_what_never_fits_is_not_waited_for(ring: QRingBuffer) -> None:
    stores = Stores(ring, 4)
    assert room(stores, 5.0).allocate(5) is None
    assert stores.waits == []


def test_a_step_waits_no_longer_than_it_may_in_all(ring: QRingBuffer) -> None:
    stores = Stores(ring, 4, answers=False)
    waiting = room(stores, 0.01)
    assert waiting.allocate(1) is None
    assert stores.account.report().waited_ms >= 10, "the server is told"
    spent = len(stores.waits)
    assert stores.waits[0] == 0.01
    assert all(later < earlier for earlier, later in pairwise(stores.waits))
    assert waiting.allocate(1) is None
    assert len(stores.waits) == spent, "the step's patience was spent already"
    waiting.step_begins()
    assert waiting.allocate(1) is None
    assert len(stores.waits) > spent
