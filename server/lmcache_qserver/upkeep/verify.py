"""`l2 verify`: prove every object of a store, and put aside what is not what its name promises.

    whole        proven
    corrupt      torn, flipped, cut off, another's: not what its name promises
    gone         deleted meanwhile; nothing is wrong
    foreign      a name that we do not give; not looked into
    others       errors' codes (`unavailable`, `refused`): it could not be read, so nobody knows

A corrupt object is looked at once more before it is called so: others may have deleted it and stored it anew while it
was read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from lmcache_qserver.tier import ChunkStore, Corrupt, Entry, NotThere, TierError
from lmcache_qserver.upkeep.reading import Memory, prove
from lmcache_qserver.upkeep.selection import Found, Selection, find
from lmcache_qserver.upkeep.several import several

WHOLE, CORRUPT, GONE, FOREIGN = "whole", "corrupt", "gone", "foreign"
FINE = (WHOLE, GONE, FOREIGN)
AT_ONCE = 4
"""Objects; as many pieces of memory are used."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found out about one object.

    Attributes:
        code: see this file's head.
        why: for people; empty if there is nothing to say.
        is_moved: it is in quarantine now.
    """

    entry: Entry
    code: str
    why: str = ""
    is_moved: bool = False


async def verify(
    store: ChunkStore, selection: Selection, keeper: ChunkStore | None = None
) -> AsyncIterator[Verdict]:
    """Read everything that is meant; memory stays bounded, whatever the size of objects.

    Args:
        keeper: the same place, open for writing: what is corrupt goes to its quarantine.

    Raises:
        TierError: the store can't be listed (any more).
    """
    work = partial(_look, store, Memory(), keeper)
    async for verdict in several(find(store, selection), work, AT_ONCE):
        yield verdict


async def _look(
    store: ChunkStore, memory: Memory, keeper: ChunkStore | None, found: Found
) -> Verdict:
    if found.address is None:
        return Verdict(found.entry, FOREIGN)
    verdict = await _judge(store, found.entry, memory)
    if verdict.code == CORRUPT:
        verdict = await _judge_again(store, verdict, memory)
    if verdict.code == CORRUPT and keeper is not None:
        verdict = await _move(keeper, verdict)
    return verdict


async def _judge(store: ChunkStore, entry: Entry, memory: Memory) -> Verdict:
    try:
        await prove(store, entry, memory)
    except NotThere:
        return Verdict(entry, GONE)
    except Corrupt as error:
        return Verdict(entry, CORRUPT, str(error))
    except TierError as error:
        return Verdict(entry, error.code, str(error))
    return Verdict(entry, WHOLE)


async def _judge_again(store: ChunkStore, verdict: Verdict, memory: Memory) -> Verdict:
    try:
        entry = await store.head(verdict.entry.name)
    except TierError as error:
        return Verdict(verdict.entry, error.code, str(error))
    return Verdict(verdict.entry, GONE) if entry is None else await _judge(store, entry, memory)


async def _move(keeper: ChunkStore, verdict: Verdict) -> Verdict:
    try:
        await keeper.quarantine(verdict.entry.name)
    except TierError as error:
        return Verdict(verdict.entry, CORRUPT, f"{verdict.why}; not moved: {error}")
    return Verdict(verdict.entry, CORRUPT, verdict.why, is_moved=True)
