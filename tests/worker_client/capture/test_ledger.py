"""The ledger's rules, one row each: what a step does, and where its tokens come to rest. Chunk 8, ring block 4.

Without pieces; test_ledger_pieces.py has what they change.
"""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_qclient.capture.account import Account
from lmcache_qclient.capture.blocks import BlockAllocator
from lmcache_qclient.capture.finished_chunk import FinishedChunk
from lmcache_qclient.capture.ledger import Ledger
from lmcache_qclient.capture.step import FinishedRequest, RequestStep, StepMeta
from lmcache_qprotocol.hashing import chunk_hashes
from lmcache_qprotocol.identity import Identity, LoraIdentity
from lmcache_qprotocol.reasons import LossReason as Loss
from lmcache_qprotocol.stamps import NONCE_LIMIT, first_stamp

TOKENS = list(range(1000, 1100))
CHUNK, BLOCK, ENGINE_BLOCK = 8, 4, 16


class Bench:
    """A ledger whose requests' token i is TOKENS[i] and whose cache block j is j + 1."""

    def __init__(self, ring_blocks: int = 50, *, pieces: bool = False, **options: int) -> None:
        self.account = Account()
        self.blocks = BlockAllocator(ring_blocks)
        self.ledger = Ledger(
            chunk_size=CHUNK,
            block_size=BLOCK,
            engine_block_size=ENGINE_BLOCK,
            allocate=self.blocks.allocate,
            free=self.blocks.free,
            account=self.account,
            pieces=pieces,
            **options,
        )
        self.known: dict[str, int] = {}

    def part(
        self,
        name: str,
        start: int,
        stop: int,
        *,
        drafts: int = 0,
        tokens: int | None = None,
        **more: Any,
    ) -> RequestStep:
        """Positions [start, stop) of a request, the last `drafts` of them guessed."""
        known = self.known.get(name, 0) if not more.get("first") else 0
        upto = stop - drafts if tokens is None else tokens
        self.known[name] = max(known, upto)
        first, last = start // ENGINE_BLOCK, (stop - 1) // ENGINE_BLOCK
        return RequestStep(
            name,
            start,
            stop - start,
            more.pop("block_ids", tuple(range(first + 1, last + 2))),
            settled=stop - drafts,
            new_tokens=tuple(TOKENS[known:upto]),
            tokens_from=more.pop("tokens_from", known),
            **more,
        )

    def end(self, name: str, length: int) -> FinishedRequest:
        """The request ends with `length` tokens."""
        known = self.known.get(name, 0)
        return FinishedRequest(name, length, tuple(TOKENS[known:length]), known)

    def step(
        self, *parts: RequestStep, finished: tuple[FinishedRequest, ...] = ()
    ) -> list[FinishedChunk]:
        """A whole step."""
        self.ledger.begin_step(StepMeta(parts, finished))
        return self.ledger.end_step()

    @property
    def lost(self) -> dict[Loss, int]:
        """Counted losses without zeros."""
        return {reason: count for reason, count in self.account.lost.items() if count}


def ranges(chunks: list[FinishedChunk]) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.end) for chunk in chunks]


def test_a_chunk_fills_over_steps_and_is_handed_out_when_whole() -> None:
    bench = Bench()
    assert bench.step(bench.part("a", 0, 5, first=True, cache_salt="s")) == []
    assert bench.account.pending == 5
    (chunk,) = bench.step(bench.part("a", 5, 9))
    assert chunk.chunk_hash == chunk_hashes(TOKENS[:8], CHUNK)[0]
    assert (chunk.request_id, chunk.start, chunk.end, chunk.tokens) == ("a", 0, 8, 8)
    assert (chunk.cache_salt, len(chunk.blocks), chunk.nonce) == ("s", 2, 1)
    assert bench.ledger.open_chunks == 1
    assert bench.lost == {}


def test_a_plan_names_cache_slot_ring_slot_and_stamp_and_cuts_at_both_blocks() -> None:
    bench = Bench(first_nonce=7)
    plan = bench.ledger.begin_step(
        StepMeta((bench.part("a", 0, 20, first=True, block_ids=(9, 3)),))
    )
    assert plan.clear_blocks == [0, 1, 2, 3, 4]
    assert plan.clear_rows == []
    assert [(run.engine_slot, run.ring_slot, run.length) for run in plan.runs] == [
        (9 * 16 + 0, 0, 4),
        (9 * 16 + 4, 4, 4),
        (9 * 16 + 8, 8, 4),
        (9 * 16 + 12, 12, 4),
        (3 * 16 + 0, 16, 4),
    ]
    assert [run.stamp for run in plan.runs] == [
        first_stamp(nonce, position)
        for nonce, position in [(7, 0), (7, 4), (8, 8), (8, 12), (9, 16)]
    ]


def test_ring_blocks_come_as_rows_need_them() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 1, first=True))
    assert bench.blocks.num_free == 49
    bench.step(bench.part("a", 1, 4))
    assert bench.blocks.num_free == 49
    bench.step(bench.part("a", 4, 5))
    assert bench.blocks.num_free == 48


def test_the_hash_waits_for_its_tokens() -> None:
    bench = Bench()
    assert bench.step(bench.part("a", 0, 8, first=True, tokens=7)) == []
    (chunk,) = bench.step(bench.part("a", 8, 9, tokens=8))
    assert chunk.chunk_hash == chunk_hashes(TOKENS[:8], CHUNK)[0]


def test_the_identity_enters_the_hash() -> None:
    bench, identity = Bench(), Identity(LoraIdentity("adapter", "/p"))
    (chunk,) = bench.step(bench.part("a", 0, 8, first=True, identity=identity))
    assert chunk.chunk_hash == chunk_hashes(TOKENS[:8], CHUNK, identity)[0]


def test_a_prefix_hit_inside_a_chunk_costs_that_chunk() -> None:
    bench = Bench()
    chunks = bench.step(bench.part("a", 5, 24, first=True))
    assert ranges(chunks) == [(8, 16), (16, 24)]
    assert bench.lost == {Loss.TAIL_OFF: 3}


def test_a_prefix_hit_costs_the_chunk_also_when_it_comes_in_several_steps() -> None:
    bench = Bench()
    bench.step(bench.part("a", 5, 6, first=True))
    bench.step(bench.part("a", 6, 8))
    assert (bench.lost, bench.ledger.open_chunks) == ({Loss.TAIL_OFF: 3}, 0)


def test_a_full_ring_costs_the_chunk_and_gives_its_blocks_back() -> None:
    bench = Bench(ring_blocks=1)
    bench.step(bench.part("a", 0, 4, first=True))
    assert bench.step(bench.part("a", 4, 7)) == []
    assert bench.lost == {Loss.RING_FULL: 7}
    assert bench.blocks.num_free == 1
    bench.step(bench.part("a", 7, 8))
    assert bench.lost == {Loss.RING_FULL: 8}, "a chunk once lost stays lost"
    bench.step(bench.part("a", 8, 9))
    assert bench.account.pending == 1, "the next chunk gets the block"


def test_a_ring_full_for_one_request_leaves_the_other_alone() -> None:
    bench = Bench(ring_blocks=3)
    chunks = bench.step(bench.part("a", 0, 8, first=True), bench.part("b", 0, 8, first=True))
    assert [chunk.request_id for chunk in chunks] == ["a"]
    assert bench.lost == {Loss.RING_FULL: 8}


def test_a_block_list_that_covers_too_little_is_refused() -> None:
    bench = Bench()
    plan = bench.ledger.begin_step(StepMeta((bench.part("a", 0, 17, first=True, block_ids=(1,)),)))
    assert plan.runs == []
    assert bench.ledger.end_step() == []
    assert bench.lost == {Loss.UNMATCHED: 17}


def test_a_request_that_was_never_announced_has_no_hash() -> None:
    bench = Bench()
    assert bench.step(bench.part("a", 0, 8)) == []
    assert bench.lost == {Loss.CAPTURE_DISABLED: 8}


def test_a_request_that_is_skipped_is_counted_under_its_reason() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 8, first=True, skip=Loss.NOT_SELECTED))
    bench.step(bench.part("a", 8, 9), finished=())
    bench.step(finished=(bench.end("a", 10),))
    assert bench.lost == {Loss.NOT_SELECTED: 9}
    assert bench.account.computed == 9


def test_token_ids_that_no_hash_knows_cost_that_request_alone() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 4, first=True))
    odd = RequestStep("a", 4, 4, (1,), 8, new_tokens=(-1,), tokens_from=4)
    chunks = bench.step(odd, bench.part("b", 0, 8, first=True))
    assert [chunk.request_id for chunk in chunks] == ["b"]
    bench.step(bench.part("a", 8, 9), finished=(FinishedRequest("b", 8, (-5,), 8),))
    assert bench.lost == {Loss.CAPTURE_DISABLED: 9}
    assert bench.account.pending == 8


# --- lost steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "stop", "told"),
    [(4, 9, 5), (4, 9, 3), (5, 9, 4)],
    ids=["a gap in the tokens", "tokens told twice", "a gap in the positions"],
)
def test_a_request_with_a_gap_is_not_captured_any_more(start: int, stop: int, told: int) -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 4, first=True), bench.part("b", 0, 4, first=True))
    bench.known["a"] = told
    chunks = bench.step(bench.part("a", start, stop), bench.part("b", 4, 9))
    assert [chunk.request_id for chunk in chunks] == ["b"]
    assert bench.step(bench.part("a", stop, 24)) == []
    assert bench.step(finished=(bench.end("a", 24),)) == []
    assert bench.lost == {Loss.CAPTURE_DISABLED: 4 + 24 - start}
    assert bench.ledger.open_chunks == 1, "b's"


def test_a_gap_is_seen_when_no_token_is_new() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 4, first=True, tokens=16))
    assert bench.step(bench.part("a", 4, 16, tokens=16, tokens_from=17)) == []
    assert bench.lost == {Loss.CAPTURE_DISABLED: 16}


def test_a_gap_before_the_end_keeps_what_is_open_from_being_stored() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 8, first=True, tokens=7))
    assert bench.step(finished=(FinishedRequest("a", 9, (TOKENS[8],), 8),)) == []
    assert bench.lost == {Loss.CAPTURE_DISABLED: 8}


def test_a_request_may_be_disabled_at_any_step_and_at_its_end() -> None:
    bench = Bench()
    first = (bench.part("a", 0, 8, first=True, tokens=7), bench.part("b", 0, 5, first=True))
    bench.step(*first)
    ended = FinishedRequest("a", skip=Loss.CAPTURE_DISABLED)
    chunks = bench.step(bench.part("b", 5, 9, skip=Loss.CAPTURE_DISABLED), finished=(ended,))
    assert chunks == []
    assert bench.lost == {Loss.CAPTURE_DISABLED: 17}
    assert (bench.ledger.open_chunks, bench.blocks.num_free) == (0, 50)


def test_a_step_of_which_nothing_is_told_is_counted() -> None:
    bench = Bench()
    bench.ledger.begin_step(StepMeta(untold=5))
    bench.ledger.end_step()
    assert (bench.account.computed, bench.lost) == (5, {Loss.CAPTURE_DISABLED: 5})


# --- drafts ---------------------------------------------------------------------------------------


def test_drafts_are_not_handed_out_before_they_are_accepted() -> None:
    bench = Bench()
    assert bench.step(bench.part("a", 0, 8, first=True, drafts=2)) == []
    assert ranges(bench.step(bench.part("a", 8, 9))) == [(0, 8)]


def test_rejected_drafts_are_taken_back_and_their_stamps_cleared() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 7, first=True, drafts=4))
    plan = bench.ledger.begin_step(StepMeta((bench.part("a", 3, 8),)))
    assert plan.clear_rows == [(3, 1), (4, 3)]
    assert [(run.ring_slot, run.length) for run in plan.runs] == [(3, 1), (4, 4)]
    assert ranges(bench.ledger.end_step()) == [(0, 8)]
    assert bench.lost == {Loss.REJECTED_DRAFT: 4}


def test_a_chunk_of_rejected_drafts_alone_gives_its_blocks_back() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 11, first=True, drafts=4))
    free = bench.blocks.num_free
    bench.step(bench.part("a", 7, 8))
    assert bench.blocks.num_free == free + 1
    assert bench.lost == {Loss.REJECTED_DRAFT: 4}
    assert bench.account.pending == 8


def test_the_last_sampled_token_does_not_make_a_rejected_drafts_row_right() -> None:
    """Row 7 was computed with a draft; another token was sampled in its place, and the request ended there."""
    bench = Bench()
    bench.step(bench.part("a", 0, 8, first=True, drafts=1))
    assert bench.step(finished=(bench.end("a", 8),)) == []
    assert bench.lost == {Loss.TAIL_OFF: 8}


def test_an_accepted_draft_before_the_last_token_counts() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 8, first=True, drafts=1))
    assert ranges(bench.step(finished=(bench.end("a", 9),))) == [(0, 8)]


# --- preemption -----------------------------------------------------------------------------------


def test_resumed_lower_keeps_rows_and_counts_what_is_computed_again() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 6, first=True))
    plan = bench.ledger.begin_step(StepMeta((bench.part("a", 0, 8, resumed=True, block_ids=(5,)),)))
    assert [(run.engine_slot, run.ring_slot, run.length) for run in plan.runs] == [
        (5 * 16 + 6, 6, 2)
    ]
    assert ranges(bench.ledger.end_step()) == [(0, 8)]
    assert bench.lost == {Loss.RECOMPUTED: 6}


def test_resumed_below_a_chunk_that_was_handed_out() -> None:
    bench = Bench()
    assert len(bench.step(bench.part("a", 0, 10, first=True))) == 1
    bench.step(bench.part("a", 0, 8, resumed=True))
    assert bench.lost == {Loss.RECOMPUTED: 8}
    assert ranges(bench.step(bench.part("a", 8, 16))) == [(8, 16)]
    assert bench.lost == {Loss.RECOMPUTED: 10}


def test_resumed_beyond_the_captured_rows_loses_the_chunk_at_once() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 3, first=True))
    chunks = bench.step(bench.part("a", 5, 16, resumed=True))
    assert ranges(chunks) == [(8, 16)]
    assert bench.lost == {Loss.PREEMPTED: 6}


def test_resumed_behind_an_open_chunk_frees_what_can_never_be_whole() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 3, first=True))
    bench.step(bench.part("a", 16, 17, resumed=True))
    assert bench.lost == {Loss.PREEMPTED: 3}
    assert bench.blocks.num_free == 49


def test_resumed_may_capture_what_had_been_lost() -> None:
    bench = Bench()
    bench.ledger.begin_step(StepMeta((bench.part("a", 0, 12, first=True),)))
    bench.ledger.give_up(Loss.LAYER_MISSING)
    bench.ledger.end_step()
    assert ranges(bench.step(bench.part("a", 0, 16, resumed=True))) == [(0, 8), (8, 16)]
    assert bench.lost == {Loss.LAYER_MISSING: 12}


def test_drafts_before_a_preemption_are_not_trusted_after_it() -> None:
    """Rows 6 and 7 were drafts. Whether they were accepted is not told, so they are computed anew."""
    bench = Bench()
    bench.step(bench.part("a", 0, 8, first=True, drafts=2))
    plan = bench.ledger.begin_step(StepMeta((bench.part("a", 0, 8, resumed=True),)))
    assert [(run.ring_slot, run.length) for run in plan.runs] == [(6, 2)]
    assert plan.clear_rows == [(6, 2)]
    assert ranges(bench.ledger.end_step()) == [(0, 8)]
    assert bench.lost == {Loss.RECOMPUTED: 6, Loss.PREEMPTED: 2}


# --- a step that goes wrong -----------------------------------------------------------------------


def test_leave_out_drops_one_request_of_the_step() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 4, first=True), bench.part("b", 0, 4, first=True))
    bench.ledger.begin_step(StepMeta((bench.part("a", 4, 8), bench.part("b", 4, 8))))
    bench.ledger.leave_out("a", Loss.UNMATCHED)
    assert [chunk.request_id for chunk in bench.ledger.end_step()] == ["b"]
    assert bench.lost == {Loss.UNMATCHED: 8}
    bench.step(bench.part("a", 8, 9))
    assert bench.account.pending == 9, "the chunk after it is captured again"


def test_leave_out_keeps_chunks_that_the_step_did_not_touch() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 8, first=True, tokens=7))
    bench.ledger.begin_step(StepMeta((bench.part("a", 8, 10),)))
    bench.ledger.leave_out("a", Loss.UNMATCHED)
    assert ranges(bench.ledger.end_step()) == [(0, 8)]
    assert bench.lost == {Loss.UNMATCHED: 2}


def test_give_up_drops_the_whole_step_and_only_it() -> None:
    bench = Bench()
    bench.step(bench.part("c", 0, 4, first=True))
    bench.ledger.begin_step(
        StepMeta((bench.part("a", 0, 8, first=True), bench.part("b", 0, 4, first=True)))
    )
    bench.ledger.give_up(Loss.LAYER_MISSING)
    assert bench.ledger.end_step() == []
    assert bench.lost == {Loss.LAYER_MISSING: 12}
    assert bench.account.pending == 4
    assert bench.blocks.num_free == 49


def test_begin_step_while_a_step_is_open_is_a_mistake() -> None:
    bench = Bench()
    bench.ledger.begin_step(StepMeta((bench.part("a", 0, 4, first=True),)))
    with pytest.raises(RuntimeError):
        bench.ledger.begin_step(StepMeta())


# --- the end --------------------------------------------------------------------------------------


def test_a_partial_chunk_at_the_end_is_tail_off() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 10, first=True))
    assert bench.step(finished=(bench.end("a", 11),)) == []
    assert bench.lost == {Loss.TAIL_OFF: 2}
    assert bench.ledger.open_chunks == 0


def test_rows_beyond_the_final_length_were_computed_in_vain() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 7, first=True))
    bench.step(finished=(FinishedRequest("a", 5),))
    assert bench.lost == {Loss.DISCARDED_AFTER_FINISH: 2, Loss.TAIL_OFF: 5}


def test_the_last_tokens_may_come_with_the_end() -> None:
    bench = Bench()
    assert bench.step(bench.part("a", 0, 8, first=True, tokens=6)) == []
    (chunk,) = bench.step(finished=(bench.end("a", 9),))
    assert chunk.chunk_hash == chunk_hashes(TOKENS[:8], CHUNK)[0]


def test_an_id_used_again_is_another_request() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 4, first=True, cache_salt="old"))
    (chunk,) = bench.step(bench.part("a", 0, 8, first=True, cache_salt="new"))
    assert (chunk.cache_salt, chunk.nonce) == ("new", 2)
    assert bench.lost == {Loss.TAIL_OFF: 4}


def test_an_id_may_end_and_begin_in_one_step() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 8, first=True, tokens=7, cache_salt="old"))
    ended = bench.end("a", 9)
    chunks = bench.step(bench.part("a", 0, 8, first=True, cache_salt="new"), finished=(ended,))
    assert [(chunk.cache_salt, chunk.nonce) for chunk in chunks] == [("old", 1), ("new", 2)]


def test_flush_returns_what_is_whole_and_counts_the_rest() -> None:
    bench = Bench()
    bench.step(bench.part("a", 0, 8, first=True, drafts=1), bench.part("b", 0, 12, first=True))
    chunks = bench.ledger.flush()
    assert chunks == []
    assert bench.lost == {Loss.TAIL_OFF: 11, Loss.DISCARDED_AFTER_FINISH: 1}
    assert bench.account.pending == 8


def test_flush_in_the_middle_of_a_step_that_was_given_up() -> None:
    bench = Bench()
    bench.ledger.begin_step(StepMeta((bench.part("a", 0, 4, first=True),)))
    bench.ledger.give_up(Loss.CAPTURE_DISABLED)
    assert bench.ledger.flush() == []
    assert bench.account.pending == 0


def test_an_unknown_end_is_nothing() -> None:
    bench = Bench()
    assert bench.step(finished=(FinishedRequest("nobody", 5, (1, 2)),)) == []


def test_nonces_begin_anew_before_they_overflow() -> None:
    bench = Bench(first_nonce=NONCE_LIMIT - 1)
    chunks = bench.step(bench.part("a", 0, 16, first=True))
    assert [chunk.nonce for chunk in chunks] == [NONCE_LIMIT - 1, 1]


@pytest.mark.parametrize(("chunk", "block", "engine"), [(0, 1, 1), (8, 3, 1), (8, 0, 1), (8, 4, 0)])
def test_sizes_that_do_not_fit(chunk: int, block: int, engine: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        Ledger(
            chunk_size=chunk,
            block_size=block,
            engine_block_size=engine,
            allocate=lambda n: [],
            free=lambda ids: None,
            account=Account(),
        )
