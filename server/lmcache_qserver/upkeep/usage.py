"""`l2 du`: how much of what lies in a store."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from lmcache_qserver.tier import ChunkStore, Entry
from lmcache_qserver.tier.paths import Address
from lmcache_qserver.upkeep.selection import Selection, find


@dataclass(slots=True)
class Tally:
    """A sum over objects.

    Attributes:
        objects: all of them, pieces included.
        oldest, newest: when they were put, seconds since the epoch; None without objects.
    """

    objects: int = 0
    pieces: int = 0
    nbytes: int = 0
    oldest: float | None = None
    newest: float | None = None

    def add(self, entry: Entry, is_piece: bool = False) -> None:
        """Count one more."""
        self.objects += 1
        self.pieces += is_piece
        self.nbytes += entry.nbytes
        when = entry.modified
        self.oldest = when if self.oldest is None else min(when, self.oldest)
        self.newest = when if self.newest is None else max(when, self.newest)


@dataclass(slots=True)
class Usage:
    """What a store holds.

    Attributes:
        families: by an address that holds no more than model, layout and rank.
        foreign: names that we do not give; not in the total.
        quarantined: (objects, bytes) put aside; not in the total.
    """

    families: dict[Address, Tally] = field(default_factory=lambda: defaultdict(Tally))
    total: Tally = field(default_factory=Tally)
    foreign: Tally = field(default_factory=Tally)
    quarantined: tuple[int, int] = (0, 0)


async def usage(store: ChunkStore) -> Usage:
    """Go through all names; what is kept grows with models, layouts and ranks, not with objects.

    Raises:
        TierError: the store can't be listed.
    """
    result = Usage()
    async for found in find(store, Selection()):
        if found.address is None:
            result.foreign.add(found.entry)
            continue
        is_piece = found.address.rows is not None
        result.families[family_of(found.address)].add(found.entry, is_piece)
        result.total.add(found.entry, is_piece)
    result.quarantined = await store.quarantined()
    return result


def family_of(address: Address) -> Address:
    """The address without what tells objects of one model, layout and rank apart."""
    return replace(address, salt="", chunk_hash=b"", rows=None, parent=b"")
