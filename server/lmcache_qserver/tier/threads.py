"""A few threads that do a store's blocking work.

    submit ─▶ WAITING ─┬─ claimed by a thread ─▶ RUNNING ─── the thread returns ──▶ over
                       └─ given up (closing, or every thread hangs), never runs ──▶ over

    RUNNING longer than the time-out: the outcome is Unavailable, the thread is overdue, `over` comes when it returns.

The time of a job counts from when a thread has claimed it, so a long queue times nobody out. When all threads are
overdue, what waits and what comes is answered Unavailable at once, until one comes back.

No ThreadPoolExecutor: it joins its threads at exit, where one write to a dead mount would keep the process for ever.
These are daemons.

Threads and loop share one thing: who claims a job first, has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from lmcache_qserver.tier.errors import TierError, Unavailable
from lmcache_qserver.tier.transfer import Transfer

logger = logging.getLogger(__name__)

T = TypeVar("T")

TICKS = 8
"""Looks at the running jobs per time-out: a job is answered between 1 and 1 + 1/8 time-outs."""


class _Job(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self.transfer: Transfer[T] = Transfer()
        self.ticks = 0
        self._work: Callable[[], T] | None = work
        self._claim = threading.Lock()

    @property
    def is_running(self) -> bool:
        return self._claim.locked()

    def claim(self) -> bool:
        return self._claim.acquire(blocking=False)

    def perform(self) -> tuple[T | None, BaseException | None]:
        """In the thread: run the work and forget it, with all views that it holds."""
        work, self._work = self._work, None
        assert work is not None
        try:
            return work(), None
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
            if not isinstance(error, TierError):
                logger.error(
                    "%s failed\n%s", threading.current_thread().name, traceback.format_exc()
                )
            # Its frames hold views of the caller's memory.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            return None, error

    def give_up(self, error: TierError) -> None:
        """On the loop, having claimed it: it will never run."""
        self._work = None
        self.finish(None, error)

    def finish(self, result: T | None, error: BaseException | None) -> None:
        """On the loop."""
        if error is not None:
            self.transfer.fail(error)
        else:
            self.transfer.succeed(result)  # type: ignore[arg-type]  # without an error there is a result
        self.transfer.end()


class Threads:
    """Create them on the loop that will use them.

    Args:
        name: of the threads, for people.
        count: how many jobs run at a time.
        timeout_s: longest time until a running job is answered.
    """

    def __init__(self, name: str, count: int, timeout_s: float) -> None:
        self.name = name
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._jobs: set[_Job[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], T]) -> Transfer[T]:
        """Run `work()` in a thread. Its errors, and Unavailable, are the transfer's outcome."""
        job = _Job(work)
        if self._closed or self._all_hang():
            job.claim()
            job.give_up(Unavailable(f"{self.name} {'is closed' if self._closed else 'hangs'}"))
            return job.transfer
        self._jobs.add(job)
        self._idle.clear()
        self._queue.put(job)
        if self._timer is None:
            self._start_timer()
        return job.transfer

    async def close(self, timeout_s: float) -> bool:
        """Take no more work, do what is queued, end the threads.

        Returns:
            False when something is still running: its thread ends with the process.
        """
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._queue.put(None)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        self._give_up_waiting("is closed")
        if self._timer is not None:
            self._timer.cancel()
        return not self._jobs

    def _all_hang(self) -> bool:
        overdue = sum(job.is_running and job.transfer.has_outcome for job in self._jobs)
        return overdue >= len(self._threads)

    def _start_timer(self) -> None:
        self._timer = self._loop.call_later(self._timeout_s / TICKS, self._tick)

    def _tick(self) -> None:
        for job in self._jobs:
            job.ticks += job.is_running
            if job.ticks > TICKS and not job.transfer.has_outcome:
                logger.error("%s: a job runs for more than %g s", self.name, self._timeout_s)
                job.transfer.fail(Unavailable(f"not done after {self._timeout_s:g} s"))
        if self._all_hang():
            self._give_up_waiting("hangs")
        self._timer = None
        if self._jobs:
            self._start_timer()

    def _give_up_waiting(self, why: str) -> None:
        for job in [job for job in self._jobs if job.claim()]:
            job.give_up(Unavailable(f"{self.name} {why}"))
            self._forget(job)

    def _finish(self, job: _Job[Any], result: Any, error: BaseException | None) -> None:
        job.finish(result, error)
        self._forget(job)

    def _forget(self, job: _Job[Any]) -> None:
        self._jobs.discard(job)
        if not self._jobs:
            self._idle.set()

    def _work(self) -> None:
        """A thread."""
        while (job := self._queue.get()) is not None:
            if job.claim():
                result, error = job.perform()
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left
                    self._loop.call_soon_threadsafe(self._finish, job, result, error)
                del result, error
            del job
