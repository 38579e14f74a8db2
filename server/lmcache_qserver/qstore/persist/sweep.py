"""Going through a store of files from time to time: what lies there, what is too old, and what is too much.

A bucket has rules of its own for that (lifecycle rules), which work for all servers that share it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_qserver.qstore.persist.held import Held
from lmcache_qserver.tier import ChunkStore, Entry
from lmcache_qserver.tier.paths import parse_name
from lmcache_qserver.upkeep.gc import delete, expired, expired_in_quarantine, surplus
from lmcache_qserver.upkeep.selection import Selection, find

logger = logging.getLogger(__name__)

LOW_SHARE = 0.9
"""Of the limit: so much is left when it has been exceeded, so that not every object makes another go."""


@dataclass(slots=True)
class Swept:
    """Objects that went, and their bytes.

    Attributes:
        expired: too old, in quarantine, too.
        surplus: unused for the longest time, because there was too much.
    """

    expired: int = 0
    surplus: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class Inspected:
    """What was found.

    Attributes:
        entries: all objects, where something may have to go.
        foreign: names that no key has.
    """

    entries: list[Entry]
    objects: int = 0
    nbytes: int = 0
    foreign: int = 0


async def inspect(store: ChunkStore, held: Held, *, keep_entries: bool) -> Inspected:
    """List all, and let `held` know that and no more; what is written meanwhile is not forgotten.

    Raises:
        TierError: the store can't be listed; `held` stays as it was.
    """
    inspected = Inspected([])
    fresh = held.begin_anew()
    async for found in find(store, Selection()):
        if found.address is None:
            inspected.foreign += 1
            continue
        entry = found.entry
        fresh.add(entry.name, found.address, entry.nbytes)
        inspected.objects += 1
        inspected.nbytes += entry.nbytes
        if keep_entries:
            inspected.entries.append(entry)
    held.take(fresh)
    return inspected


async def sweep(
    store: ChunkStore,
    held: Held,
    inspected: Inspected,
    *,
    max_bytes: int,
    ttl_s: float,
    wall: float,
    swept: Swept,
) -> set[str]:
    """Delete what has to go; its names, but for those in quarantine.

    Args:
        max_bytes: what may lie there; 0: any.
        ttl_s: age at which it goes, seconds; 0: never.
        wall: seconds since the epoch.
        swept: counts it.

    Raises:
        TierError: some may be left; sweeping again is safe.
    """
    old = expired(inspected.entries, wall - ttl_s) if ttl_s else []
    put_aside = await expired_in_quarantine(store, wall - ttl_s) if ttl_s else []
    gone = {entry.name for entry in old}
    rest = [entry for entry in inspected.entries if entry.name not in gone]
    exceeded = max_bytes and sum(entry.nbytes for entry in rest) > max_bytes
    too_much = []
    if exceeded:  # in a thread: of very many it takes long
        too_much = await asyncio.to_thread(surplus, rest, int(max_bytes * LOW_SHARE))
    async for batch in delete(store, [*old, *put_aside]):
        swept.expired += len(batch)
        _note_gone(held, batch, swept)
    async for batch in delete(store, too_much):
        swept.surplus += len(batch)
        _note_gone(held, batch, swept)
    if old or put_aside or too_much:
        logger.info(
            "the persistent tier was swept: %d objects were too old, %d too many",
            len(old) + len(put_aside),
            len(too_much),
        )
    return gone | {entry.name for entry in too_much}


def _note_gone(held: Held, batch: Sequence[Entry], swept: Swept) -> None:
    for entry in batch:
        swept.nbytes += entry.nbytes
        address = parse_name(entry.name)
        if address is not None:
            held.remove(entry.name, address, entry.nbytes)
