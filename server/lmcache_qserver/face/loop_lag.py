"""How late the event loop is: a timer looks when it is really woken.

Whatever occupies the loop makes a timer late by as much, and every request that comes meanwhile. A look costs some
microseconds on a loop that is busy, and a wake-up on one that is idle (up to 2 ms on a virtual machine, hence not more
often). It tells waits from about a millisecond on, the resolution of the loop's timers. A loop that stands still for
long is seen once, with all of its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.5


class LoopLag:
    """The probe.

    Args:
        clock: monotonic seconds.
        observe: told each time by how many seconds the loop was late.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        observe: Callable[[float], None],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._observe = observe
        self._interval_s = interval_s
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look."""
        self._due = self._clock() + self._interval_s
        self._timer = self._loop.call_later(self._interval_s, self._look)

    def stop(self) -> None:
        """Look no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._observe(max(0.0, self._clock() - self._due))
        self.start()
