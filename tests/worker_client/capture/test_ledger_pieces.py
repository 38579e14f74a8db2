"""What pieces change in the ledger: chunks that begin late, end early, or have a gap. Chunk 8, ring block 4."""

from __future__ import annotations

import pytest

from lmcache_qclient.capture.step import FinishedRequest, StepMeta
from lmcache_qprotocol.hashing import HashChain, chunk_hash, chunk_hashes
from lmcache_qprotocol.identity import Identity, ItemIdentity, LoraIdentity
from lmcache_qprotocol.limits import MAX_ITEMS
from lmcache_qprotocol.messages import IdentityClaim
from lmcache_qprotocol.reasons import LossReason as Loss
from lmcache_qprotocol.stamps import first_stamp
from tests.worker_client.capture.test_ledger import CHUNK, TOKENS, Bench, ranges


def bench() -> Bench:
    return Bench(pieces=True)


def test_a_start_inside_a_chunk_makes_a_piece_up_to_its_end() -> None:
    it = bench()
    plan = it.ledger.begin_step(StepMeta((it.part("a", 5, 20, first=True),)))
    # Row 5 is row 1 of the chunk's second block: it keeps its offset, and no block is taken for what is not computed.
    run = plan.runs[0]
    assert (run.ring_slot, run.length, run.stamp) == (1, 3, first_stamp(1, 5))
    piece, whole = it.ledger.end_step()
    assert ranges([piece, whole]) == [(5, 8), (8, 16)]
    assert (len(piece.blocks), len(whole.blocks)) == (1, 2)
    hashes = chunk_hashes(TOKENS[:16], CHUNK)
    assert (piece.chunk_hash, whole.chunk_hash) == (hashes[0], hashes[1])
    assert piece.parent_hash == HashChain(CHUNK).root
    assert whole.parent_hash == hashes[0]
    assert piece.piece_tokens == tuple(TOKENS[:8])
    assert whole.piece_tokens == tuple(TOKENS[8:16])
    assert it.lost == {}


def test_the_end_of_a_request_makes_a_piece_of_its_last_chunk() -> None:
    it = bench()
    identity = Identity(items=(ItemIdentity("mm", "x", 9), ItemIdentity("mm", "y", 30)))
    it.step(it.part("a", 0, 11, first=True, identity=identity, cache_salt="s"))
    (piece,) = it.step(finished=(it.end("a", 12),))
    assert ranges([piece]) == [(8, 11)]
    parent = chunk_hashes(TOKENS[:8], CHUNK, identity)[0]
    assert piece.chunk_hash == chunk_hash(parent, TOKENS[8:11], 8, identity.items)
    assert (piece.parent_hash, piece.cache_salt) == (parent, "s")
    assert piece.piece_items == (ItemIdentity("mm", "x", 1),)
    assert it.lost == {}
    assert it.ledger.open_chunks == 0


def test_a_claim_tells_the_identity_as_far_as_the_chunk_reaches() -> None:
    it, lora = bench(), LoraIdentity("l", "/l")
    early, late = ItemIdentity("mm", "x", 3), ItemIdentity("mm", "y", 8)
    identity = Identity(lora, (ItemIdentity("mm", "z", 16), late, early))
    chunks = it.step(it.part("a", 0, 16, first=True, identity=identity))
    plain = [HashChain(CHUNK).root, *chunk_hashes(TOKENS[:8], CHUNK)]
    assert [chunk.claim for chunk in chunks] == [
        IdentityClaim(plain_parent_hash=plain[0], lora=lora, items=(early,)),
        IdentityClaim(plain_parent_hash=plain[1], lora=lora, items=(early, late)),
    ]
    (alone,) = Bench().step(it.part("b", 0, 8, first=True, identity=identity))
    assert alone.claim is None, "without its tokens it has none"


def test_a_claim_of_more_items_than_a_store_may_tell_is_left_out() -> None:
    for count, told in ((MAX_ITEMS, True), (MAX_ITEMS + 1, False)):
        it = bench()
        items = tuple(ItemIdentity("mm", str(number), number % 8) for number in range(count))
        (chunk,) = it.step(it.part("a", 0, 8, first=True, identity=Identity(None, items)))
        assert (chunk.claim is not None) == told


def test_resumed_beyond_the_captured_rows_begins_another_piece() -> None:
    it = bench()
    it.step(it.part("a", 0, 3, first=True, tokens=16))
    (first,) = it.step(it.part("a", 5, 7, resumed=True))
    assert ranges([first]) == [(0, 3)]
    assert it.step(it.part("a", 7, 8)) != []
    assert it.lost == {}


def test_resumed_before_a_gap_fills_it_and_recomputes_the_rest() -> None:
    it = bench()
    it.step(it.part("a", 0, 2, first=True, tokens=8))
    it.step(it.part("a", 4, 6, resumed=True))
    chunks = it.step(it.part("a", 1, 8, resumed=True))
    chunks += it.step(finished=(it.end("a", 9),))
    # [0, 2) was handed out at the first gap, [4, 6) is complete when [2, 4) begins, [6, 8) reaches the chunk's end.
    assert ranges(chunks) == [(4, 6), (2, 4), (6, 8)]
    assert it.lost == {Loss.RECOMPUTED: 3}
    assert it.account.pending == 8


def test_a_piece_waits_until_its_tokens_are_known() -> None:
    it = bench()
    it.step(it.part("a", 0, 3, first=True, tokens=2))
    assert it.step(it.part("a", 5, 6, resumed=True, tokens=2)) == []
    assert ranges(it.step(it.part("a", 6, 7, tokens=3))) == [(0, 3)]


def test_a_step_that_is_given_up_takes_its_sealed_parts_along() -> None:
    it = bench()
    it.step(it.part("a", 0, 1, first=True, tokens=8))
    it.step(it.part("a", 4, 6, resumed=True))
    it.ledger.begin_step(StepMeta((it.part("a", 2, 8, resumed=True),)))
    it.ledger.give_up(Loss.LAYER_MISSING)
    # [2, 4) and [6, 8) were to get rows in this step; [4, 6) has its own.
    assert ranges(it.ledger.end_step()) == [(4, 6)]
    assert it.lost == {Loss.LAYER_MISSING: 4, Loss.RECOMPUTED: 2}


def test_rows_of_unsettled_drafts_and_beyond_the_end_are_no_part_of_it() -> None:
    it = bench()
    it.step(it.part("a", 0, 7, first=True, drafts=3))
    (piece,) = it.step(finished=(it.end("a", 6),))
    # Row 5 may be a rejected draft's: the last token was sampled. Row 6 was computed behind the end.
    assert ranges([piece]) == [(0, 5)]
    assert it.lost == {Loss.REJECTED_DRAFT: 1, Loss.DISCARDED_AFTER_FINISH: 1}


def test_blocks_that_hold_nothing_of_a_piece_go_back_at_once() -> None:
    it = bench()
    it.step(it.part("a", 0, 7, first=True, drafts=5))
    (piece,) = it.step(finished=(it.end("a", 3),))
    assert (ranges([piece]), len(piece.blocks)) == ([(0, 2)], 1)
    assert it.blocks.num_free == it.blocks.num_blocks - 1


def test_a_full_ring_costs_the_open_part_only() -> None:
    it = Bench(ring_blocks=2, pieces=True)
    it.step(it.part("a", 0, 3, first=True, tokens=16))
    chunks = it.step(it.part("a", 5, 12, resumed=True))
    assert ranges(chunks) == [(0, 3), (5, 8)]
    assert it.lost == {Loss.RING_FULL: 4}


def test_flush_hands_out_what_is_settled_and_known() -> None:
    it = bench()
    it.step(it.part("a", 0, 7, first=True), it.part("b", 3, 5, first=True))
    assert ranges(it.ledger.flush()) == [(0, 7), (3, 5)]
    assert it.lost == {}


@pytest.mark.parametrize("length", [2, 3])
def test_nothing_is_handed_out_of_a_request_that_ended_before_its_rows(length: int) -> None:
    it = bench()
    it.step(it.part("a", 3, 6, first=True))
    assert it.step(finished=(FinishedRequest("a", length),)) == []
    assert it.lost == {Loss.DISCARDED_AFTER_FINISH: 3}
    assert it.blocks.num_free == it.blocks.num_blocks


def test_between_steps_an_end_hands_out_as_in_a_step() -> None:
    it = bench()
    it.step(it.part("a", 0, 11, first=True), it.part("b", 0, 3, first=True))
    assert ranges(it.ledger.end_told([it.end("a", 12)])) == [(8, 11)]
    assert it.account.pending == 8 + 3 + 3
    assert it.ledger.open_chunks == 1
    assert it.step(it.part("b", 3, 8)) != [], "the other request goes on"


def test_an_idle_time_hands_out_what_is_settled_and_the_rest_later() -> None:
    it = bench()
    it.step(it.part("a", 0, 5, first=True), it.part("b", 0, 7, first=True, drafts=2))
    assert ranges(it.ledger.hand_out_idle()) == [(0, 5)]
    assert it.ledger.hand_out_idle() == []
    # Five of b's rows are settled, but its part ends in drafts: it stays whole until they are judged.
    (b,) = it.step(it.part("a", 5, 8), it.part("b", 7, 8))[1:]
    assert ranges([b]) == [(0, 8)]
    assert it.lost == {}


def test_without_pieces_an_idle_time_changes_nothing() -> None:
    it = Bench()
    it.step(it.part("a", 0, 5, first=True))
    assert it.ledger.hand_out_idle() == []
    assert it.ledger.open_chunks == 1
