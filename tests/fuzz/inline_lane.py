"""A lane without a thread: each job runs when it is submitted. One input gives one course of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from lmcache_qserver.copying.lane import Job, LaneClosed

T = TypeVar("T")


class InlineLane:
    """Stands in for `Lane`."""

    hung = False
    waiting = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self._closed = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def submit(self, work: Callable[..., T], *args: Any, timeout_s: float | None) -> Job[T]:
        """Run it."""
        if self._closed:
            raise LaneClosed(f"{self.name} is closed")
        job = Job(lambda: work(*args), timeout_s, asyncio.get_running_loop())
        job.outcome.add_done_callback(lambda done: done.exception())
        job.claim()
        job.end(*job.perform())
        return job

    async def run(self, work: Callable[..., T], *args: Any, timeout_s: float | None) -> T:
        """Run it, and give its result."""
        return await self.submit(work, *args, timeout_s=timeout_s).outcome

    def cancel_waiting(self) -> None:
        """Nothing waits."""

    async def close(self, last: Callable[[], None], timeout_s: float) -> bool:
        """Run the last job."""
        self._closed = True
        last()
        self.ended.set_result(None)
        return True
