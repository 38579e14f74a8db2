"""A query, chunk by chunk, and in waves. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lmcache_qprotocol.hashing import NONE_HASH
from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.messages import ChunkQuery, PartialChunk
from lmcache_qserver.qstore.by_tokens import Content, content_of

WAVES = (1, 4, 16)
"""Chunks of a query that are looked for at a time; the last for all further ones."""


@dataclass(frozen=True, slots=True)
class QueryPlace:
    """One chunk of a query.

    Attributes:
        key: of the whole chunk; None where the query is about a part of it.
        partial: the same chunk by its tokens, if the query has it.
    """

    index: int
    key: ObjectKey | None
    parent: bytes
    partial: PartialChunk | None


def places_of(query: ChunkQuery) -> list[QueryPlace]:
    """All chunks of a query, in order."""
    partials = {one.index: one for one in query.partials}
    parent = query.parent_hash or NONE_HASH
    places = []
    for index, name in enumerate(query.chunk_hashes):
        key = ObjectKey(family=query.family, chunk_hash=name)
        places.append(QueryPlace(index, key, parent, partials.pop(index, None)))
        parent = name
    places += [QueryPlace(index, None, one.parent_hash, one) for index, one in partials.items()]
    return places


def wave_sizes() -> Iterator[int]:
    """How many chunks each wave has; never ends."""
    return itertools.chain(WAVES, itertools.repeat(WAVES[-1]))


def waves(places: Sequence[QueryPlace]) -> Iterator[Sequence[QueryPlace]]:
    """All chunks, wave by wave."""
    first = 0
    for size in wave_sizes():
        if first >= len(places):
            return
        yield places[first : first + size]
        first += size


def content_asked(asked: PartialChunk) -> Content:
    """A chunk's asked tokens and items, as the index compares them."""
    return content_of(asked.parent_hash, asked.tokens, asked.items)
