"""Finding the chunks of a sequence on all ranks, and copying them out of the pool under a lease.

What has been copied counts only when the server confirms the lease's release: a lease that had run out before does not
protect what was read under it, so the batch is read again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_qclient.qcache.catalog import RankPart, StoredLayout
from lmcache_qclient.qcache.retrieval import MissingChunk
from lmcache_qclient.qcache.session import Session
from lmcache_qclient.qcache.stitch import Bits, check_chunk, copy_chunk
from lmcache_qprotocol.errors import ErrorCode, QServerError, RequestError
from lmcache_qprotocol.messages import ChunkQuery, LookupReply, RetrieveReply
from lmcache_qprotocol.operations import LOOKUP_Q, RELEASE_Q, RETRIEVE_Q
from lmcache_qprotocol.reasons import MissReason

LEASE_TRIES = 3


@dataclass(frozen=True)
class Wanted:
    """The whole chunks of one sequence.

    Attributes:
        hashes: one per whole chunk.
        num_tokens: of the sequence; the last may be in a chunk that is not whole.
    """

    layout: StoredLayout
    chunk_size: int
    cache_salt: str
    hashes: tuple[bytes, ...]
    num_tokens: int

    def missing(self, index: int, reason: MissReason, rank: int | None) -> MissingChunk:
        """Chunk `index` of the sequence as a miss."""
        start = index * self.chunk_size
        return MissingChunk(
            index, start, min(start + self.chunk_size, self.num_tokens), reason, rank
        )

    def tail(self) -> list[MissingChunk]:
        """The chunk at the end that is not whole, if there is one."""
        whole = len(self.hashes)
        if self.num_tokens == whole * self.chunk_size:
            return []
        return [self.missing(whole, MissReason.TOO_SHORT, None)]


@dataclass(frozen=True)
class Found:
    """`prefix` chunks are there on all ranks without a gap; `missing` are all that are not, in order."""

    prefix: int
    missing: tuple[MissingChunk, ...]


def find(session: Session, wanted: Wanted) -> Found:
    """Look the chunks up on all ranks, without leasing anything."""
    prefix = len(wanted.hashes)
    missing = wanted.tail()
    for rank in wanted.layout.missing_ranks:
        prefix = 0
        missing += [
            wanted.missing(index, MissReason.NOT_STORED, rank)
            for index in range(len(wanted.hashes))
        ]
    for part in wanted.layout.parts:
        absent = _look_up(session, wanted, part)
        missing += absent
        if absent:
            prefix = min(prefix, absent[0].index)
    return Found(prefix, _in_order(missing))


def _look_up(session: Session, wanted: Wanted, part: RankPart) -> list[MissingChunk]:
    absent = []
    for start, hashes in _batches(session, wanted.hashes):
        family = wanted.layout.family(part, wanted.cache_salt)
        query = ChunkQuery(family=family, chunk_hashes=hashes)
        reply: LookupReply = session.ask(LOOKUP_Q, (query,))
        absent += [
            wanted.missing(start + miss.index, miss.reason, part.rank) for miss in reply.missing
        ]
    return sorted(absent, key=lambda miss: miss.index)


def read(session: Session, wanted: Wanted, found: Found, target: Bits) -> Found:
    """Copy the found prefix into `target`; it may have become shorter since.

    Args:
        target: `[layers, >= prefix * chunk_size, heads, head_dim]`, bits of the layout's dtype.
    """
    prefix = found.prefix
    vanished: list[MissingChunk] = []
    for part in wanted.layout.parts:
        done, miss = _read_part(session, wanted, part, prefix, target)
        if miss is not None:
            prefix = done
            vanished.append(miss)
    return Found(prefix, _in_order([*found.missing, *vanished]))


def _read_part(
    session: Session, wanted: Wanted, part: RankPart, count: int, target: Bits
) -> tuple[int, MissingChunk | None]:
    """Copy the first `count` chunks of one rank.

    Returns:
        How many were copied, and the chunk that was not there any more.
    """
    done = 0
    while done < count:
        hashes = wanted.hashes[done : done + min(count - done, _batch_size(session))]
        copied, reply = _read_batch(
            session, wanted, part, hashes, _region(wanted, part, target, done)
        )
        reasons = {miss.index: miss.reason for miss in reply.missing}
        if copied < len(hashes) and copied in reasons:
            return done + copied, wanted.missing(done + copied, reasons[copied], part.rank)
        if not copied:
            raise RequestError(
                ErrorCode.TOO_MANY_LEASES,
                "the server leases no more to this client: use one context per reader, and read fewer at a time",
            )
        done += copied
    return done, None


def _region(wanted: Wanted, part: RankPart, target: Bits, done: int) -> Bits:
    """Where one rank's chunks from `done` on go: `[its layers, tokens, its heads, head_dim]`."""
    return target[slice(*part.layers), done * wanted.chunk_size :, slice(*part.heads)]


def _read_batch(
    session: Session, wanted: Wanted, part: RankPart, hashes: tuple[bytes, ...], target: Bits
) -> tuple[int, RetrieveReply]:
    """Lease, copy the leading chunks, release; again when the lease ran out in between.

    Returns:
        How many leading chunks were copied, and what the server said.
    """
    query = ChunkQuery(family=wanted.layout.family(part, wanted.cache_salt), chunk_hashes=hashes)
    for _ in range(LEASE_TRIES):
        reply: RetrieveReply = session.ask(RETRIEVE_Q, (query,))
        try:
            copied = _copy_leading(session, wanted, part, reply, target)
        except BaseException:
            with contextlib.suppress(QServerError, ConnectionError):
                _release(session, reply)
            raise
        if _release(session, reply):
            return copied, reply
    raise RequestError(
        ErrorCode.UNKNOWN_LEASE,
        f"the lease ran out {LEASE_TRIES} times before {len(hashes)} chunks were copied: ask for fewer tokens at a "
        "time, or raise the server's lease timeout",
    )


def _copy_leading(
    session: Session, wanted: Wanted, part: RankPart, reply: RetrieveReply, target: Bits
) -> int:
    """Copy the chunks that follow each other from index 0; how many there were."""
    if not reply.chunks:
        return 0
    pool = session.pool()
    copied = 0
    for chunk in reply.chunks:
        if chunk.index != copied:
            break
        check_chunk(chunk, part.layout, wanted.chunk_size, pool.nbytes)
        start = copied * wanted.chunk_size
        copy_chunk(pool, chunk, target[:, start : start + wanted.chunk_size])
        copied += 1
    return copied


def _release(session: Session, reply: RetrieveReply) -> bool:
    """Give the lease back. False when it had run out, and what was read under it proves nothing."""
    if not reply.lease_id:
        return not reply.chunks
    try:
        session.ask(RELEASE_Q, ((reply.lease_id,),))
    except RequestError as error:
        if error.code is not ErrorCode.UNKNOWN_LEASE:
            raise
        return False
    return True


def _batches(session: Session, hashes: Sequence[bytes]) -> list[tuple[int, tuple[bytes, ...]]]:
    size = _batch_size(session)
    return [(start, tuple(hashes[start : start + size])) for start in range(0, len(hashes), size)]


def _batch_size(session: Session) -> int:
    return max(1, session.connection.hello.limits.chunks_per_request)


def _in_order(missing: Sequence[MissingChunk]) -> tuple[MissingChunk, ...]:
    return tuple(
        sorted(missing, key=lambda miss: (miss.index, -1 if miss.rank is None else miss.rank))
    )
