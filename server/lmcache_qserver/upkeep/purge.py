"""`l2 purge`: delete everything of a model, or of one salt of it, now.

Not what is in quarantine: nothing there tells whose it was. Servers that run may hold it in memory, and may write on
while this runs: purge them first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lmcache_qprotocol.keys import salt_digest
from lmcache_qserver.tier import ChunkStore
from lmcache_qserver.upkeep.gc import BATCH_NAMES
from lmcache_qserver.upkeep.selection import Selection, find


@dataclass(slots=True)
class PurgeCounts:
    """What was deleted.

    Attributes:
        models: objects, by model's folder.
        foreign: names among them that we do not give; left alone.
    """

    models: Counter[str] = field(default_factory=Counter)
    objects: int = 0
    nbytes: int = 0
    foreign: int = 0


async def purge(store: ChunkStore, model_name: str, salt: str | None = None) -> PurgeCounts:
    """Delete all objects of a model.

    Args:
        model_name: see `Selection`.
        salt: the plain salt; empty for objects without one; None for all.

    Raises:
        TierError: some may be left; purging again is safe.
        ValueError: no model has such a name.
    """
    digest = None if salt is None else salt_digest(salt)
    return await purge_selected(store, Selection(model_name, digest))


async def purge_selected(
    store: ChunkStore, selection: Selection, dry_run: bool = False
) -> PurgeCounts:
    """Delete what is meant; it is deleted while it is listed, so memory stays bounded.

    Args:
        dry_run: count only.
    """
    counts = PurgeCounts()
    batch: list[str] = []
    async for found in find(store, selection):
        if found.address is None:
            counts.foreign += 1
            continue
        counts.models[found.address.model_folder] += 1
        counts.objects += 1
        counts.nbytes += found.entry.nbytes
        if dry_run:
            continue
        batch.append(found.entry.name)
        if len(batch) == BATCH_NAMES:
            await store.delete(batch)
            batch = []
    if batch:
        await store.delete(batch)
    return counts
