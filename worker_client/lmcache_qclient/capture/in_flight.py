"""Stores under way: who owns the ring blocks until it is known that no copy of them is running."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from lmcache_qclient.capture.finished_chunk import FinishedChunk
from lmcache_qclient.link.requests import ReplyFuture
from lmcache_qprotocol.errors import ErrorCode, QServerError
from lmcache_qprotocol.messages import StoreResult
from lmcache_qprotocol.reasons import LossReason


@dataclass(frozen=True)
class InFlight:
    """One STORE_Q and what it holds.

    Attributes:
        chunk: its blocks are ours until the store has ended.
        future: of the answer.
        generation: how often the ring had been registered again when the store was sent.
        gathered_here: this process reads the blocks, and has done with them when the future is done.
    """

    chunk: FinishedChunk
    future: Future[StoreResult]
    generation: int = 0
    gathered_here: bool = False


@dataclass(frozen=True)
class Verdict:
    """How a store ended.

    Attributes:
        reason: None when the chunk is stored (or was before).
        copy_over: whether the server has said that it is done with the blocks.
        message: for the log.
        stranger: the server does not know our ring (any more).
    """

    reason: LossReason | None
    copy_over: bool
    message: str = ""
    stranger: bool = False


def verdict(future: Future[StoreResult], gathered_here: bool = False) -> Verdict:
    """Read a finished future.

    An answer, even an error, tells that the server is done with the blocks. No answer tells nothing: the copy may still
    be running in a server that hangs, unless it was not the server that read the blocks.
    """
    error = future.exception()
    if error is None:
        return _answered(future.result())
    if isinstance(error, QServerError):
        stranger = error.code is ErrorCode.UNKNOWN_INSTANCE
        return Verdict(LossReason.SERVER_UNAVAILABLE, True, str(error), stranger)
    never_sent = isinstance(future, ReplyFuture) and not future.uid
    return Verdict(
        LossReason.SERVER_UNAVAILABLE, copy_over=never_sent or gathered_here, message=str(error)
    )


def _answered(result: StoreResult) -> Verdict:
    outcome = result.outcome
    if result.ok:
        return Verdict(None, copy_over=True)
    if outcome is None or not outcome.refused:
        return Verdict(LossReason.COPY_FAILED, copy_over=True)
    return Verdict(next(iter(outcome.refused)), copy_over=True, message=outcome.message)
