"""The real daemon, whose copies can be made to pause half way, and tell the driver that they run.

`python -m tests.faults.paced_daemon start ...`; the file named by `FAULTS_PAGE` holds the pause.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from lmcache_qserver.__main__ import main
from lmcache_qserver.copying.crew import Bytes, Crew, Segment
from tests.faults.page import Page

PAGE = "FAULTS_PAGE"
LEASE_SCAN_S = 0.1
"""Leases are looked at so often here, so that a run need not wait for 5 seconds."""


class PacedCrew(Crew):
    """Pauses when half of a chunk's rows have been copied."""

    def __init__(self, helpers: int, processors: int) -> None:
        super().__init__(helpers, processors)
        self._page = Page(Path(os.environ[PAGE]))

    def copy(self, target: Bytes, source: Bytes, segments: Sequence[Segment]) -> None:
        self._page.begin_copy()
        try:
            halves = [half for segment in segments for half in _cut_in_two(segment)]
            middle = len(halves) // 2
            super().copy(target, source, halves[:middle])
            time.sleep(self._page.pause_s)
            super().copy(target, source, halves[middle:])
        finally:
            self._page.end_copy()


def _cut_in_two(segment: Segment) -> list[Segment]:
    to, begin, nbytes = segment
    half = nbytes // 2
    return [Segment(to, begin, half), Segment(to + half, begin + half, nbytes - half)]


if __name__ == "__main__":
    # The daemon is imported by its own main only, after that has begun the pool; a module that is there is not again.
    import lmcache_qserver.daemon as daemon

    daemon.Crew = PacedCrew  # type: ignore[misc]  # the one thing that is not as in real life
    daemon.LEASE_SCAN_S = LEASE_SCAN_S
    main()
