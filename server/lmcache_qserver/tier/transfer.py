"""A put or a get under way. It has two ends, and nothing cancels it.

    outcome   a result, or an error, in bounded time: for whoever wants to know
    over      no thread, no socket and no library touches the buffers any more: for whoever owns them

    await transfer           the outcome. Who is cancelled here stops waiting, and that is all: the transfer goes on
    transfer.is_over, when_over(callback), await wait_until_over()

`over` never comes before the outcome, and may come much later: a disk or a peer that hangs is answered as `Unavailable`
after the time-out while a thread still sits in its write. Before `over` the source of a put must not change and the
target of a get must not be used for anything else: it has happened that the bytes of two objects were mixed into one
(a cancelled put that went on reading from a buffer that had been given away).

Both futures are private: who awaits a bare future and is cancelled cancels *it*, and a cancelled `over` looks done.

Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

T = TypeVar("T")


class Transfer(Generic[T]):
    """Create it on the loop. Stores end it; everybody else waits."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[T] = loop.create_future()
        self._outcome.add_done_callback(_retrieve)
        self._over: asyncio.Future[None] = loop.create_future()

    def __await__(self) -> Generator[object, None, T]:
        return asyncio.shield(self._outcome).__await__()

    @property
    def has_outcome(self) -> bool:
        """Whether awaiting it returns at once."""
        return self._outcome.done()

    @property
    def is_over(self) -> bool:
        """Whether the buffers are the caller's again."""
        return self._over.done()

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call it on the loop once the buffers are the caller's again; soon, if they are already."""
        self._over.add_done_callback(lambda _over: callback())

    async def wait_until_over(self) -> None:
        """Until the buffers are the caller's again; has no time-out of its own."""
        await asyncio.shield(self._over)

    # --- for stores ---

    def succeed(self, result: T) -> None:
        """The outcome, unless there is one (it had timed out)."""
        if not self._outcome.done():
            self._outcome.set_result(result)

    def fail(self, error: BaseException) -> None:
        """The outcome, unless there is one."""
        if not self._outcome.done():
            self._outcome.set_exception(error)

    def end(self) -> None:
        """Nothing touches the buffers any more. Needs an outcome."""
        assert self._outcome.done(), "the outcome comes first"
        self._over.set_result(None)


def _retrieve(outcome: asyncio.Future[T]) -> None:
    # Who gave up waiting needs no complaint about an error that nobody looked at.
    if not outcome.cancelled():
        outcome.exception()
