"""A lane: one thread that does the plain work of one instance, in the order in which it is asked.

    submit ─▶ WAITING ─┬─ claimed by the thread ─▶ RUNNING ─── the thread returns ──▶ OVER
                       └─ cancelled, will never run ───────────────────────────────▶ OVER

    A job that outlives its timeout stays RUNNING: its outcome is LaneTimeout, and the lane hangs until it is OVER.

A job has two ends. `outcome` is for whoever waits for a result, and it comes in bounded time. `over` is for whoever
owns the memory that the job touches: before it is done, the thread may still read and write there, so nothing may be
freed.

A hung lane refuses new work at once; jobs behind the hung one are cancelled. If the thread comes back after all, the
lane works again. The time of a job counts from when its turn has come, so a long queue times nobody out.

Lanes use `threading` directly: ThreadPoolExecutor joins its threads at exit, where one hung copy would keep the process
for ever. The thread is a daemon.

Everything but `_work` runs on the event loop. Thread and loop share one thing: who claims a job first, has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from lmcache_qprotocol.errors import QServerError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LaneError(Exception):
    """The lane could not do the job; base of the three below."""


class LaneTimeout(LaneError):
    """The job ran longer than it may; its thread is still at it."""


class LaneHung(LaneError):
    """An earlier job hangs; this one has not been started and never will be."""


class LaneClosed(LaneError):
    """The lane is closed; this job has not been started and never will be."""


class Job(Generic[T]):
    """One piece of work.

    Attributes:
        outcome: result or exception of the work, or a LaneError.
        over: done when no thread works on the job any more, nor ever will.
        ran_s: seconds that the thread took, once the work is over.
    """

    def __init__(
        self, work: Callable[[], T], timeout_s: float | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.outcome: asyncio.Future[T] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.timeout_s = timeout_s
        self.ran_s = 0.0
        self.returned = False
        """Set by the thread when the work is over; the loop may not know yet."""
        self._work: Callable[[], T] | None = work
        self._claim = threading.Lock()

    def claim(self) -> bool:
        """True for the first caller only: the thread that will run the job, or the loop that cancels it."""
        return self._claim.acquire(blocking=False)

    def perform(self) -> tuple[T | None, BaseException | None]:
        """Run the work in this thread and forget it, with all views that it holds."""
        work, self._work = self._work, None
        assert work is not None
        began = time.monotonic()
        try:
            return work(), None
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
            if not isinstance(error, QServerError):
                # As text: a log record that kept the traceback would keep the frames' views of a ring alive.
                name = threading.current_thread().name
                logger.error("work failed in %s\n%s", name, traceback.format_exc())
            error.__traceback__ = error.__context__ = error.__cause__ = None
            return None, error
        finally:
            del work
            self.ran_s = time.monotonic() - began
            self.returned = True

    def end(self, result: T | None, error: BaseException | None) -> None:
        """Tell both ends; an outcome that was told before, or that nobody waits for, stays as it is."""
        if not self.outcome.done():
            if error is not None:
                self.outcome.set_exception(error)
            else:
                self.outcome.set_result(result)  # type: ignore[arg-type]
        if not self.over.done():
            self.over.set_result(None)


class Lane:
    """One thread and its queue. Create it on the loop that will use it.

    Args:
        name: of the thread, for people.

    Raises:
        RuntimeError: the system has no thread to give.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._jobs: deque[Job[Any]] = deque()  # not over yet; the first is the thread's
        self._timer: asyncio.TimerHandle | None = None
        self._overdue: Job[Any] | None = None
        self._last: Job[None] | None = (
            None  # runs whatever happens to the others; set when the lane closes
        )
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the thread has done its last job."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def hung(self) -> bool:
        """A job has outlived its timeout and has not come back."""
        return self._overdue is not None

    @property
    def waiting(self) -> int:
        """Jobs that are not over."""
        return len(self._jobs)

    def submit(self, work: Callable[..., T], *args: Any, timeout_s: float | None) -> Job[T]:
        """Queue `work(*args)` for the thread.

        Args:
            timeout_s: seconds from when its turn has come; None for no limit.

        Raises:
            LaneHung, LaneClosed: it was not queued.
        """
        if self._last is not None:
            raise LaneClosed(f"{self.name} is closed")
        if self._overdue is not None:
            raise LaneHung(f"an earlier job hangs in {self.name}")
        return self._submit(partial(work, *args), timeout_s)

    async def run(self, work: Callable[..., T], *args: Any, timeout_s: float | None) -> T:
        """Result of `work(*args)` in the thread. If the work owns memory, use `submit` and mind `over`.

        Raises:
            LaneError: see its subclasses.
            Exception: whatever the work raises, without its traceback (which has been logged).
        """
        return await self.submit(work, *args, timeout_s=timeout_s).outcome

    def cancel_waiting(self) -> None:
        """Cancel all jobs that the thread has not begun; their outcome is LaneClosed."""
        self._cancel_waiting(LaneClosed(f"{self.name} is closed"))

    async def close(self, last: Callable[[], None], timeout_s: float) -> bool:
        """Take no more work, do what is queued, then `last`, then end the thread. Call it once.

        Returns:
            False when the lane hangs, or did not end within `timeout_s`: `last` still runs if the thread comes back
            (`ended` tells).
        """
        assert self._last is None, "a lane is closed once"
        self._last = self._submit(last, None)
        self._queue.put(None)
        if self.hung:
            return False
        await asyncio.wait({self.ended}, timeout=timeout_s)
        return self.ended.done()

    def _submit(self, work: Callable[[], T], timeout_s: float | None) -> Job[T]:
        job = Job(work, timeout_s, self._loop)
        # Who gave up waiting retrieves no exception, and needs no complaint about it: it has been logged.
        job.outcome.add_done_callback(_retrieve)
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._begin_timer()
        self._queue.put(job)
        return job

    def _begin_timer(self) -> None:
        job = self._jobs[0]
        if job.timeout_s is not None:
            self._timer = self._loop.call_later(job.timeout_s, self._expire, job)

    def _expire(self, job: Job[Any]) -> None:
        self._timer = None
        if job.returned:
            return  # the news is on its way to the loop
        logger.error(
            "%s hangs: a job has been running for more than %s s", self.name, job.timeout_s
        )
        self._overdue = job
        if not job.outcome.done():
            job.outcome.set_exception(LaneTimeout(f"not done after {job.timeout_s} s"))
        self._cancel_waiting(LaneHung(f"an earlier job hangs in {self.name}"))

    def _cancel_waiting(self, error: LaneError) -> None:
        for job in [job for job in self._jobs if job is not self._last and job.claim()]:
            self._jobs.remove(job)
            job.end(None, error)

    def _finish(self, job: Job[Any], result: Any, error: BaseException | None) -> None:
        assert self._jobs[0] is job, "a lane ends its jobs in order"
        self._jobs.popleft()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._overdue is job:
            logger.warning("%s has come back", self.name)
            self._overdue = None
        job.end(result, error)
        if self._jobs:
            self._begin_timer()

    def _work(self) -> None:
        """The thread."""
        while (job := self._queue.get()) is not None:
            if job.claim():
                result, error = job.perform()
                self._tell(self._finish, job, result, error)
                del result, error
            del job
        self._tell(self.ended.set_result, None)

    def _tell(self, callback: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(callback, *args)


def _retrieve(outcome: asyncio.Future[Any]) -> None:
    if not outcome.cancelled():
        outcome.exception()
