"""`l2 gc`: what has to go because it is too old, in quarantine, too, or because there is too much.

Deciding is pure; `delete` does it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from lmcache_qserver.tier import ChunkStore, Entry
from lmcache_qserver.upkeep.selection import Selection, find, find_quarantined
from lmcache_qserver.upkeep.usefulness import most_useful_first

BATCH_NAMES = 256
"""Names that are deleted at a time."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes, and what stays.

    Attributes:
        expired: too old.
        surplus: least recently used of the others, in this order.
        quarantined: too old, in quarantine. What stays there is counted nowhere.
        foreign: names that we do not give: they stay, and are not counted as kept.
    """

    expired: list[Entry]
    surplus: list[Entry]
    quarantined: list[Entry]
    kept_objects: int
    kept_bytes: int
    foreign: int


async def plan(
    store: ChunkStore, now: float, older_than_s: float | None, max_bytes: int | None
) -> Plan:
    """Go through a store and decide; every object that is ours is in memory for it (some 800 bytes each).

    Args:
        now: seconds since the epoch; ages are by the store's clock.
        older_than_s: what was put longer ago goes, however often it is used; None: nothing is too old.
        max_bytes: of all objects; None: any.

    Raises:
        TierError: the store can't be listed.
    """
    entries, foreign = [], 0
    async for found in find(store, Selection()):
        if found.address is None:
            foreign += 1
        else:
            entries.append(found.entry)
    old, put_aside = [], []
    if older_than_s is not None:
        old = expired(entries, now - older_than_s)
        put_aside = await expired_in_quarantine(store, now - older_than_s)
    gone = {entry.name for entry in old}
    rest = [entry for entry in entries if entry.name not in gone]
    too_much = [] if max_bytes is None else surplus(rest, max_bytes)
    return Plan(
        expired=old,
        surplus=too_much,
        quarantined=put_aside,
        kept_objects=len(rest) - len(too_much),
        kept_bytes=_nbytes(rest) - _nbytes(too_much),
        foreign=foreign,
    )


def expired(entries: Iterable[Entry], before: float) -> list[Entry]:
    """Those that were put before then (seconds since the epoch), oldest first."""
    return sorted(
        (entry for entry in entries if entry.modified < before),
        key=lambda entry: (entry.modified, entry.name),
    )


async def expired_in_quarantine(store: ChunkStore, before: float) -> list[Entry]:
    """The same of what is in quarantine: what was captured does not outlive its age there.

    Raises:
        TierError: the store can't be listed.
    """
    found = find_quarantined(store, Selection())
    return expired([each.entry async for each in found if each.address is not None], before)


def surplus(entries: Iterable[Entry], max_bytes: int) -> list[Entry]:
    """The fewest of the least recently used, in this order, without which the others have at most `max_bytes`.

    What is larger than that alone goes before all others: it can't stay, and they would go in vain. A file system that
    is broken may give a file any length. Else what hangs on something goes before it; see usefulness.py.
    """
    by_worth = most_useful_first(entries)
    ordered = sorted(
        by_worth, key=lambda entry: entry.nbytes > max_bytes
    )  # stable: the order of worth stays
    excess = _nbytes(ordered) - max_bytes
    chosen = []
    for entry in reversed(ordered):
        if excess <= 0:
            break
        chosen.append(entry)
        excess -= entry.nbytes
    return chosen


async def delete(
    store: ChunkStore, entries: Sequence[Entry], dry_run: bool = False
) -> AsyncIterator[Sequence[Entry]]:
    """Delete them; yields those that are gone, as they go.

    Args:
        dry_run: only say so.

    Raises:
        TierError: the store refuses, or is not there any more; what has not been yielded may be left.
    """
    for first in range(0, len(entries), BATCH_NAMES):
        batch = entries[first : first + BATCH_NAMES]
        if not dry_run:
            await store.delete([entry.name for entry in batch])
        yield batch


def _nbytes(entries: Iterable[Entry]) -> int:
    return sum(entry.nbytes for entry in entries)
