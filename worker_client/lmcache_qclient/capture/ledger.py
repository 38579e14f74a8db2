"""The ledger of open chunks: which ring rows belong to which token, over any number of steps.

Pure: no torch, no engine, no I/O, no clock. A chunk is an account that fills. One step goes through here so:

    begin_step(meta)     ends what has finished, opens chunks, gives them ring blocks, and returns the step's plan:
                         for every row to be captured its cache slot, ring slot and stamp, and what to clear before
    leave_out(...)       some request's rows could not be found in the step: its chunks of this step are dropped
    give_up(reason)      the step as a whole can't be trusted: every chunk that got a row in it is dropped
    end_step()           the rows are in the ring: returns the chunks that are whole, settled and named

Rules (each token of [start, start + count) is counted as computed, and comes to rest in exactly one place):
- An open chunk holds rows [first, filled), without a gap. It owns the ring blocks under those rows, and a nonce.
- A chunk is stored when it is whole, when no position of it can be taken back, and when its token ids are known.
- A segment that begins inside a chunk which is not open can't make the chunk whole: its tokens go to the account at
  once. A chunk once lost stays lost for its request (`_Request.closed` remembers the reason), a chunk once handed out
  makes later computations of its tokens `recomputed`.
- Blocks of a chunk that is handed out belong to the caller until `free`.
- A request whose steps or token ids do not follow each other without a gap is not captured any more: what a lost step
  would have told (tokens, blocks, drafts taken back) is unknown, so no later row of it can be trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmcache_qclient.capture.account import Account
from lmcache_qclient.capture.step import FinishedRequest, RequestStep, StepMeta
from lmcache_qprotocol.hashing import HashChain
from lmcache_qprotocol.reasons import LossReason
from lmcache_qprotocol.stamps import NONCE_LIMIT, first_stamp


@dataclass(frozen=True)
class Run:
    """`length` neighbouring rows: cache slots, ring slots and stamps all count up by one.

    A run crosses neither a block of the engine's cache nor one of the ring.
    """

    request_id: str
    engine_slot: int
    ring_slot: int
    stamp: int
    length: int


@dataclass
class StepPlan:
    """What to do around one forward pass.

    Attributes:
        clear_blocks: ring blocks given to a chunk in this step; all their stamps become EMPTY before a row is written.
        clear_rows: (ring slot, length) of rows that have been taken back; likewise.
        runs: the rows to capture.
    """

    clear_blocks: list[int] = field(default_factory=list)
    clear_rows: list[tuple[int, int]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)


@dataclass(frozen=True)
class FinishedChunk:
    """A whole chunk, ready to be stored.

    Attributes:
        request_id: for logs.
        start, end: absolute positions.
        chunk_hash: 32 bytes.
        cache_salt: part of the key.
        blocks: ring blocks that hold the rows, in order.
        nonce: what the stamps must carry.
    """

    request_id: str
    start: int
    end: int
    chunk_hash: bytes
    cache_salt: str
    blocks: tuple[int, ...]
    nonce: int

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""
        return self.end - self.start


@dataclass
class _OpenChunk:
    index: int
    nonce: int
    first: int
    filled: int
    blocks: list[int]


@dataclass
class _Request:
    chain: HashChain
    cache_salt: str
    skip: LossReason | None
    next: int = 0
    settled: int = 0
    open: dict[int, _OpenChunk] = field(default_factory=dict)
    closed: dict[int, LossReason] = field(default_factory=dict)


class Ledger:
    """See the head of this file.

    Args:
        chunk_size: tokens per chunk.
        block_size: tokens per ring block; divides chunk_size.
        engine_block_size: tokens per block of the engine's cache (reference group).
        allocate: n -> ring block ids, or None.
        free: takes ring block ids back.
        account: where tokens are counted.
        first_nonce: in [1, 2**31); later chunks count up from it.
    """

    def __init__(
        self,
        *,
        chunk_size: int,
        block_size: int,
        engine_block_size: int,
        allocate: Callable[[int], list[int] | None],
        free: Callable[[Sequence[int]], None],
        account: Account,
        first_nonce: int = 1,
    ) -> None:
        if chunk_size < 1 or block_size < 1 or engine_block_size < 1 or chunk_size % block_size:
            raise ValueError(
                f"chunk size {chunk_size} must be a multiple of the ring's block size {block_size}, all positive"
            )
        self.chunk_size = chunk_size
        self.block_size = block_size
        self.engine_block_size = engine_block_size
        self.account = account
        self._allocate = allocate
        self._free = free
        self._nonce = first_nonce
        self._requests: dict[str, _Request] = {}
        self._stepped: dict[str, None] = {}
        self._touched: dict[tuple[str, int], None] = {}
        self._ready: list[FinishedChunk] = []
        self._plan = StepPlan()

    # --- the step ---------------------------------------------------------------------------------------------

    def begin_step(self, meta: StepMeta) -> StepPlan:
        """Decide where the step's rows go. The step before must have been ended or given up."""
        if self._touched:
            raise RuntimeError("begin_step while a step is open: call end_step or give_up first")
        self._stepped.clear()
        self._plan = StepPlan()
        for finished in meta.finished:
            self._finish(finished)
        if meta.untold:
            self.account.computed += meta.untold
            self.account.lose(LossReason.CAPTURE_DISABLED, meta.untold)
        for step in meta.requests:
            self._begin_request(step)
        return self._plan

    def leave_out(self, request_id: str, reason: LossReason) -> None:
        """Drop the chunks that `request_id` touched in this step; other requests go on."""
        self._drop_touched([key for key in self._touched if key[0] == request_id], reason)

    def give_up(self, reason: LossReason) -> None:
        """Drop every chunk that got a row in this step."""
        self._drop_touched(list(self._touched), reason)

    def end_step(self) -> list[FinishedChunk]:
        """Chunks that can be stored now; their blocks are the caller's until it frees them."""
        for request_id in self._stepped:
            self._collect(request_id, self._requests[request_id])
        self._stepped.clear()
        self._touched.clear()
        ready, self._ready = self._ready, []
        return ready

    def flush(self, reason: LossReason = LossReason.TAIL_OFF) -> list[FinishedChunk]:
        """End all requests, at shutdown: what is whole and known is returned, the rest is counted under `reason`."""
        for request_id in list(self._requests):
            self._end(request_id, None, reason)
        return self.end_step()

    @property
    def open_chunks(self) -> int:
        """Chunks that own ring blocks now."""
        return sum(len(request.open) for request in self._requests.values())

    # --- one request's part ------------------------------------------------------------------------------------

    def _begin_request(self, step: RequestStep) -> None:
        self.account.computed += step.count
        request = self._request(step)
        self._judge(request, step)
        if request.skip is not None:
            self.account.lose(request.skip, step.count)
            return
        self._stepped[step.request_id] = None
        if step.resumed:
            self._reopen(request, step.start)
        elif step.start < request.next:
            self._take_back(request, step.start, LossReason.REJECTED_DRAFT)
        end = step.start + step.count
        covered = self._covers(step)
        position = step.start
        while position < end:
            index = position // self.chunk_size
            stop = min(end, (index + 1) * self.chunk_size)
            if covered:
                self._fill(step, request, index, position, stop)
            else:
                self._refuse(request, index, stop - position, LossReason.UNMATCHED)
            position = stop
        request.next = end
        request.settled = max(request.settled, step.settled)

    def _request(self, step: RequestStep) -> _Request:
        known = self._requests.get(step.request_id)
        if known is not None and not step.first:
            return known
        if known is not None:
            self._end(step.request_id, None, LossReason.TAIL_OFF)
        # A request that was not announced has unknown earlier tokens: no hash of it would be right.
        skip = step.skip if step.first else LossReason.CAPTURE_DISABLED
        request = _Request(HashChain(self.chunk_size, step.identity), step.cache_salt, skip)
        request.next = step.start
        self._requests[step.request_id] = request
        return request

    def _judge(self, request: _Request, step: RequestStep) -> None:
        """Take the step's tokens, or disable the request: by its own wish, or because a step before has been lost."""
        if request.skip is not None:
            return
        if step.skip is not None:
            self._disable(request, step.skip)
        elif step.start > request.next and not step.resumed:
            self._disable(request, LossReason.CAPTURE_DISABLED)
        else:
            self._extend(request, step.tokens_from, step.new_tokens)

    def _extend(self, request: _Request, tokens_from: int, new_tokens: Sequence[int]) -> None:
        """Take the tokens; when they leave a gap, or no hash knows them, the request is not captured any more."""
        if tokens_from != len(request.chain):
            self._disable(request, LossReason.CAPTURE_DISABLED)
            return
        try:
            request.chain.extend(new_tokens)
        except ValueError:
            self._disable(request, LossReason.CAPTURE_DISABLED)

    def _disable(self, request: _Request, reason: LossReason) -> None:
        """Nothing more of the request is captured, and nothing that is open is stored."""
        request.skip = reason
        for chunk in list(request.open.values()):
            self._drop(request, chunk, reason)

    def _fill(
        self, step: RequestStep, request: _Request, index: int, start: int, stop: int
    ) -> None:
        """Give positions [start, stop) of chunk `index` their rows, or count why not."""
        if index in request.closed:
            self.account.lose(request.closed[index], stop - start)
            return
        chunk = request.open.get(index)
        if chunk is not None and start < chunk.filled:
            again = min(stop, chunk.filled) - start
            self.account.lose(LossReason.RECOMPUTED, again)
            start += again
            if start == stop:
                return
        if chunk is not None and start > chunk.filled:
            # A resumed request may begin beyond what had been captured: the rows between are nowhere.
            self._refuse(request, index, stop - start, LossReason.PREEMPTED)
            return
        if chunk is None:
            if start != index * self.chunk_size:
                self._refuse(request, index, stop - start, LossReason.TAIL_OFF)
                return
            chunk = _OpenChunk(index, self._next_nonce(), start, start, [])
            request.open[index] = chunk
        if not self._grow(chunk, stop):
            self._refuse(request, index, stop - start, LossReason.RING_FULL)
            return
        self._add_runs(step, chunk, start, stop)
        chunk.filled = stop
        self._touched[step.request_id, index] = None

    def _covers(self, step: RequestStep) -> bool:
        first_block = step.start // self.engine_block_size
        last_block = (step.start + step.count - 1) // self.engine_block_size
        return len(step.block_ids) > last_block - first_block

    def _refuse(self, request: _Request, index: int, tokens: int, reason: LossReason) -> None:
        """Count `tokens` of chunk `index`, and what was captured of it before, as lost; close it."""
        self.account.lose(reason, tokens)
        chunk = request.open.get(index)
        if chunk is not None:
            self._drop(request, chunk, reason)
        request.closed[index] = reason

    def _grow(self, chunk: _OpenChunk, stop: int) -> bool:
        base = chunk.index * self.chunk_size
        need = (stop - base + self.block_size - 1) // self.block_size - len(chunk.blocks)
        blocks = self._allocate(need) if need > 0 else []
        if blocks is None:
            return False
        chunk.blocks += blocks
        self._plan.clear_blocks += blocks
        return True

    def _add_runs(self, step: RequestStep, chunk: _OpenChunk, start: int, stop: int) -> None:
        base = chunk.index * self.chunk_size
        first_engine_block = step.start // self.engine_block_size
        position = start
        while position < stop:
            engine_block, engine_offset = divmod(position, self.engine_block_size)
            ring_block, ring_offset = divmod(position - base, self.block_size)
            length = min(
                stop - position,
                self.engine_block_size - engine_offset,
                self.block_size - ring_offset,
            )
            slot = (
                step.block_ids[engine_block - first_engine_block] * self.engine_block_size
                + engine_offset
            )
            ring_slot = chunk.blocks[ring_block] * self.block_size + ring_offset
            stamp = first_stamp(chunk.nonce, position)
            self._plan.runs.append(Run(step.request_id, slot, ring_slot, stamp, length))
            position += length

    # --- taking back, dropping, ending -------------------------------------------------------------------------

    def _reopen(self, request: _Request, start: int) -> None:
        """A resumed request computes from `start` again: what was lost from there on may be captured after all.

        Whether its last drafts were accepted is not told any more, so their rows are taken back. A chunk that ends
        before `start` can't become whole.
        """
        self._take_back(request, request.settled, LossReason.PREEMPTED)
        for chunk in list(request.open.values()):
            if chunk.filled < start:
                self._drop(request, chunk, LossReason.PREEMPTED)
        for index, reason in list(request.closed.items()):
            if reason is not LossReason.RECOMPUTED and index * self.chunk_size >= start:
                del request.closed[index]

    def _take_back(self, request: _Request, start: int, reason: LossReason) -> None:
        """Rows from `start` on were computed with drafts that the engine did not, or may not have, accepted."""
        for chunk in list(request.open.values()):
            if chunk.filled <= start:
                continue
            keep = max(start, chunk.first)
            self.account.lose(reason, chunk.filled - keep)
            self._clear_rows(chunk, keep)
            chunk.filled = keep
            if chunk.filled == chunk.first:
                del request.open[chunk.index]
                self._free(chunk.blocks)
        request.settled = min(request.settled, start)

    def _clear_rows(self, chunk: _OpenChunk, start: int) -> None:
        base = chunk.index * self.chunk_size
        position = start
        while position < chunk.filled:
            block, offset = divmod(position - base, self.block_size)
            length = min(chunk.filled - position, self.block_size - offset)
            self._plan.clear_rows.append((chunk.blocks[block] * self.block_size + offset, length))
            position += length

    def _drop(self, request: _Request, chunk: _OpenChunk, reason: LossReason) -> None:
        self.account.lose(reason, chunk.filled - chunk.first)
        self._free(chunk.blocks)
        del request.open[chunk.index]
        request.closed[chunk.index] = reason

    def _drop_touched(self, keys: list[tuple[str, int]], reason: LossReason) -> None:
        for request_id, index in keys:
            del self._touched[request_id, index]
            request = self._requests[request_id]
            self._drop(request, request.open[index], reason)

    def _finish(self, finished: FinishedRequest) -> None:
        request = self._requests.get(finished.request_id)
        if request is None:
            return
        if finished.skip is not None:
            self._disable(request, finished.skip)
        elif request.skip is None and finished.new_tokens:
            self._extend(request, finished.tokens_from, finished.new_tokens)
        self._end(finished.request_id, finished.num_tokens, LossReason.TAIL_OFF)

    def _end(self, request_id: str, num_tokens: int | None, reason: LossReason) -> None:
        """Store what can be stored of a request, count the rest, forget the request."""
        request = self._requests[request_id]
        length = len(request.chain) if num_tokens is None else num_tokens
        # The last token may have been sampled in place of a rejected draft, whose row stands there then.
        request.settled = min(length, max(request.settled, length - 1))
        self._collect(request_id, request)
        for chunk in list(request.open.values()):
            vain = chunk.filled - max(chunk.first, min(chunk.filled, length))
            self.account.lose(LossReason.DISCARDED_AFTER_FINISH, vain)
            chunk.filled -= vain
            self._drop(request, chunk, reason)
        for key in [key for key in self._touched if key[0] == request_id]:
            del self._touched[key]
        self._stepped.pop(request_id, None)
        del self._requests[request_id]

    def _collect(self, request_id: str, request: _Request) -> None:
        """Hand out the chunks that are whole, settled, and named."""
        for chunk in list(request.open.values()):
            end = (chunk.index + 1) * self.chunk_size
            if (
                chunk.filled < end
                or request.settled < end
                or len(request.chain.hashes) <= chunk.index
            ):
                continue
            del request.open[chunk.index]
            request.closed[chunk.index] = LossReason.RECOMPUTED
            self._ready.append(
                FinishedChunk(
                    request_id,
                    chunk.first,
                    end,
                    request.chain.hashes[chunk.index],
                    request.cache_salt,
                    tuple(chunk.blocks),
                    chunk.nonce,
                )
            )

    def _next_nonce(self) -> int:
        nonce = self._nonce
        self._nonce = nonce + 1 if nonce + 1 < NONCE_LIMIT else 1
        return nonce
