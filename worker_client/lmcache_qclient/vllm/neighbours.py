"""Which scheduler side runs in this process: an engine inside its user's process has both sides in one.

A worker beside its scheduler can ask it who has ended, where one in a process of its own has to wait for a step.
"""

from __future__ import annotations

import os
import weakref

from lmcache_qclient.vllm.guard import ScheduleGuard

_guards: dict[tuple[int, str], weakref.WeakSet[ScheduleGuard]] = {}


def announce(engine_id: str, guard: ScheduleGuard) -> None:
    """A scheduler side has been built in this process."""
    # By process: a forked worker inherits the table, but the scheduler that it then sees is a dead copy.
    _guards.setdefault((os.getpid(), engine_id), weakref.WeakSet()).add(guard)


def neighbour(engine_id: str) -> ScheduleGuard | None:
    """The scheduler side of that engine in this process; None when there is none, or more than one."""
    guards = list(_guards.get((os.getpid(), engine_id), ()))
    return guards[0] if len(guards) == 1 else None
