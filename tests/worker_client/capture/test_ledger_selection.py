"""Positions that are not selected: counted, never given a row. Chunk 8, ring block 4."""

from __future__ import annotations

import pytest

from lmcache_qclient.capture.finished_chunk import FinishedChunk
from lmcache_qclient.capture.step import StepMeta
from lmcache_qprotocol.limits import MAX_POSITION
from lmcache_qprotocol.reasons import LossReason as Loss
from tests.worker_client.capture.test_ledger import Bench, ranges

END = MAX_POSITION + 1


def run(
    bench: Bench, selected: tuple[int, int] | None, prompt: int, length: int
) -> list[FinishedChunk]:
    """A prompt in steps of 5, then decode; all that is handed out."""
    chunks = bench.step(bench.part("a", 0, min(5, prompt), first=True, selected=selected))
    for start in range(5, prompt, 5):
        chunks += bench.step(bench.part("a", start, min(start + 5, prompt)))
    for start in range(prompt, length - 1):
        chunks += bench.step(bench.part("a", start, start + 1))
    return [*chunks, *bench.step(finished=(bench.end("a", length),))]


@pytest.mark.parametrize(
    ("selected", "stored", "captured"),
    [
        (None, [(0, 8), (8, 16), (16, 20)], 20),
        ((0, 11), [(0, 8), (8, 11)], 11),
        ((0, 8), [(0, 8)], 8),
        ((11, END), [(11, 16), (16, 20)], 9),
        ((8, END), [(8, 16), (16, 20)], 12),
        ((6, 7), [(6, 7)], 1),
        ((0, 0), [], 0),
        ((20, END), [], 0),
    ],
)
def test_what_is_selected_is_stored_and_the_rest_is_counted(
    selected: tuple[int, int] | None, stored: list[tuple[int, int]], captured: int
) -> None:
    it = Bench(pieces=True)
    assert ranges(run(it, selected, prompt=11, length=21)) == stored
    lost = {Loss.NOT_SELECTED: 20 - captured} if captured < 20 else {}
    assert it.lost == lost
    assert it.account.computed == 20
    assert it.ledger.open_chunks == 0


def test_a_prompt_that_ends_inside_a_chunk_does_not_hold_its_blocks_while_it_decodes() -> None:
    it = Bench(pieces=True)
    handed = it.step(it.part("a", 0, 11, first=True, selected=(0, 11)))
    assert sorted(ranges(handed)) == [(0, 8), (8, 11)]
    assert it.ledger.open_chunks == 0


def test_without_pieces_a_part_that_can_not_become_whole_is_lost_at_once() -> None:
    it = Bench(pieces=False)
    assert ranges(it.step(it.part("a", 0, 11, first=True, selected=(0, 11)))) == [(0, 8)]
    assert it.lost == {Loss.TAIL_OFF: 3}
    it.step(it.part("a", 11, 12))
    assert it.lost == {Loss.TAIL_OFF: 3, Loss.NOT_SELECTED: 1}
    assert it.ledger.open_chunks == 0


@pytest.mark.parametrize("pieces", [True, False])
def test_rows_of_one_step_never_share_a_place(pieces: bool) -> None:
    """Where one request's selection ends, another's rows of the same step do not take what has been planned for it."""
    it = Bench(pieces=pieces)
    parts = [it.part(name, 0, 11, first=True, selected=(0, 11)) for name in "abc"]
    plan = it.ledger.begin_step(StepMeta(tuple(parts)))
    places = [run.ring_slot + at for run in plan.runs for at in range(run.length)]
    assert len(places) == len(set(places)) == (33 if pieces else 24)
    whole, tail = [(0, 8)] * 3, [(8, 11)] * 3
    assert sorted(ranges(it.ledger.end_step())) == ([*whole, *tail] if pieces else whole)
    assert it.lost == ({} if pieces else {Loss.TAIL_OFF: 9})


def test_drafts_that_are_not_selected_are_counted_once() -> None:
    it = Bench(pieces=True)
    it.step(it.part("a", 0, 8, first=True, selected=(0, 8)))
    it.step(it.part("a", 8, 12, drafts=3))
    it.step(it.part("a", 9, 10))
    assert it.lost == {Loss.NOT_SELECTED: 5}
    assert it.account.computed == 13


def test_a_request_computed_again_keeps_its_selection() -> None:
    it = Bench(pieces=True)
    handed = it.step(it.part("a", 0, 11, first=True, selected=(0, 11)))
    handed += it.step(it.part("a", 11, 12))
    handed += it.step(it.part("a", 0, 13, resumed=True))
    assert sorted(ranges(handed)) == [(0, 8), (8, 11)]
    assert it.lost == {Loss.NOT_SELECTED: 3, Loss.RECOMPUTED: 11}
