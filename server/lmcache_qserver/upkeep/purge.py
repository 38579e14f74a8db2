"""`l2 purge`: delete everything of a model, or of one salt of it, now.

What is in quarantine, too. Servers that run may hold it in memory, and may write on while this runs: purge them first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lmcache_qprotocol.keys import salt_digest
from lmcache_qserver.tier import ChunkStore
from lmcache_qserver.upkeep.gc import BATCH_NAMES
from lmcache_qserver.upkeep.selection import Found, Selection, find, find_quarantined


@dataclass(slots=True)
class PurgeCounts:
    """What was deleted.

    Attributes:
        models: objects, by model's folder.
        foreign: names among them that we do not give; left alone.
        quarantined, quarantined_bytes: objects in quarantine; not among the others.
    """

    models: Counter[str] = field(default_factory=Counter)
    objects: int = 0
    nbytes: int = 0
    foreign: int = 0
    quarantined: int = 0
    quarantined_bytes: int = 0

    def add(self, found: Found) -> None:
        """One that goes, and is not in quarantine."""
        assert found.address is not None
        self.models[found.address.model_folder] += 1
        self.objects += 1
        self.nbytes += found.entry.nbytes

    def add_quarantined(self, found: Found) -> None:
        """One that goes from there."""
        self.quarantined += 1
        self.quarantined_bytes += found.entry.nbytes


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
    # Quarantine last: an object that is put aside meanwhile is met here or there.
    for source, add in (
        (find(store, selection), counts.add),
        (find_quarantined(store, selection), counts.add_quarantined),
    ):
        batch: list[str] = []
        async for found in source:
            if found.address is None:
                counts.foreign += 1
                continue
            add(found)
            if dry_run:
                continue
            batch.append(found.entry.name)
            if len(batch) == BATCH_NAMES:
                await store.delete(batch)
                batch = []
        if batch:
            await store.delete(batch)
    return counts
