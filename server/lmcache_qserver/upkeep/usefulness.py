"""Which objects are worth more than others: those used last, and what they hang on.

Readers touch the beginning of a sequence first, or have it in memory, so on disk its head looks as if it was used less
than its tail. A tail without its head is never found. So an object counts as used when anything was that hangs on it,
directly or not, in its salt's folder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from lmcache_qserver.tier import Entry
from lmcache_qserver.tier.paths import NO_PARENT, links_of


def most_useful_first(entries: Iterable[Entry]) -> list[Entry]:
    """By use, latest first, but whatever something hangs on comes before it.

    From the latest used on, each is preceded by all that it hangs on and that has not come yet. Every chunk is gone
    through once: the time is linear, but for sorting, and names that hang on each other in a circle do no harm. A
    chunk's whole object and its pieces may lie there under one hash; what hangs on it hangs on them all.
    """
    by_use = sorted(entries, key=lambda entry: (entry.used, entry.name), reverse=True)
    links = [_links(entry.name) for entry in by_use]
    waiting: dict[int, list[int]] = defaultdict(list)
    for at, (chunk, _) in enumerate(links):
        waiting[chunk].append(at)
    ordered: list[Entry] = []
    is_there = bytearray(len(by_use))
    for at, (_, parent) in enumerate(links):
        line = [[at]]
        while (above := waiting.pop(parent, None)) is not None:
            line.append(above)
            parent = next((links[each][1] for each in above if links[each][1]), 0)
        for objects in reversed(line):
            ordered += [by_use[each] for each in objects if not is_there[each]]
            for each in objects:
                is_there[each] = True
    return ordered


def _links(name: str) -> tuple[int, int]:
    """Chunk and the chunk before, 0 if unknown; by their hashes in this process, which take little memory."""
    folder, parent, chunk = links_of(name)
    return hash((folder, chunk)), 0 if parent == NO_PARENT else hash((folder, parent))
