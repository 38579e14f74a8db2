"""Finding chunks and leasing them to a reader."""

from __future__ import annotations

from collections.abc import Hashable

from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.messages import ChunkQuery, LookupReply, Missing, RetrieveReply
from lmcache_qserver.qstore.index import Index
from lmcache_qserver.qstore.leases import Leases
from lmcache_qserver.qstore.stored_object import StoredObject

Found = list[tuple[int, StoredObject]]
"""Place in the query, and what is there."""


def lookup(index: Index, query: ChunkQuery) -> LookupReply:
    """How far the stored prefix reaches, and all that is missing. Promises nothing: only a lease keeps a chunk."""
    found, missing = _search(index, query)
    return LookupReply(prefix=missing[0].index if missing else len(found), missing=missing)


def retrieve(
    index: Index, leases: Leases, client: Hashable, query: ChunkQuery, now: float
) -> RetrieveReply:
    """Lease what is there, as far as the client's cap reaches; what is cut off is in neither list of the answer."""
    found, missing = _search(index, query)
    count = leases.affordable(client, [stored.slot for _, stored in found])
    lease_id = leases.grant(client, [stored.slot for _, stored in found[:count]], now)
    return RetrieveReply(
        lease_id=lease_id,
        chunks=tuple(stored.located(place) for place, stored in found[:count]),
        missing=missing,
        partial=count < len(found),
    )


def _search(index: Index, query: ChunkQuery) -> tuple[Found, tuple[Missing, ...]]:
    found: Found = []
    missing: list[Missing] = []
    for place, chunk_hash in enumerate(query.chunk_hashes):
        key = ObjectKey(family=query.family, chunk_hash=chunk_hash)
        stored = index.get(key)
        if stored is not None:
            found.append((place, stored))
        else:
            missing.append(Missing(place, index.miss_reason(key)))
    return found, tuple(missing)
