"""A worker that does in plain Python what the ledger says, and checks every promise on the way."""

from __future__ import annotations

from collections import Counter
from random import Random

from lmcache_qclient.capture.account import Account
from lmcache_qclient.capture.blocks import BlockAllocator
from lmcache_qclient.capture.finished_chunk import FinishedChunk
from lmcache_qclient.capture.ledger import Ledger
from lmcache_qclient.capture.step import FinishedRequest
from lmcache_qclient.capture.step_plan import StepPlan
from lmcache_qprotocol.hashing import HashChain, chunk_hash
from lmcache_qprotocol.identity import ItemIdentity
from lmcache_qprotocol.reasons import LossReason
from lmcache_qprotocol.stamps import EMPTY, first_stamp
from tests.worker_client.capture.engine import Row, SimRequest, Step

OTHER = 777
"""A nonce start that is not 1, so that a nonce is never right by chance."""


class Worker:
    """A ledger over a ring of Python lists.

    Args:
        seed: decides how stores end, and when.
    """

    def __init__(
        self,
        random: Random,
        *,
        chunk_size: int,
        block_size: int,
        engine_block_size: int,
        ring_blocks: int,
        pieces: bool = False,
    ) -> None:
        self.random = random
        self.chunk_size, self.block_size = chunk_size, block_size
        self.account = Account()
        self.allocator = BlockAllocator(ring_blocks)
        self.rows: list[Row | None] = [None] * (ring_blocks * block_size)
        self.stamps = [EMPTY] * (ring_blocks * block_size)
        self.handed_out: list[FinishedChunk] = []
        self.received: Counter[str] = Counter()
        self.positions: Counter[tuple[str, int]] = Counter()
        self.owners: dict[str, SimRequest] = {}
        self.ledger = Ledger(
            chunk_size=chunk_size,
            block_size=block_size,
            engine_block_size=engine_block_size,
            allocate=self.allocator.allocate,
            free=self.allocator.free,
            account=self.account,
            pieces=pieces,
            first_nonce=OTHER,
        )

    def step(self, step: Step, *, fail: float = 0.0) -> None:
        """One engine step; with chance `fail` some of it goes wrong in the worker."""
        plan = self.ledger.begin_step(step.meta)
        # A request that ended before this step may be handed out in it, so its owner changes only for later steps.
        before, self.owners = self.owners, {**self.owners, **step.requests}
        dropped: set[str] = set()
        given_up = False
        if self.random.random() < fail:
            given_up = self.random.random() < 0.3
            if given_up:
                self.ledger.give_up(LossReason.LAYER_MISSING)
            else:
                ids = sorted({run.request_id for run in plan.runs})
                dropped = {name for name in ids if self.random.random() < 0.5}
                for name in dropped:
                    self.ledger.leave_out(name, LossReason.UNMATCHED)
        self._apply(plan, step.rows, dropped, given_up)
        for chunk in self.ledger.end_step():
            self._check_chunk(
                chunk,
                [
                    owners[chunk.request_id]
                    for owners in (before, self.owners)
                    if chunk.request_id in owners
                ],
            )
        self._settle(0.5)
        self.check()

    def idle(self, finished: tuple[FinishedRequest, ...] | None) -> None:
        """No step comes; who has ended is told now, or nobody can tell."""
        ledger = self.ledger
        chunks = ledger.hand_out_idle() if finished is None else ledger.end_told(finished)
        for chunk in chunks:
            self._check_chunk(chunk, [self.owners[chunk.request_id]])
        self.check()

    def _apply(
        self, plan: StepPlan, written: dict[int, Row], dropped: set[str], given_up: bool
    ) -> None:
        for block in plan.clear_blocks:
            for slot in range(block * self.block_size, (block + 1) * self.block_size):
                self.stamps[slot] = EMPTY
        for first, length in plan.clear_rows:
            assert length > 0
            assert first // self.block_size == (first + length - 1) // self.block_size
            self.stamps[first : first + length] = [EMPTY] * length
        targets: set[int] = set()
        for run in plan.runs:
            assert run.length > 0
            assert (
                run.ring_slot // self.block_size
                == (run.ring_slot + run.length - 1) // self.block_size
            )
            for offset in range(run.length):
                slot = run.ring_slot + offset
                assert slot not in targets, "two rows of one step go to one ring slot"
                targets.add(slot)
                row = written[run.engine_slot + offset]
                assert len(row) - 1 == (run.stamp + offset) & 0xFFFFFFFF, (
                    "the stamp names another position"
                )
                if run.request_id not in dropped and not given_up:
                    self.rows[slot] = row
                    self.stamps[slot] = run.stamp + offset

    def _check_chunk(self, chunk: FinishedChunk, owners: list[SimRequest]) -> None:
        """Exactly the rows [start, end) of one sequence, in order, rightly named and stamped."""
        size = self.chunk_size
        base = chunk.start // size * size
        assert base <= chunk.start < chunk.end <= base + size
        if not self.ledger.pieces:
            assert (chunk.start, chunk.end) == (base, base + size)
        skip = (chunk.start - base) % self.block_size
        assert len(chunk.blocks) == -(-(skip + chunk.tokens) // self.block_size)
        slots = [b * self.block_size + i for b in chunk.blocks for i in range(self.block_size)]
        slots = slots[skip : skip + chunk.tokens]
        first = first_stamp(chunk.nonce, chunk.start)
        assert [self.stamps[slot] for slot in slots] == list(range(first, first + chunk.tokens))
        rows = [self.rows[slot] for slot in slots]
        assert any(
            rows == [owner.row(position) for position in range(chunk.start, chunk.end)]
            and self._is_named(chunk, base, owner)
            for owner in owners
            if len(owner.tokens) >= chunk.end
        ), f"{chunk} does not hold the rows of its request"
        self.handed_out.append(chunk)
        self.received[chunk.request_id] += chunk.tokens
        for position in range(chunk.start, chunk.end):
            self.positions[chunk.request_id, position] += 1

    def _is_named(self, chunk: FinishedChunk, base: int, owner: SimRequest) -> bool:
        chain = HashChain(self.chunk_size, owner.identity)
        chain.extend(owner.tokens[:base])
        parent = chain.hashes[-1] if base else chain.root
        tokens = tuple(owner.tokens[base : chunk.end])
        items = owner.identity.items
        content: tuple[object, ...] = (None, (), ())
        if self.ledger.pieces:
            inside = tuple(
                ItemIdentity(item.kind, item.digest, item.offset - base)
                for item in items
                if base <= item.offset < chunk.end
            )
            content = (parent, tokens, inside)
        return (
            chunk.chunk_hash == chunk_hash(parent, tokens, base, items)
            and chunk.cache_salt == owner.salt
            and (chunk.parent_hash, chunk.piece_tokens, chunk.piece_items) == content
        )

    def _settle(self, chance: float) -> None:
        for chunk in list(self.handed_out):
            if self.random.random() < chance:
                self.handed_out.remove(chunk)
                self.allocator.free(chunk.blocks)
                if self.random.random() < 0.8:
                    chunk.tally.capture(chunk.tokens)
                else:
                    chunk.tally.lose(LossReason.POOL_FULL, chunk.tokens)

    def check(self) -> None:
        """Every computed token is in one place; every ring block has one owner."""
        chunks = [c for request in self.ledger._requests.values() for c in request.parts()]
        pending = sum(chunk.filled - chunk.first for chunk in chunks)
        pending += sum(chunk.tokens for chunk in self.handed_out)
        account = self.account
        assert min(account.lost.values(), default=0) >= 0
        assert account.computed == account.captured + account.lost.total() + pending
        assert account.pending == pending
        owned = [b for chunk in chunks for b in chunk.blocks]
        owned += [b for chunk in self.handed_out for b in chunk.blocks]
        assert len(owned) == len(set(owned)), "a ring block has two owners"
        assert len(owned) == self.allocator.num_blocks - self.allocator.num_free
        for chunk in chunks:
            assert len(chunk.blocks) * self.block_size >= chunk.filled - chunk.first > 0

    def end(self) -> None:
        """Flush and settle everything: nothing is pending, all blocks are free."""
        for chunk in self.ledger.flush():
            self._check_chunk(chunk, [self.owners[chunk.request_id]])
        self.check()
        self._settle(1.0)
        assert self.account.pending == 0
        assert self.allocator.num_free == self.allocator.num_blocks
        assert self.ledger.open_chunks == 0
