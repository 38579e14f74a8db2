"""Finding chunks, whole or in pieces, leasing them to a reader, and handing out their bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.hashing import chunk_hash
from lmcache_qprotocol.keys import KeyFamily, ObjectKey
from lmcache_qprotocol.messages import (
    ChunkQuery,
    IdentitiesReply,
    IdentityQuery,
    LookupReply,
    Missing,
    PartialChunk,
    RetrieveReply,
    StoredChunk,
)
from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.pool import Pool, Slot
from lmcache_qserver.qstore.by_tokens import content_of
from lmcache_qserver.qstore.index import Index
from lmcache_qserver.qstore.leases import Leases
from lmcache_qserver.qstore.read_totals import LOOKUP, RETRIEVE, ReadTotals
from lmcache_qserver.qstore.stored_object import StoredObject


@dataclass(frozen=True, slots=True)
class _Hit:
    """One object that a query finds: rows [a, c) of the chunk at `place`."""

    place: int
    stored: StoredObject
    valid: tuple[int, int] | None = None
    """None: a whole chunk, all of it."""

    def located(self) -> StoredChunk:
        return self.stored.located(self.place, self.valid)


@dataclass(slots=True)
class _Answer:
    """All that a query finds and misses, in order."""

    chunk_size: int
    hits: list[_Hit] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    def reach(self, hits: list[_Hit]) -> int:
        """Tokens that these hits hold without a gap from place 0."""
        tokens = 0
        for hit in hits:
            first, end = hit.valid if hit.valid is not None else (0, self.chunk_size)
            start = hit.place * self.chunk_size
            if start + first > tokens:
                break
            tokens = max(tokens, start + end)
        return tokens


def lookup(index: Index, totals: ReadTotals, query: ChunkQuery, chunk_size: int) -> LookupReply:
    """How far what is stored reaches, and all that is missing. Promises nothing: only a lease keeps a chunk.

    Raises:
        RequestError(bad_payload): a partial chunk is longer than a chunk.
    """
    answer = _search(index, query, chunk_size)
    totals.found(LOOKUP, len(answer.hits), answer.missing)
    tokens = answer.reach(answer.hits)
    return LookupReply(prefix=tokens // chunk_size, missing=tuple(answer.missing), tokens=tokens)


def retrieve(
    index: Index,
    leases: Leases,
    totals: ReadTotals,
    client: Hashable,
    query: ChunkQuery,
    chunk_size: int,
    now: float,
) -> RetrieveReply:
    """Lease what is there, as far as the client's cap reaches; what is cut off is in neither list of the answer.

    Raises:
        RequestError(bad_payload): a partial chunk is longer than a chunk.
    """
    answer = _search(index, query, chunk_size)
    slots: list[Slot] = [hit.stored.slot for hit in answer.hits]
    count = leases.affordable(client, slots)
    lease_id = leases.grant(client, slots[:count], now)
    leased = answer.hits[:count]
    totals.found(RETRIEVE, len(answer.hits), answer.missing)
    nbytes = sum(hit.stored.slot.nbytes for hit in leased)
    totals.leased(count, nbytes, capped=count < len(answer.hits))
    return RetrieveReply(
        lease_id=lease_id,
        chunks=tuple(hit.located() for hit in leased),
        missing=tuple(answer.missing),
        partial=count < len(answer.hits),
        tokens=answer.reach(leased),
        lease_ms=int(leases.timeout_s * 1000) if lease_id else 0,
    )


@dataclass(frozen=True, slots=True)
class PinnedBytes:
    """Bytes of the pool that stay as they are until `release` is called, whatever becomes of the lease.

    Attributes:
        data: uint8 `[nbytes]`, read-only.
        release: called once, on the event loop, when nobody reads `data` any more.
    """

    data: npt.NDArray[np.uint8]
    release: Callable[[], None]

    @property
    def view(self) -> memoryview:
        """`data` as a frame."""
        return memoryview(self.data)  # type: ignore[arg-type]  # numpy's stubs hide the buffer from Python 3.10


def fetch(
    pool: Pool,
    leases: Leases,
    client: Hashable,
    lease_id: int,
    place: int,
    part: tuple[int, int],
    now: float,
) -> PinnedBytes:
    """Bytes [a, b) of the chunk at this place of a lease.

    Raises:
        RequestError: unknown_lease when it is over; bad_payload for bytes or a place that it does not have.
    """
    slot = leases.slot(client, lease_id, place, now)
    first, end = part
    if not 0 <= first < end <= slot.nbytes:
        raise RequestError(
            ErrorCode.BAD_PAYLOAD, f"the chunk has bytes [0, {slot.nbytes}), not [{first}, {end})"
        )
    pool.lease(slot)
    return PinnedBytes(pool.view(slot)[first:end], partial(pool.release, slot))


def identities(index: Index, query: IdentityQuery, chunk_size: int) -> IdentitiesReply:
    """Under which identities the asked tokens are stored.

    Raises:
        RequestError(bad_payload): a chunk is longer than a chunk.
    """
    if any(len(chunk.tokens) > chunk_size for chunk in query.chunks):
        raise RequestError(ErrorCode.BAD_PAYLOAD, f"a chunk has at most {chunk_size} tokens")
    return index.identities(query, chunk_size)


def _search(index: Index, query: ChunkQuery, chunk_size: int) -> _Answer:
    answer = _Answer(chunk_size)
    partials = {partial.index: partial for partial in query.partials}
    for place, name in enumerate(query.chunk_hashes):
        partial = partials.pop(place, None)
        key = ObjectKey(family=query.family, chunk_hash=name)
        stored = index.get(key)
        if stored is not None:
            answer.hits.append(_Hit(place, stored))
        elif partial is not None:
            _search_partial(index, query.family, partial, answer)
        else:
            answer.missing.append(Missing(place, index.miss_reason(key)))
    for partial in partials.values():
        _search_partial(index, query.family, partial, answer)
    return answer


def _search_partial(
    index: Index, family: KeyFamily, partial: PartialChunk, answer: _Answer
) -> None:
    """By hash if a whole chunk is asked for and there, else by tokens."""
    asked = len(partial.tokens)
    if asked > answer.chunk_size or any(item.offset >= asked for item in partial.items):
        raise RequestError(
            ErrorCode.BAD_PAYLOAD,
            f"a partial chunk has at most {answer.chunk_size} tokens, and its items begin among them",
        )
    reason = MissReason.TOO_SHORT
    if asked == answer.chunk_size:
        name = chunk_hash(partial.parent_hash, partial.tokens, 0, partial.items)
        key = ObjectKey(family=family, chunk_hash=name)
        stored = index.get(key)
        if stored is not None:
            answer.hits.append(_Hit(partial.index, stored))
            return
        reason = index.miss_reason(key)
    content = content_of(partial.parent_hash, partial.tokens, partial.items)
    chosen, gaps = index.cover(family, content)
    for one in chosen:
        found = index.get(one.key)
        assert found is not None, "what is found by its tokens is stored"
        answer.hits.append(_Hit(partial.index, found, (one.first, one.agreed)))
    answer.missing += [Missing(partial.index, reason, gap) for gap in gaps]
