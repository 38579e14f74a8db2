"""A crew whose copies can be made to pause half way, and that tells the driver of a run what is being copied."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lmcache_qserver.copying.crew import Behind, Bytes, Crew, Segment
from tests.faults.page import Page


class PacedCrew(Crew):
    """Pauses when half of a chunk's rows have been copied.

    Args:
        page: where the pause stands.
    """

    def __init__(self, helpers: int, processors: int, *, page: Page) -> None:
        super().__init__(helpers, processors)
        self._page = page

    def copy(
        self,
        target: Bytes,
        source: Bytes,
        segments: Sequence[Segment],
        behind: Behind | None = None,
    ) -> None:
        self._page.begin_copy()
        try:
            halves = [half for segment in segments for half in _cut_in_two(segment)]
            middle = len(halves) // 2
            super().copy(target, source, halves[:middle], behind)
            time.sleep(self._page.pause_s)
            super().copy(target, source, halves[middle:], behind)
        finally:
            self._page.end_copy()


def _cut_in_two(segment: Segment) -> list[Segment]:
    to, begin, nbytes = segment
    half = nbytes // 2
    return [Segment(to, begin, half), Segment(to + half, begin + half, nbytes - half)]
