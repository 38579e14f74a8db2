"""Which objects together hold the asked rows of one chunk: as few as possible, from the first row on. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lmcache_qserver.qstore.by_tokens import Candidate


class Cover(NamedTuple):
    """The answer; `chosen` by first row, `gaps` are the rows [a, b) that nobody holds."""

    chosen: tuple[Candidate, ...]
    gaps: tuple[tuple[int, int], ...]


def cover(candidates: Iterable[Candidate], asked: int) -> Cover:
    """Cover rows [0, asked): always the object that reaches furthest among those that begin early enough.

    Behind a gap it goes on at the next object, so a reader learns all that is there.
    """
    left = sorted(candidates, key=lambda one: (one.first, one.agreed))
    chosen: list[Candidate] = []
    gaps: list[tuple[int, int]] = []
    covered, place = 0, 0
    while covered < asked:
        best: Candidate | None = None
        while place < len(left) and left[place].first <= covered:
            if best is None or left[place].agreed > best.agreed:
                best = left[place]
            place += 1
        # An object that was passed over for `best` reaches no further than it does: it is of no use later either.
        if best is not None and best.agreed > covered:
            chosen.append(best)
            covered = best.agreed
            continue
        following = min(asked, left[place].first if place < len(left) else asked)
        gaps.append((covered, following))
        covered = following
    return Cover(tuple(chosen), tuple(gaps))
