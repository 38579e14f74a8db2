"""Is what is stored of a sequence what somebody has in hand: every object of one rank, wherever in the sequence.

A reader joins objects to a prefix and takes of several that hold a row the one that reaches furthest. Here each is read
for itself, behind gaps too, a chunk at a time: so nothing is as large as the sequence.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np

from lmcache_qclient.qcache.catalog import RankPart
from lmcache_qclient.qcache.reading import Found, Wanted, find, no_more_leases, under_lease
from lmcache_qclient.qcache.session import Session
from lmcache_qclient.qcache.source import ChunkRead
from lmcache_qclient.qcache.stitch import Bits, check_chunk
from lmcache_qprotocol.messages import ChunkQuery, RetrieveReply


def compare(
    session: Session, wanted: Wanted, rank: RankPart, values: Bits, threads: int
) -> tuple[Found, int | None]:
    """Look a sequence up, and compare all that is there.

    Args:
        wanted: of this rank alone.
        values: `[layers, tokens, heads, head_dim]` of this rank.
        threads: that may copy.

    Returns:
        What is there, and the first token at which some of it differs, if any does.
    """
    found = find(session, wanted)
    absent: Counter[int] = Counter()
    for miss in found.missing:
        absent[miss.index] += miss.end - miss.start
    for index in range(wanted.num_chunks):
        start = index * wanted.chunk_size
        of_chunk = values[:, start : start + wanted.chunk_size]
        if absent[index] == of_chunk.shape[1]:
            continue
        query = _query(wanted, rank, index, whole=index not in found.in_pieces[rank.rank])
        use = partial(_difference, session, wanted, rank, of_chunk, threads)
        row, _ = under_lease(session, query, use, of_chunk.shape[1])
        if row is not None:
            return found, start + row
    return found, None


def _query(wanted: Wanted, rank: RankPart, index: int, whole: bool) -> ChunkQuery:
    return ChunkQuery(
        family=wanted.layout.family(rank, wanted.cache_salt),
        chunk_hashes=wanted.hashes[index : index + 1],
        parent_hash=wanted.parent(index),
        partials=() if whole else (wanted.partial(index, 0),),
    )


def _difference(
    session: Session,
    wanted: Wanted,
    rank: RankPart,
    values: Bits,
    threads: int,
    reply: RetrieveReply,
) -> int | None:
    """The first row of a chunk at which a leased object differs from the values.

    Raises:
        RequestError(too_many_leases): not all objects were leased.
    """
    if reply.partial:
        raise no_more_leases()
    if not reply.chunks:
        return None
    source = session.source()
    layers, _, *row = values.shape
    reads, compared = [], []
    for place, chunk in enumerate(reply.chunks):
        check_chunk(chunk, rank.layout, wanted.chunk_size, source.nbytes)
        first, end = chunk.valid if chunk.valid is not None else chunk.rows
        target = np.empty((layers, end - first, *row), dtype=values.dtype)
        reads.append(ChunkRead(place, chunk, (first, end), ((target, slice(None)),)))
        compared.append((first, target))
    source.read(reply.lease_id, reads, threads)
    differing = [
        first + int(differs.argmax())
        for first, target in compared
        if (differs := _differing_rows(target, values[:, first : first + target.shape[1]])).any()
    ]
    return min(differing, default=None)


def _differing_rows(one: Bits, other: Bits) -> Bits:
    """Bool, one for each row."""
    rows: Bits = (one != other).any(axis=(0, 2, 3))
    return rows
