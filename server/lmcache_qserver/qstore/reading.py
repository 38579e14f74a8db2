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
from lmcache_qserver.qstore.cover import cover
from lmcache_qserver.qstore.index import Index
from lmcache_qserver.qstore.leases import Leases
from lmcache_qserver.qstore.persist.found import NOWHERE_ELSE, Elsewhere
from lmcache_qserver.qstore.persist.read_through import Brought
from lmcache_qserver.qstore.read_totals import LOOKUP, RETRIEVE, ReadTotals
from lmcache_qserver.qstore.stored_object import StoredObject


@dataclass(frozen=True, slots=True)
class _Hit:
    """One object that a query finds: rows [a, c) of the chunk at `place`."""

    place: int
    object: StoredObject | None
    """None: it is in the persistent tier only."""
    valid: tuple[int, int] | None = None
    """None: a whole chunk, all of it."""

    @property
    def stored(self) -> StoredObject:
        assert self.object is not None, "what is retrieved is in the pool"
        return self.object

    def located(self) -> StoredChunk:
        return self.stored.located(self.place, self.valid)


@dataclass(slots=True)
class _Answer:
    """All that a query finds and misses, in order."""

    chunk_size: int
    hits: list[_Hit] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    def cut_off(self, stop: int) -> None:
        """Leave out what is found or missed from this place of the query on."""
        self.hits = [hit for hit in self.hits if hit.place < stop]
        self.missing = [miss for miss in self.missing if miss.index < stop]

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


def lookup(
    index: Index,
    totals: ReadTotals,
    query: ChunkQuery,
    chunk_size: int,
    elsewhere: Elsewhere = NOWHERE_ELSE,
) -> LookupReply:
    """How far what is stored reaches, and all that is missing. Promises nothing: only a lease keeps a chunk.

    Args:
        elsewhere: what the persistent tier has of it.

    Raises:
        RequestError(bad_payload): a partial chunk is longer than a chunk.
    """
    answer = _search(index, query, chunk_size, elsewhere)
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
    brought: Brought | None = None,
) -> RetrieveReply:
    """Lease what is there, as far as the client's cap reaches; what is cut off is in neither list of the answer.

    Args:
        brought: what came out of the persistent tier for it.

    Raises:
        RequestError(bad_payload): a partial chunk is longer than a chunk.
    """
    brought = brought or Brought()
    answer = _search(index, query, chunk_size, brought.elsewhere)
    cut = brought.stop is not None
    if brought.stop is not None:
        answer.cut_off(brought.stop)
    slots: list[Slot] = [hit.stored.slot for hit in answer.hits]
    count = leases.affordable(client, slots)
    lease_id = leases.grant(client, slots[:count], now)
    leased = answer.hits[:count]
    totals.found(RETRIEVE, len(answer.hits), answer.missing)
    nbytes = sum(hit.stored.slot.nbytes for hit in leased)
    capped = cut or count < len(answer.hits)
    totals.leased(count, nbytes, capped=capped)
    return RetrieveReply(
        lease_id=lease_id,
        chunks=tuple(hit.located() for hit in leased),
        missing=tuple(answer.missing),
        partial=capped,
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


def check(query: ChunkQuery, chunk_size: int) -> None:
    """Whether its partial chunks are such.

    Raises:
        RequestError(bad_payload): one is longer than a chunk.
    """
    for partial_chunk in query.partials:
        asked = len(partial_chunk.tokens)
        if asked > chunk_size or any(item.offset >= asked for item in partial_chunk.items):
            raise RequestError(
                ErrorCode.BAD_PAYLOAD,
                f"a partial chunk has at most {chunk_size} tokens, and its items begin among them",
            )


def _search(index: Index, query: ChunkQuery, chunk_size: int, elsewhere: Elsewhere) -> _Answer:
    check(query, chunk_size)
    answer = _Answer(chunk_size)
    partials = {partial.index: partial for partial in query.partials}
    for place, name in enumerate(query.chunk_hashes):
        partial = partials.pop(place, None)
        key = ObjectKey(family=query.family, chunk_hash=name)
        stored = index.get(key)
        if stored is not None or key in elsewhere.keys:
            answer.hits.append(_Hit(place, stored))
        elif partial is not None:
            _search_partial(index, query.family, partial, answer, elsewhere)
        else:
            answer.missing.append(Missing(place, _reason(index, place, key, elsewhere)))
    for partial in partials.values():
        _search_partial(index, query.family, partial, answer, elsewhere)
    return answer


def _search_partial(
    index: Index,
    family: KeyFamily,
    partial: PartialChunk,
    answer: _Answer,
    elsewhere: Elsewhere,
) -> None:
    """By hash if a whole chunk is asked for and there, else by tokens."""
    asked = len(partial.tokens)
    reason = MissReason.TOO_SHORT
    if asked == answer.chunk_size:
        name = chunk_hash(partial.parent_hash, partial.tokens, 0, partial.items)
        key = ObjectKey(family=family, chunk_hash=name)
        stored = index.get(key)
        if stored is not None or key in elsewhere.keys:
            answer.hits.append(_Hit(partial.index, stored))
            return
        reason = _reason(index, partial.index, key, elsewhere)
    elif partial.index in elsewhere.unavailable:
        reason = MissReason.UNAVAILABLE
    content = content_of(partial.parent_hash, partial.tokens, partial.items)
    here = index.candidates(family, content)
    chosen, gaps = cover([*here, *elsewhere.candidates.get(partial.index, ())], asked)
    for one in chosen:
        answer.hits.append(_Hit(partial.index, index.get(one.key), (one.first, one.agreed)))
    answer.missing += [Missing(partial.index, reason, gap) for gap in gaps]


def _reason(index: Index, place: int, key: ObjectKey, elsewhere: Elsewhere) -> MissReason:
    return elsewhere.reason(place, key) or index.miss_reason(key)
