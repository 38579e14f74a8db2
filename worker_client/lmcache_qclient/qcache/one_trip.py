"""A retrieve in one round trip: what most of them are.

When all whole chunks of a sequence are there, and one lease per rank holds them, there is nothing to look up: the
answer that leases them says how far they reach. Whatever else it says (a chunk that is not there whole, a lease that
was cut by its cap) is left to reading.py, which asks again in more words.

The release is sent, and nobody waits for its answer: see `Session.still_leased`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmcache_qclient.qcache.catalog import RankPart
from lmcache_qclient.qcache.reading import (
    Batch,
    Found,
    Wanted,
    all_persisted,
    any_flag,
    any_nonfinite,
    batch_size,
    copy_leading,
    found_behind_hashes,
)
from lmcache_qclient.qcache.session import Session
from lmcache_qclient.qcache.stitch import Bits
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import ChunkQuery, RetrieveReply
from lmcache_qprotocol.operations import RELEASE_Q, RETRIEVE_Q

Answer = tuple[RankPart, Batch, RetrieveReply]
"""A rank, what it was asked for, and what it leased."""


@dataclass(frozen=True)
class Leased:
    """All that is there of a sequence, held for us; it ends in `read` or in `give_back`.

    Attributes:
        asked_at: seconds, before the first request was sent.
    """

    found: Found
    replies: tuple[Answer, ...]
    asked_at: float


def lease(session: Session, wanted: Wanted) -> Leased | None:
    """Lease a sequence on all ranks; None when it takes more than this, and nothing is held then."""
    if wanted.layout.missing_ranks or len(wanted.hashes) > batch_size(session):
        return None
    asked_at = session.now()
    replies: list[Answer] = []
    try:
        for part in wanted.layout.parts:
            batch = _everything(wanted, part)
            reply: RetrieveReply = session.ask(RETRIEVE_Q, (batch.query,))
            replies.append((part, batch, reply))
            if reply.partial or any(miss.index < len(wanted.hashes) for miss in reply.missing):
                give_back(session, replies)
                return None
    except BaseException:
        give_back(session, replies)
        raise
    found = found_behind_hashes(wanted, [(part, reply.missing) for part, _, reply in replies])
    flagged = any_flag(any_nonfinite(reply) for _, _, reply in replies)
    persisted = all(all_persisted(reply) for _, _, reply in replies)
    found = replace(found, nonfinite=flagged, persisted=persisted)
    return Leased(found, tuple(replies), asked_at)


def read(session: Session, wanted: Wanted, leased: Leased, target: Bits, threads: int) -> bool:
    """Copy what is leased into `target`, and give it back.

    Args:
        target: `[layers, >= num_tokens, heads, head_dim]`, bits of the layout's dtype.
        threads: that may copy.

    Returns:
        False when what was copied proves nothing: the lease may have run out meanwhile.
    """
    try:
        whole = all(
            copy_leading(session, wanted, part, batch, reply, target, threads)
            >= leased.found.num_tokens
            for part, batch, reply in leased.replies
        )
        shortest_ms = min((reply.lease_ms for _, _, reply in leased.replies), default=0)
        held = leased.found.num_tokens == 0 or session.still_leased(leased.asked_at, shortest_ms)
    except RequestError as error:
        if error.code is not ErrorCode.UNKNOWN_LEASE:
            raise
        return False
    finally:
        give_back(session, leased.replies)
    return whole and held


def give_back(session: Session, replies: Sequence[Answer]) -> None:
    """Send the release of all leases; a lease that is over already, or a dead connection, is of no concern."""
    lease_ids = tuple(reply.lease_id for _, _, reply in replies if reply.lease_id)
    if lease_ids:
        session.tell(RELEASE_Q, (lease_ids,))


def _everything(wanted: Wanted, part: RankPart) -> Batch:
    """All whole chunks by hash, and the chunk that the sequence ends in by its tokens."""
    whole = len(wanted.hashes)
    query = ChunkQuery(
        family=wanted.layout.family(part, wanted.cache_salt),
        chunk_hashes=wanted.hashes,
        parent_hash=wanted.root,
        partials=tuple(wanted.partial(index, index) for index in range(whole, wanted.num_chunks)),
    )
    return Batch(query, 0, wanted.num_tokens)
