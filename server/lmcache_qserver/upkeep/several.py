"""Work on what comes out of an iterator, several at a time, results in the same order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def several(
    source: AsyncIterator[T], work: Callable[[T], Coroutine[Any, Any, R]], at_once: int
) -> AsyncIterator[R]:
    """The results of `work`; never more than `at_once` of them are under way or waiting to be taken.

    Who stops taking results cancels what is under way.
    """
    tasks: deque[asyncio.Task[R]] = deque()
    try:
        async for item in source:
            tasks.append(asyncio.ensure_future(work(item)))
            if len(tasks) == at_once:
                yield await tasks[0]
                tasks.popleft()
        while tasks:
            yield await tasks[0]
            tasks.popleft()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
