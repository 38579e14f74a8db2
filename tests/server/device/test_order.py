"""Planted faults of order: the simulated device shows every one, and shows nothing where none is planted.

What each must show, over many seeds, is written with it: wrong bytes called proven, a copy that is not over when it is
said to be, a broken rule of device memory, or a refusal where a sound copy would have stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lmcache_qserver.copying import ChunkCopy
from lmcache_qserver.device.ring_copy import RingCopy
from tests.server.device.sim_world import Findings, SimWorker, run, store_twice

SEEDS = range(300)


def findings(
    copy_class: type[RingCopy] = RingCopy, worker_class: type[SimWorker] = SimWorker
) -> Findings:
    return sum((run(seed, copy_class, worker_class) for seed in SEEDS), Findings())


class ReusesBlocksEarly(SimWorker):
    """Fault of the worker: gives blocks away before their store has been answered."""

    def after_submit(self, number: int, blocks: Sequence[int]) -> None:
        self.write(number + 500, blocks, record=False)


class CopiesBeforeTheEvent(RingCopy):
    """Fault: the worker's event is not waited for."""

    def _wait_for_worker(self, event: bytes) -> None:
        pass


class ReadsStampsFirst(RingCopy):
    """Fault: stamps are copied before rows."""

    def copy(self, chunks: Sequence[ChunkCopy], event: bytes) -> object:  # type: ignore[override]  # a planted fault
        self._prepare_stamps(sum(len(chunk.block_ids) for chunk in chunks))
        self._wait_for_worker(event)
        place = 0
        for chunk in chunks:
            self._queue_stamps(chunk, place)
            place += len(chunk.block_ids)
        for chunk in chunks:
            self._queue_rows(chunk)
        self._wait_until_done()
        return self._prove(chunks)


class StampsOnAnotherStream(RingCopy):
    """Fault: nothing orders the copy of the stamps behind that of the rows."""

    def _queue_stamps(self, chunk: ChunkCopy, place: int) -> None:
        own, self._stream = self._stream, self._api.create_stream()
        super()._queue_stamps(chunk, place)
        other, self._stream = self._stream, own
        after = self._api.create_event()
        self._api.record_event(after, other)
        self._api.stream_wait_event(own, after)


class AnswersBeforeCompletion(RingCopy):
    """Fault: the copy is called over when it has been queued."""

    def _wait_until_done(self) -> None:
        pass


class AnswersWhenStampsAreThere(RingCopy):
    """Fault: looks at the stamps until they fit, instead of waiting, and they come first."""

    def copy(self, chunks: Sequence[ChunkCopy], event: bytes) -> object:  # type: ignore[override]  # a planted fault
        self._prepare_stamps(sum(len(chunk.block_ids) for chunk in chunks))
        self._wait_for_worker(event)
        self._queue_stamps(chunks[0], 0)
        self._queue_rows(chunks[0])
        for _ in range(1000):
            fault = self._prove(chunks)
            if fault is None:
                break
            self._api.step()  # type: ignore[attr-defined]  # the simulated device
        return fault


class KeepsOldStamps(AnswersBeforeCompletion):
    """Fault: answers early, and the stamps' buffer still holds what the copy before has left there."""

    def _prepare_stamps(self, blocks: int) -> None:
        if self._stamps is None:
            super()._prepare_stamps(blocks)


class ClosesWithoutDraining(AnswersBeforeCompletion):
    """Fault: memory is let go while copies out of it are under way."""

    def _drain(self) -> None:
        pass


def test_a_sound_copy_is_right_and_never_refused() -> None:
    found = findings()
    assert (found.refused, found.wrong, found.late, found.broken) == (0, 0, 0, [])
    assert found.stored == 6 * len(SEEDS)


def test_blocks_that_are_reused_early_are_refused_or_right_and_never_wrong() -> None:
    found = findings(worker_class=ReusesBlocksEarly)
    assert found.refused > 0, "the stamps show it"
    assert found.stored > 0, "and some copies were faster"
    assert (found.wrong, found.late, found.broken) == (0, 0, [])


def test_a_copy_before_the_workers_event_is_seen() -> None:
    found = findings(CopiesBeforeTheEvent)
    assert found.wrong > 0
    assert found.refused > 0


@pytest.mark.parametrize("fault", [ReadsStampsFirst, StampsOnAnotherStream])
def test_stamps_that_are_not_read_behind_the_rows_are_seen(fault: type[RingCopy]) -> None:
    assert findings(fault, ReusesBlocksEarly).wrong > 0


def test_an_answer_before_completion_is_seen() -> None:
    found = findings(AnswersBeforeCompletion)
    assert found.refused > 0
    assert found.wrong == 0, "the emptied buffer of stamps keeps it from being believed"


def test_an_answer_before_completion_is_seen_as_a_copy_that_is_not_over() -> None:
    found = findings(AnswersWhenStampsAreThere)
    assert found.late > 0
    assert found.wrong > 0


def test_a_chunk_in_the_same_place_twice_needs_the_emptied_buffer() -> None:
    """The same nonce and positions again: old stamps in the buffer would prove anything."""
    assert _same_chunk_twice(AnswersBeforeCompletion).wrong == 0
    assert _same_chunk_twice(KeepsOldStamps).wrong > 0


def test_memory_that_is_let_go_under_a_copy_is_seen() -> None:
    found = findings(ClosesWithoutDraining)
    assert any(
        "dropped under a copy" in what or "destroyed with work" in what for what in found.broken
    )


def test_a_run_is_the_same_for_the_same_seed() -> None:
    assert run(7, CopiesBeforeTheEvent) == run(7, CopiesBeforeTheEvent)
    assert len({repr(run(seed, CopiesBeforeTheEvent)) for seed in range(20)}) > 1


def _same_chunk_twice(copy_class: type[RingCopy]) -> Findings:
    return sum((store_twice(seed, copy_class) for seed in SEEDS), Findings())
