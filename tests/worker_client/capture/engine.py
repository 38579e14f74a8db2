"""A toy engine: it schedules random requests as a real one does, and knows what every computed row really is.

It is written from the engine's rules (shared/facts/vllm.md), not from the ledger: chunked prefill under a token budget,
decode, drafts of which a prefix is accepted, prefix-cache hits, preemption and resume, stops that cut accepted drafts,
aborts, ids used again. What a row "is" depends on all tokens fed up to it, so a row computed behind a rejected draft
equals no row of the real sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from lmcache_qclient.capture.step import FinishedRequest, RequestStep, StepMeta
from lmcache_qprotocol.identity import PLAIN, Identity, ItemIdentity, LoraIdentity

VOCABULARY = 3
"""Small, so that drafts are often right, and rejected ones often look right one position later."""

Row = tuple[int, ...]
"""The tokens fed up to and including this position."""


@dataclass
class SimRequest:
    """One request of the engine; `tokens` are those that have become final."""

    request_id: str
    tokens: list[int]
    target: int
    identity: Identity = PLAIN
    salt: str = ""
    computed: int = 0
    first_start: int = 0
    blocks: list[int] = field(default_factory=list)
    tokens_sent: int = 0
    announced: bool = False
    running: bool = False
    preempted: bool = False
    written: set[int] = field(default_factory=set)
    """Positions of which a row was ever computed, drafts included."""

    def row(self, position: int) -> Row:
        """What the row at `position` must be."""
        return tuple(self.tokens[: position + 1])


@dataclass(frozen=True)
class Chances:
    """How often per step (0 to 1) the engine does something out of the ordinary."""

    preempt: float = 0.0
    abort: float = 0.0
    drafts: float = 0.0
    prefix_hit: float = 0.0
    stop_early: float = 0.0
    lag: int = 0
    """Tokens that the scheduler does not know yet when it schedules (async scheduling)."""


@dataclass
class Step:
    """What one step is told as, and what it really computes."""

    meta: StepMeta
    rows: dict[int, Row]
    """Cache slot -> what is written there."""
    requests: dict[str, SimRequest]


class Engine:
    """See the head of this file."""

    def __init__(
        self,
        random: Random,
        *,
        block_size: int,
        budget: int,
        max_running: int,
        chances: Chances,
        num_blocks: int = 400,
    ) -> None:
        self.random = random
        self.block_size = block_size
        self.budget = budget
        self.max_running = max_running
        self.chances = chances
        self.free_blocks = list(range(1, num_blocks))
        random.shuffle(self.free_blocks)
        self.waiting: list[SimRequest] = []
        self.running: list[SimRequest] = []
        self.finished: list[FinishedRequest] = []
        self.ended: list[SimRequest] = []
        self.computed = 0

    def add(self, request_id: str, prompt: int, outputs: int) -> SimRequest:
        """A request arrives."""
        tokens = [self.random.randrange(VOCABULARY) for _ in range(prompt)]
        lora = LoraIdentity("a", "b") if self.random.random() < 0.2 else None
        request = SimRequest(
            request_id,
            tokens,
            prompt + outputs,
            Identity(lora, self._items(prompt)),
            f"salt {prompt}",
        )
        self.waiting.append(request)
        return request

    def _items(self, prompt: int) -> tuple[ItemIdentity, ...]:
        if self.random.random() < 0.7:
            return ()
        return (ItemIdentity("mm", "picture", self.random.randrange(prompt)),)

    @property
    def busy(self) -> bool:
        """Something is left to compute."""
        return bool(self.waiting or self.running)

    # --- one step ---------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """Schedule one step, and compute it."""
        self._abort_and_preempt()
        finished, self.finished = tuple(self.finished), []
        left = self.budget
        steps: list[RequestStep] = []
        rows: dict[int, Row] = {}
        involved: dict[str, SimRequest] = {}
        drafts: dict[str, list[int]] = {}
        for request in [*self.running, *self.waiting]:
            if left <= 0:
                break
            if not request.running and len(self.running) >= self.max_running:
                continue
            resumed = self._admit(request)
            count = min(left, len(request.tokens) - request.computed)
            guesses = self._guess(request, count, left - count)
            left -= count + len(guesses)
            steps.append(self._told(request, count, len(guesses), resumed))
            rows.update(self._write(request, count, guesses))
            involved[request.request_id] = request
            drafts[request.request_id] = guesses
            self.computed += count + len(guesses)
            request.computed += count
        self.random.shuffle(steps)
        step = Step(StepMeta(tuple(steps), finished), rows, involved)
        for request in involved.values():
            self._sample(request, drafts[request.request_id])
        return step

    def _abort_and_preempt(self) -> None:
        for request in list(self.running):
            if self.random.random() < self.chances.abort:
                self._finish(request)
            elif self.random.random() < self.chances.preempt:
                self._release(request)
                request.preempted = True
                self.waiting.insert(0, request)

    def _admit(self, request: SimRequest) -> bool:
        """Start a waiting request. Returns whether it is resumed."""
        if request.running:
            return False
        self.waiting.remove(request)
        self.running.append(request)
        request.running = True
        resumed, request.preempted = request.preempted, False
        request.computed = 0
        if self.random.random() < self.chances.prefix_hit:
            most = (len(request.tokens) - 1) // self.block_size
            request.computed = self.block_size * self.random.randint(0, most)
        if not resumed:
            request.first_start = request.computed
        return resumed and request.announced

    def _guess(self, request: SimRequest, count: int, left: int) -> list[int]:
        if (
            request.computed + count < len(request.tokens)
            or self.random.random() >= self.chances.drafts
        ):
            return []
        return [
            self.random.randrange(VOCABULARY) for _ in range(min(left, self.random.randint(1, 4)))
        ]

    def _told(self, request: SimRequest, count: int, guesses: int, resumed: bool) -> RequestStep:
        start, total = request.computed, count + guesses
        while len(request.blocks) * self.block_size < start + total:
            request.blocks.append(self.free_blocks.pop())
        first, last = start // self.block_size, (start + total - 1) // self.block_size
        known = request.tokens[: max(request.tokens_sent, len(request.tokens) - self.chances.lag)]
        sent, request.tokens_sent = request.tokens_sent, len(known)
        begins, request.announced = not request.announced, True
        return RequestStep(
            request.request_id,
            start,
            total,
            tuple(request.blocks[first : last + 1]),
            settled=start + count,
            new_tokens=tuple(known[sent:]),
            tokens_from=sent,
            first=begins,
            resumed=resumed,
            cache_salt=request.salt if begins else "",
            identity=request.identity if begins else PLAIN,
        )

    def _write(self, request: SimRequest, count: int, guesses: list[int]) -> dict[int, Row]:
        fed = [*request.tokens[: request.computed + count], *guesses]
        rows = {}
        for position in range(request.computed, len(fed)):
            block, offset = divmod(position, self.block_size)
            rows[request.blocks[block] * self.block_size + offset] = tuple(fed[: position + 1])
            request.written.add(position)
        return rows

    def _sample(self, request: SimRequest, guesses: list[int]) -> None:
        if request.computed < len(request.tokens):
            return
        for guess in guesses:
            token = self.random.randrange(VOCABULARY)
            request.tokens.append(token)
            if token != guess:
                break
            request.computed += 1
        else:
            request.tokens.append(self.random.randrange(VOCABULARY))
        stop = self.random.random() < self.chances.stop_early
        if stop and guesses:
            # A stop token among the accepted drafts: what came behind it is cut.
            del request.tokens[self.random.randint(request.tokens_sent, len(request.tokens)) :]
        if stop or len(request.tokens) >= request.target:
            self._finish(request)

    def _finish(self, request: SimRequest) -> None:
        if request.running:
            self._release(request)
        else:
            self.waiting.remove(request)
        if request.announced:
            new = tuple(request.tokens[request.tokens_sent :])
            self.finished.append(
                FinishedRequest(request.request_id, len(request.tokens), new, request.tokens_sent)
            )
        self.ended.append(request)

    def _release(self, request: SimRequest) -> None:
        self.running.remove(request)
        request.running = False
        self.free_blocks += request.blocks
        request.blocks = []
        self.random.shuffle(self.free_blocks)
