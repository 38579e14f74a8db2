"""Which core does what: engines compute on the first core that we may use, the server works on the last.

Their threads inherit the choice. So what capture costs the engine's process (hooks, the link's and the heartbeat's
threads) shows in the engine's speed, and the server's copies don't take its time; memory bandwidth is shared.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def engine_core() -> int:
    """For engines."""
    return min(_ALLOWED)


def server_core() -> int:
    """For the server, and for the benchmark itself, which only waits."""
    return max(_ALLOWED)


_ALLOWED = os.sched_getaffinity(0)


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """This thread, and the processes that it starts meanwhile, run on `core` only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
