"""Finding objects in the persistent tier: by hash under their parent, and by tokens among all that hang on it.

No index is kept: an object's name follows from its key and its parent, and what hangs on one parent lies in one folder.
So what another server has stored a moment ago is found like what this one stored last year.

By tokens: a piece or chunk whose hash is that of the asked tokens up to its end agrees with all of them, and its name
alone tells. Of the others the headers are read, `MOST_HEADERS` of them at most: those say their tokens. Nothing of this
is proven; what is found here is proven when it is brought into the pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

from lmcache_qprotocol.hashing import chunk_hash
from lmcache_qprotocol.keys import KeyFamily, ObjectKey
from lmcache_qprotocol.messages import PartialChunk
from lmcache_qserver.qstore.by_tokens import Candidate, agreement, content_of
from lmcache_qserver.qstore.persist.records import content_of_header, key_at
from lmcache_qserver.tier import ChunkStore, Corrupt, NotThere, Unavailable
from lmcache_qserver.tier.format import ALIGNMENT, Header, header_bytes, read_header
from lmcache_qserver.tier.paths import Address, address_of, name_of, parse_name

MOST_HEADERS = 64
QUESTION_S = 2.5
"""How long a reader waits for the answer to a small question, before any data. A reader asks up to three questions in a
row, and has ten seconds (the SDK's time-out) to be told that the store does not answer."""

T = TypeVar("T")


def names_of(key: ObjectKey, parent: bytes) -> tuple[str, ...]:
    """Where its object may lie: under its parent, and where writers that did not tell it put theirs."""
    unknown = name_of(key)
    return (name_of(key, parent), unknown) if any(parent) else (unknown,)


async def _soon(question: Awaitable[T]) -> T:
    try:
        return await asyncio.wait_for(question, QUESTION_S)
    except asyncio.TimeoutError:
        raise Unavailable(f"no answer in {QUESTION_S:g} s") from None


async def find_name(store: ChunkStore, key: ObjectKey, parent: bytes) -> str | None:
    """Under which name the key's object lies; None if it does not.

    Raises:
        TierError: the store can't say.
    """
    for name in names_of(key, parent):
        if await _soon(store.head(name)) is not None:
            return name
    return None


async def read_head(store: ChunkStore, name: str) -> tuple[Header, bytes]:
    """An object's header, and its bytes.

    Raises:
        TierError: NotThere, Corrupt, or the store can't say.
    """
    head = bytearray(ALIGNMENT)
    await _soon(store.get_into(name, [memoryview(head)], to_end=False))
    length = header_bytes(memoryview(head))
    if length > len(head):
        head = bytearray(length)
        await _soon(store.get_into(name, [memoryview(head)], to_end=False))
    return read_header(memoryview(head)), bytes(head)


async def find_by_tokens(
    store: ChunkStore, family: KeyFamily, asked: PartialChunk, chunk_size: int
) -> list[tuple[Candidate, str]]:
    """Objects that hold rows of the asked tokens, and their names; in no order.

    Raises:
        TierError: the store can't say.
    """
    found: list[tuple[Candidate, str]] = []
    unclear: list[Address] = []
    for address in await _soon(_children(store, family, asked.parent_hash)):
        first, end = address.rows or (0, chunk_size)
        if end <= len(asked.tokens) and _hash_up_to(asked, end) == address.chunk_hash:
            found.append((Candidate(key_at(family, address), first, end), address.name))
        elif first < len(asked.tokens):
            unclear.append(address)
    if any(candidate.agreed == len(asked.tokens) and not candidate.first for candidate, _ in found):
        return found
    looked_at = await asyncio.gather(
        *(_look(store, family, asked, address) for address in _nearest(unclear))
    )
    return found + [one for one in looked_at if one is not None]


async def _children(store: ChunkStore, family: KeyFamily, parent: bytes) -> list[Address]:
    """All that hangs on a parent."""
    some = address_of(ObjectKey(family=family, chunk_hash=parent), parent)
    begins = f"{some.folder}/{parent.hex()}-"
    addresses = []
    async for entry in store.list_beginning(begins):
        address = parse_name(entry.name)
        if address is not None:
            addresses.append(address)
    return addresses


def _nearest(addresses: list[Address]) -> Iterable[Address]:
    """Those that begin first: what begins later is of no use without them."""
    return sorted(addresses, key=lambda one: (one.rows or (0, 0), one.chunk_hash))[:MOST_HEADERS]


async def _look(
    store: ChunkStore, family: KeyFamily, asked: PartialChunk, address: Address
) -> tuple[Candidate, str] | None:
    """How far an object's tokens agree; None if not at all, or if it is not there any more."""
    try:
        header, _ = await read_head(store, address.name)
    except (NotThere, Corrupt):
        return None
    content = content_of_header(header)
    if content is None:
        return None
    mine = content_of(asked.parent_hash, asked.tokens, asked.items)
    agreed, first = agreement(content, mine), header.rows[0]
    return (
        (Candidate(key_at(family, address), first, agreed), address.name)
        if agreed > first
        else None
    )


def _hash_up_to(asked: PartialChunk, end: int) -> bytes:
    return chunk_hash(asked.parent_hash, asked.tokens[:end], 0, asked.items)
