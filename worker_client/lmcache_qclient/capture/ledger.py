"""The ledger of open chunks: which ring rows belong to which token, over any number of steps.

Pure: no torch, no engine, no I/O, no clock. A chunk is an account that fills. One step goes through here so:

    begin_step(meta)     ends what has finished, opens chunks, gives them ring blocks, and returns the step's plan:
                         for every row to be captured its cache slot, ring slot and stamp, and what to clear before
    leave_out(...)       some request's rows could not be found in the step: its chunks of this step are dropped
    give_up(reason)      the step as a whole can't be trusted: every chunk that got a row in it is dropped
    end_step()           the rows are in the ring: returns the chunks and pieces that are complete, settled and named

Rules (each token of [start, start + count) is counted as computed, and comes to rest in exactly one place):
- A part holds rows [first, filled) of one chunk, without a gap. It owns a nonce and the ring blocks under those rows; a
  row keeps its offset in the chunk's blocks, so the first block begins at a block boundary at or before `first`.
- A chunk has at most one open part, which grows at its end. Where a request goes on elsewhere in the chunk, the open
  part is *sealed*, complete as it is, and another is opened.
- A part is handed out when it is complete (it reaches its chunk's end, is sealed, or its request has ended), when no
  position of it can be taken back, and when the token ids up to its end are known. It is a whole chunk if it has all
  rows, else a piece.
- A row that is held by a part, or was handed out, is not captured again: it is `recomputed`. A chunk of which rows were
  lost stays lost for its request (`OpenRequest.closed` remembers the reason), but for parts that were complete before.
- Without pieces (`pieces=False`) a part begins where its chunk begins and is only handed out whole: what can't become
  whole goes to the account at once.
- Blocks of what is handed out belong to the caller until `free`.
- Positions that are not selected (`OpenRequest.selected`) are counted as such and never get a row. Where the selection
  ends inside a chunk, the open part ends there.
- A request whose steps or token ids do not follow each other without a gap is not captured any more: what a lost step
  would have told (tokens, blocks, drafts taken back) is unknown, so no later row of it can be trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lmcache_qclient.capture.account import Account
from lmcache_qclient.capture.accounts import Accounts
from lmcache_qclient.capture.finished_chunk import FinishedChunk
from lmcache_qclient.capture.open_request import OpenRequest, Part
from lmcache_qclient.capture.step import FinishedRequest, RequestStep, StepMeta
from lmcache_qclient.capture.step_plan import Run, StepPlan
from lmcache_qprotocol.hashing import HashChain
from lmcache_qprotocol.reasons import LossReason
from lmcache_qprotocol.stamps import NONCE_LIMIT, first_stamp


class Ledger:
    """See the head of this file.

    Args:
        chunk_size: tokens per chunk.
        block_size: tokens per ring block; divides chunk_size.
        engine_block_size: tokens per block of the engine's cache (reference group).
        allocate: n -> ring block ids, or None.
        free: takes ring block ids back.
        account: where tokens are counted.
        pieces: hand out parts of chunks as well.
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
        account: Account | Accounts,
        pieces: bool = True,
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
        self.pieces = pieces
        self._allocate = allocate
        self._free = free
        self._nonce = first_nonce
        self._requests: dict[str, OpenRequest] = {}
        self._stepped: dict[str, None] = {}
        self._touched: dict[Part, str] = {}  # part -> request id
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
            self.account.lose_unknown(LossReason.CAPTURE_DISABLED, meta.untold)
        for step in meta.requests:
            self._begin_request(step)
        return self._plan

    def leave_out(self, request_id: str, reason: LossReason) -> None:
        """Drop what `request_id` touched in this step; other requests go on."""
        self._drop_touched(
            [part for part, name in self._touched.items() if name == request_id], reason
        )

    def give_up(self, reason: LossReason) -> None:
        """Drop every part that got a row in this step."""
        self._drop_touched(list(self._touched), reason)

    def end_step(self) -> list[FinishedChunk]:
        """What can be stored now; its blocks are the caller's until it frees them."""
        for request_id in self._stepped:
            self._collect(self._requests[request_id])
        self._stepped.clear()
        self._touched.clear()
        ready, self._ready = self._ready, []
        return ready

    def end_told(self, finished: Sequence[FinishedRequest]) -> list[FinishedChunk]:
        """Between steps, when no further step tells of ends: what can be stored now."""
        self._plan = StepPlan()
        for request in finished:
            self._finish(request)
        return self.end_step()

    def hand_out_idle(self) -> list[FinishedChunk]:
        """Between steps, when none has come for a while: what is settled and named leaves the ring as pieces.

        A request that goes on after all begins another part where this one ends.
        """
        if self.pieces:
            for request in self._requests.values():
                for part in request.parts():
                    if part.filled <= request.named:
                        self._hand_out(request, part)
        return self.end_step()

    def flush(self, reason: LossReason = LossReason.TAIL_OFF) -> list[FinishedChunk]:
        """End all requests, at shutdown: what can be stored is returned, the rest is counted under `reason`."""
        for request_id in list(self._requests):
            self._end(request_id, None, reason)
        return self.end_step()

    @property
    def open_chunks(self) -> int:
        """Parts of chunks that own ring blocks now."""
        return sum(len(request.parts()) for request in self._requests.values())

    # --- one request's part ------------------------------------------------------------------------------------

    def _begin_request(self, step: RequestStep) -> None:
        request = self._request(step)
        request.tally.compute(step.count)
        self._judge(request, step)
        if request.skip is not None:
            request.tally.lose(request.skip, step.count)
            return
        self._stepped[step.request_id] = None
        if step.resumed:
            self._reopen(request, step.start)
        elif step.start < request.next:
            self._take_back(request, step.start, LossReason.REJECTED_DRAFT)
        end = step.start + step.count
        self._fill_range(step, request, *self._selected(request, step.start, end))
        request.next = end
        request.settled = max(request.settled, step.settled)

    def _selected(self, request: OpenRequest, start: int, end: int) -> tuple[int, int]:
        """The positions of [start, end) that are to be captured; the others are counted."""
        if request.selected is None:
            return start, end
        first, last = request.selected
        kept_from, kept_to = max(start, min(first, end)), min(end, max(last, start))
        kept_to = max(kept_from, kept_to)
        request.tally.lose(LossReason.NOT_SELECTED, end - start - (kept_to - kept_from))
        return kept_from, kept_to

    def _fill_range(self, step: RequestStep, request: OpenRequest, start: int, end: int) -> None:
        covered = self._covers(step)
        position = start
        while position < end:
            index = position // self.chunk_size
            stop = min(end, (index + 1) * self.chunk_size)
            if not covered:
                self._refuse(request, index, stop - position, LossReason.UNMATCHED)
            elif self._can_be_handed_out(request, index):
                self._fill(step, request, index, position, stop)
            else:
                self._refuse(request, index, stop - position, LossReason.TAIL_OFF)
            position = stop
        if request.selected is not None and start < end == request.selected[1]:
            self._close_selection(request, end)

    def _can_be_handed_out(self, request: OpenRequest, index: int) -> bool:
        """False: without pieces, where the selection ends inside the chunk. No row of it is given a place then.

        Taking blocks back later in the step would be wrong: their rows are planned, and others may get the blocks.
        """
        last = None if request.selected is None else request.selected[1]
        return self.pieces or last is None or last >= (index + 1) * self.chunk_size

    def _close_selection(self, request: OpenRequest, end: int) -> None:
        """Nothing behind `end` is to be captured: the part that ends there does not wait for its chunk's end."""
        part = request.open.get((end - 1) // self.chunk_size)
        if part is not None and part.filled == end and end % self.chunk_size:
            request.seal(part)

    def _request(self, step: RequestStep) -> OpenRequest:
        known = self._requests.get(step.request_id)
        if known is not None and not step.first:
            return known
        if known is not None:
            self._end(step.request_id, None, LossReason.TAIL_OFF)
        # A request that was not announced has unknown earlier tokens: no hash of it would be right.
        skip = step.skip if step.first else LossReason.CAPTURE_DISABLED
        tally = self.account.request(step.request_id)
        chain = HashChain(self.chunk_size, step.identity)
        request = OpenRequest(tally, chain, step.cache_salt, skip, step.selected)
        request.next = step.start
        self._requests[step.request_id] = request
        return request

    def _judge(self, request: OpenRequest, step: RequestStep) -> None:
        """Take the step's tokens, or disable the request: by its own wish, or because a step before has been lost."""
        if request.skip is not None:
            return
        if step.skip is not None:
            self._disable(request, step.skip)
        elif step.start > request.next and not step.resumed:
            self._disable(request, LossReason.CAPTURE_DISABLED)
        else:
            self._extend(request, step.tokens_from, step.new_tokens)

    def _extend(self, request: OpenRequest, tokens_from: int, new_tokens: Sequence[int]) -> None:
        """Take the tokens; when they leave a gap, or no hash knows them, the request is not captured any more."""
        if tokens_from != len(request.chain):
            self._disable(request, LossReason.CAPTURE_DISABLED)
            return
        try:
            request.chain.extend(new_tokens)
        except ValueError:
            self._disable(request, LossReason.CAPTURE_DISABLED)
            return
        if self.pieces:
            request.tokens.extend(new_tokens)

    def _disable(self, request: OpenRequest, reason: LossReason) -> None:
        """Nothing more of the request is captured, and nothing that is open is stored."""
        request.skip = reason
        for part in request.parts():
            self._drop(request, part, reason)

    def _fill(
        self, step: RequestStep, request: OpenRequest, index: int, start: int, stop: int
    ) -> None:
        """Give positions [start, stop) of chunk `index` their rows, or count why not."""
        if index in request.closed:
            request.tally.lose(request.closed[index], stop - start)
            return
        part = request.open.get(index)
        if part is not None and part.filled == start and not request.has_other(index):
            self._capture(step, request, index, start, stop)  # nearly every step of a decode
            return
        for held_from, held_to in request.held(index):
            free_to = min(stop, held_from)
            if start < free_to and not self._capture(step, request, index, start, free_to):
                request.tally.lose(request.closed[index], stop - free_to)
                return
            start = max(start, free_to)
            again = max(0, min(stop, held_to) - start)
            request.tally.lose(LossReason.RECOMPUTED, again)
            start += again
        if start < stop:
            self._capture(step, request, index, start, stop)

    def _capture(
        self, step: RequestStep, request: OpenRequest, index: int, start: int, stop: int
    ) -> bool:
        """Give rows to positions that nothing holds yet; False when they were refused, and the chunk closed."""
        part = request.open.get(index)
        if part is not None and part.filled != start:
            if not self.pieces:
                # A resumed request may begin beyond what had been captured: the rows between are nowhere.
                self._refuse(request, index, stop - start, LossReason.PREEMPTED)
                return False
            request.seal(part)
            part = None
        if part is None:
            if not self.pieces and start != index * self.chunk_size:
                self._refuse(request, index, stop - start, LossReason.TAIL_OFF)
                return False
            part = Part(index, self._next_nonce(), start, start, [])
            request.open[index] = part
        if not self._grow(part, stop):
            self._refuse(request, index, stop - start, LossReason.RING_FULL)
            return False
        self._add_runs(step, part, start, stop)
        part.filled = stop
        self._touched[part] = step.request_id
        return True

    def _covers(self, step: RequestStep) -> bool:
        first_block = step.start // self.engine_block_size
        last_block = (step.start + step.count - 1) // self.engine_block_size
        return len(step.block_ids) > last_block - first_block

    def _refuse(self, request: OpenRequest, index: int, tokens: int, reason: LossReason) -> None:
        """Count `tokens` of chunk `index`, and what its open part has captured, as lost; close it."""
        request.tally.lose(reason, tokens)
        part = request.open.get(index)
        if part is not None:
            self._drop(request, part, reason)
        request.closed[index] = reason

    def _grow(self, part: Part, stop: int) -> bool:
        need = self._blocks_up_to(part, stop) - len(part.blocks)
        blocks = self._allocate(need) if need > 0 else []
        if blocks is None:
            return False
        part.blocks += blocks
        self._plan.clear_blocks += blocks
        return True

    def _first_block(self, part: Part) -> int:
        """Which block of its chunk the part's first ring block is."""
        return (part.first - part.index * self.chunk_size) // self.block_size

    def _blocks_up_to(self, part: Part, stop: int) -> int:
        """Ring blocks that rows [first, stop) of the part lie in."""
        end = stop - part.index * self.chunk_size
        return -(-end // self.block_size) - self._first_block(part)

    def _ring_place(self, part: Part, position: int) -> tuple[int, int]:
        """Ring slot of a position, and how many rows are left in its block."""
        block, offset = divmod(position - part.index * self.chunk_size, self.block_size)
        slot = part.blocks[block - self._first_block(part)] * self.block_size + offset
        return slot, self.block_size - offset

    def _add_runs(self, step: RequestStep, part: Part, start: int, stop: int) -> None:
        first_engine_block = step.start // self.engine_block_size
        position = start
        while position < stop:
            engine_block, engine_offset = divmod(position, self.engine_block_size)
            ring_slot, left = self._ring_place(part, position)
            length = min(stop - position, self.engine_block_size - engine_offset, left)
            slot = (
                step.block_ids[engine_block - first_engine_block] * self.engine_block_size
                + engine_offset
            )
            stamp = first_stamp(part.nonce, position)
            self._plan.runs.append(Run(step.request_id, slot, ring_slot, stamp, length))
            position += length

    # --- taking back, dropping, ending -------------------------------------------------------------------------

    def _reopen(self, request: OpenRequest, start: int) -> None:
        """A resumed request computes from `start` again: what was lost from there on may be captured after all.

        Whether its last drafts were accepted is not told any more, so their rows are taken back. A part that ends
        before `start` does not grow any more.
        """
        self._take_back(request, request.settled, LossReason.PREEMPTED)
        for part in list(request.open.values()):
            if part.filled < start:
                if self.pieces:
                    request.seal(part)
                else:
                    self._drop(request, part, LossReason.PREEMPTED)
        for index, reason in list(request.closed.items()):
            # Only a piece can begin inside a chunk.
            last_start = (
                (index + 1) * self.chunk_size - 1 if self.pieces else index * self.chunk_size
            )
            if reason is not LossReason.RECOMPUTED and last_start >= start:
                del request.closed[index]

    def _take_back(self, request: OpenRequest, start: int, reason: LossReason) -> None:
        """Rows from `start` on were computed with drafts that the engine did not, or may not have, accepted."""
        for part in request.parts():
            if part.filled <= start:
                continue
            keep = max(start, part.first)
            request.tally.lose(reason, part.filled - keep)
            self._clear_rows(part, keep)
            part.filled = keep
            if part.filled == part.first:
                request.remove(part)
                self._free(part.blocks)
        request.settled = min(request.settled, start)

    def _clear_rows(self, part: Part, start: int) -> None:
        position = start
        while position < part.filled:
            slot, left = self._ring_place(part, position)
            length = min(part.filled - position, left)
            self._plan.clear_rows.append((slot, length))
            position += length

    def _drop(self, request: OpenRequest, part: Part, reason: LossReason) -> None:
        request.tally.lose(reason, part.filled - part.first)
        self._free(part.blocks)
        self._touched.pop(part, None)
        request.remove(part)
        request.closed[part.index] = reason

    def _drop_touched(self, parts: list[Part], reason: LossReason) -> None:
        for part in parts:
            self._drop(self._requests[self._touched[part]], part, reason)

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
        """Hand out what can be stored of a request, count the rest, forget the request."""
        request = self._requests[request_id]
        length = len(request.chain) if num_tokens is None else num_tokens
        # The last token may have been sampled in place of a rejected draft, whose row stands there then.
        request.settled = min(length, max(request.settled, length - 1))
        self._collect(request)
        for part in request.parts():
            self._shorten(request, part, length, LossReason.DISCARDED_AFTER_FINISH)
            if self.pieces:
                self._shorten(request, part, request.settled, LossReason.REJECTED_DRAFT)
                self._shorten(request, part, len(request.chain), reason)
            if self.pieces and part.first < part.filled:
                self._hand_out(request, part)
            else:
                self._drop(request, part, reason)
        for part in [part for part, name in self._touched.items() if name == request_id]:
            del self._touched[part]
        self._stepped.pop(request_id, None)
        del self._requests[request_id]
        request.tally.end()

    def _shorten(self, request: OpenRequest, part: Part, end: int, reason: LossReason) -> None:
        """Count the part's rows from position `end` on as lost."""
        keep = max(part.first, min(part.filled, end))
        request.tally.lose(reason, part.filled - keep)
        part.filled = keep

    def _collect(self, request: OpenRequest) -> None:
        """Hand out the parts that are complete, settled, and named."""
        for part in self._complete(request):
            if part.filled <= request.named:
                self._hand_out(request, part)

    def _complete(self, request: OpenRequest) -> Iterator[Part]:
        yield from list(request.sealed)
        for part in list(request.open.values()):
            if part.filled == (part.index + 1) * self.chunk_size:
                yield part

    def _hand_out(self, request: OpenRequest, part: Part) -> None:
        needed = self._blocks_up_to(part, part.filled)
        self._free(part.blocks[needed:])  # they held nothing but rows that were taken back
        chunk = request.finished(part, part.blocks[:needed], self.pieces)
        request.remove(part)
        if chunk.tokens == self.chunk_size:
            request.closed[part.index] = LossReason.RECOMPUTED
        else:
            request.done.setdefault(part.index, []).append((chunk.start, chunk.end))
        self._ready.append(chunk)

    def _next_nonce(self) -> int:
        nonce = self._nonce
        self._nonce = nonce + 1 if nonce + 1 < NONCE_LIMIT else 1
        return nonce
