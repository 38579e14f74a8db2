"""Why a store, or a flush, did not come about.

    StoreError (RuntimeError)
    ├── StoreConflict       the same tokens are stored under this salt already, with other values
    ├── StoreRefused        the server did not take all of it; says what, why, and what it has taken
    └── NotPersisted        it is not, or not known to be, in the persistent tier

What is wrong with an argument is a ValueError or a TypeError, as everywhere; without an answer it is a ConnectionError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_qclient.qcache.stored import Stored
from lmcache_qprotocol.reasons import LossReason, MissReason

LISTED = 8
"""Chunks that a message lists; the attribute has all."""


@dataclass(frozen=True)
class RefusedChunk:
    """One rank's part of a chunk that was not stored.

    Attributes:
        index: of the chunk in the sequence.
        start, end: token positions [start, end).
        rank: whose part (pp_rank * tp_size + tp_rank); None: of all.
        reason: why the server refused it; a `MissReason` if it took it, and does not have it any more.
    """

    index: int
    start: int
    end: int
    rank: int | None
    reason: LossReason | MissReason


class StoreError(RuntimeError):
    """Base of what `store` and `flush` raise on purpose about what they were asked."""


class StoreConflict(StoreError):
    """The same tokens are stored under this salt already, with other values; those are as they were.

    Attributes:
        token: the first position at which they differ.
        chunk: its chunk's index.
        stored: what had been stored before this was found out; most often nothing.
    """

    def __init__(self, token: int, chunk: int, stored: Stored) -> None:
        super().__init__(
            f"other values are stored for these tokens under this cache_salt, from token {token} (chunk {chunk}) on, "
            f"and objects never change; stored before that was found: {stored.in_words}. Choose another cache_salt, or "
            "delete what is there (lmcache-qserver purge --model MODEL --salt SALT)"
        )
        self.token = token
        self.chunk = chunk
        self.stored = stored


class StoreRefused(StoreError):
    """The server did not take all chunks.

    Attributes:
        refused: the chunks that it was asked for in vain. What follows them was not sent any more.
        stored: what it had taken before.
    """

    def __init__(self, refused: Sequence[RefusedChunk], stored: Stored, message: str = "") -> None:
        listed = ", ".join(map(_told, refused[:LISTED]))
        more = f" and {len(refused) - LISTED} more" if len(refused) > LISTED else ""
        super().__init__(
            f"not stored: {listed}{more}{': ' if message else ''}{message}; stored before: {stored.in_words}"
        )
        self.refused = tuple(refused)
        self.stored = stored


class NotPersisted(StoreError):
    """Not everything is in the persistent tier.

    Attributes:
        waiting: objects that wait to be written, or are being written; they stay in memory, and the server goes on.
    """

    def __init__(self, message: str, waiting: int = 0) -> None:
        super().__init__(f"not everything is persisted: {message}; {waiting} objects wait")
        self.waiting = waiting


def _told(chunk: RefusedChunk) -> str:
    rank = "" if chunk.rank is None else f" of rank {chunk.rank}"
    return f"chunk {chunk.index} (tokens {chunk.start} to {chunk.end}){rank}: {chunk.reason.value}"
