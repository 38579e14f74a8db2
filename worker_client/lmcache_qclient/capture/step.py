"""What one engine step does to its requests, in words that know no engine.

The engine's scheduler side fills these in (vllm/schedule.py), the ledger reads them (ledger.py). They travel from the
scheduler's process to the worker's with the step's own metadata.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_qprotocol.identity import PLAIN, Identity
from lmcache_qprotocol.reasons import LossReason


@dataclass(frozen=True)
class RequestStep:
    """One request's part of a step.

    Attributes:
        request_id: the engine's id.
        start: first position computed in this step.
        count: positions computed; the step covers [start, start + count).
        block_ids: the engine's cache blocks of the reference group from block `start // engine_block_size` on; they
            cover the whole range.
        settled: once the forward is done, positions below this can't be taken back (drafts lie at or above it).
        new_tokens: token ids that have become known since the last step, in order without a gap.
        tokens_from: absolute index of the first of them, also when there are none: how many were told before. Anything
            else tells the ledger that a step was lost on its way.
        first: the request is seen for the first time; `cache_salt`, `identity` and `selected` count then.
        resumed: the request was preempted and begins again at `start`.
        cache_salt: part of the key.
        identity: what besides token ids the tensors depend on.
        selected: absolute positions [from, to) that are to be captured; None: all. The others are `not_selected`.
        skip: why this request is not captured from now on, and never again; None to capture it.
    """

    request_id: str
    start: int
    count: int
    block_ids: tuple[int, ...]
    settled: int
    new_tokens: tuple[int, ...] = ()
    first: bool = False
    resumed: bool = False
    cache_salt: str = ""
    identity: Identity = PLAIN
    skip: LossReason | None = None
    tokens_from: int = 0
    selected: tuple[int, int] | None = None


@dataclass(frozen=True)
class FinishedRequest:
    """A request that has ended, for whatever cause.

    Attributes:
        request_id: the engine's id.
        num_tokens: its final length; rows at or beyond it were computed in vain. None when unknown.
        new_tokens, tokens_from: as in `RequestStep`; `tokens_from` counts only where there are tokens.
        skip: why nothing of it that is still open may be stored; None to store what is whole.
    """

    request_id: str
    num_tokens: int | None = None
    new_tokens: tuple[int, ...] = ()
    tokens_from: int = 0
    skip: LossReason | None = None


@dataclass(frozen=True)
class StepMeta:
    """One engine step: what ended before it, then what it computes.

    Attributes:
        untold: tokens that the step computes besides, of which nothing more is known.
    """

    requests: tuple[RequestStep, ...] = ()
    finished: tuple[FinishedRequest, ...] = field(default=())
    untold: int = 0
