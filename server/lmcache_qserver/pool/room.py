"""Which slots to evict so that one contiguous hole of a given size appears.

An extent is contiguous, so evicting victims in order until enough *bytes* are free is not enough,
and evicting in order until the *hole* is there evicts too much: most of the victims lie elsewhere.
So this is decided on the side, before anything is evicted:

1. Take candidates in the policy's order, as if each were freed, and merge them with their
   neighbours, until a hole is large enough. The candidate that was taken last lies in it.
2. Only the candidates inside that hole count. Spare those at its two edges, the most recently used
   first, as long as what remains is large enough.

So of all ways to make room this one reaches least far towards the recently used, and no single
victim of the answer could be spared.

Cost: 1 to 3 us for each of the c candidates looked at. Slots of equal size need c = 1 in a full
pool; a hole of m neighbours among n slots used in random order needs about n^(1 - 1/m), so a chunk
of two slots' size costs 0.5 to 1 ms among 10,000 slots. Unlike sizes in a crowd are the worst: 10
neighbours cost 10 to 20 ms among 10,000 slots and 300 to 500 ms among 100,000 (measured on 2 busy
cores by tests/server/pool/bench_pool.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from lmcache_qserver.pool.extents import Extents
from lmcache_qserver.pool.slot import Slot


def choose_victims(extents: Extents, candidates: Iterable[Slot], span: int) -> list[Slot] | None:
    """The slots to evict for a hole of `span` bytes, first victim first; None when all won't do.

    Args:
        extents: the free list; not changed.
        candidates: slots that may be evicted, first victim first.
        span: bytes, whole alignment units.
    """
    taken: list[Slot] = []
    end_of: dict[int, int] = {}  # holes that the taken ones make, start -> end
    start_of: dict[int, int] = {}  # and end -> start
    for slot in candidates:
        taken.append(slot)
        start, end = extents.hole_around(slot.offset, slot.offset + slot.span)
        # Holes of taken slots end where allocated slots begin: they have absorbed the free extents
        # at their ends. So a hole to merge with, if there is one, meets the slot's own edge.
        start = start_of.pop(slot.offset, start)
        end = end_of.pop(slot.offset + slot.span, end)
        if end - start >= span:
            return _spare_edges(taken, start, end, span)
        end_of[start] = end
        start_of[end] = start
    return None


def _spare_edges(taken: list[Slot], start: int, end: int, span: int) -> list[Slot]:
    inside = [(slot.offset, rank) for rank, slot in enumerate(taken) if start <= slot.offset < end]
    inside.sort()
    first, last = 0, len(inside) - 1
    while True:
        after_first = inside[first][0] + taken[inside[first][1]].span
        can_spare_first = end - after_first >= span
        can_spare_last = inside[last][0] - start >= span
        if can_spare_first and (not can_spare_last or inside[first][1] > inside[last][1]):
            start = after_first
            first += 1
        elif can_spare_last:
            end = inside[last][0]
            last -= 1
        else:
            return [taken[rank] for rank in sorted(rank for _, rank in inside[first : last + 1])]
