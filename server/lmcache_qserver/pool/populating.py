"""The pool gets its pages in a thread of its own, from before the daemon has loaded its modules until it is ready.

Making pages takes half a second per GiB and needs no Python; loading modules takes a third of a second and nothing but
Python. So they go side by side.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

from lmcache_qserver.pool.memory import PoolMemory

ALLOCATE_STEP_BYTES = 64 << 20
POPULATE_STEP_BYTES = 4 << 20
"""Small, because nobody in this process can map memory during a step: not even load a module."""


class Populating:
    """Creates the pool's memory and begins to populate it.

    Args:
        nbytes: of the pool.
        first: called with the memory before there is a thread.

    Attributes:
        memory: may be used at once; first copies into it are slow until `done`.
        done: None when all pages are there; fails with OSError when the kernel has none to give.

    Raises:
        ValueError, OSError: as `PoolMemory`.
    """

    def __init__(
        self, nbytes: int, first: Callable[[PoolMemory], None] = lambda memory: None
    ) -> None:
        self.memory = PoolMemory(nbytes)
        first(self.memory)
        self.done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="populate", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Populate no further; the step under way ends by itself. `done` is cancelled, if it was not over."""
        self._stopped = True
        self.done.cancel()

    def _run(self) -> None:
        try:
            for work, step_bytes in (
                (self.memory.allocate, ALLOCATE_STEP_BYTES),
                (self.memory.populate, POPULATE_STEP_BYTES),
            ):
                for offset, nbytes in self.memory.populate_steps(step_bytes):
                    if self._stopped:
                        return
                    work(offset, nbytes)
        except BaseException as error:  # noqa: BLE001 - whoever waits decides
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


def begin(
    nbytes: int, first: Callable[[PoolMemory], None] = lambda memory: None
) -> Populating | None:
    """`Populating`, or None when the memory can't be had: the daemon, which tries again, is who can say so."""
    try:
        return Populating(nbytes, first)
    except (OSError, ValueError):
        return None
