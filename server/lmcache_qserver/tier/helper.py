"""A thread that lends a hand if it has nothing to do, and is never needed.

Its work is somebody else's, who does without it just as well. So nothing waits in a queue for it, nothing is lost if it
hangs for ever on a dead mount, and nobody joins it: it is a daemon, as those of threads.py are.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Helper:
    """Any thread may ask it."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def ask(self, work: Callable[[], None]) -> None:
        """Run `work()`, which raises nothing, if there is nothing else to do; else forget it."""
        if self._idle.acquire(blocking=False):
            self._queue.put(work)

    def close(self) -> None:
        """End the thread once it has nothing to do."""
        self._queue.put(None)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work
            self._idle.release()
