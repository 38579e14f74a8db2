"""`l2 ls`: the objects of a store, one by one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from lmcache_qserver.tier import ChunkStore, NotThere, TierError
from lmcache_qserver.tier.format import Header
from lmcache_qserver.upkeep.reading import read_header
from lmcache_qserver.upkeep.selection import Found, Selection, find
from lmcache_qserver.upkeep.several import several

HEADERS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Listed:
    """One object.

    Attributes:
        header: what it says of itself, unproven; None if nobody asked, or it can't be read.
        error: code of why the header can't be read; empty if nothing is wrong.
    """

    found: Found
    header: Header | None = None
    error: str = ""


async def ls(store: ChunkStore, selection: Selection, headers: bool) -> AsyncIterator[Listed]:
    """What is meant, as the store lists it.

    Args:
        headers: read them, a request each.

    Raises:
        TierError: the store can't be listed (any more).
    """
    if not headers:
        async for found in find(store, selection):
            yield Listed(found)
        return
    work = partial(_with_header, store)
    async for listed in several(find(store, selection), work, HEADERS_AT_ONCE):
        if listed.error != NotThere.code:  # deleted meanwhile
            yield listed


async def _with_header(store: ChunkStore, found: Found) -> Listed:
    if found.address is None:
        return Listed(found)
    try:
        return Listed(found, await read_header(store, found.entry))
    except TierError as error:
        return Listed(found, error=error.code)
