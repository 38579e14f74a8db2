"""What is looked at behind a store: checksums of stored objects, and rows that are not finite.

    commit ──note──▶ waiting ──no store under way──▶ examined in a thread of its own ──▶ kept, told to readers
                        └─ evicted before its turn ──▶ (forgotten)

A store's answer waits for neither: each reads all bytes once more, and would cost a store a third of its speed or more.
They use the moments in which nothing is stored; when there are none, one object after another is done nevertheless, at
a slow pace. (With inline checksums the lane makes those beside the copy.) `verify` looks at everything again.

Nothing is leased for that: an object's bytes never change while it is stored, so what was found counts if the very same
object is stored before and after. What is read of a slot that was freed meanwhile is thrown away.

What goes wrong here costs no store anything: `note` only takes down, and an object that can't be looked at is counted
as failed; the others get their turn. A server that stops looks at nothing more.

Everything but the looking itself is on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import VerifyReply
from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.copying import Lane
from lmcache_qserver.copying.checksum import checksum
from lmcache_qserver.copying.nonfinite import RowForm, nonfinite_rows
from lmcache_qserver.qstore.index import Index
from lmcache_qserver.qstore.stored_object import StoredObject
from lmcache_qserver.status_report import ChecksumsReport

logger = logging.getLogger(__name__)

PAUSE_S = 0.05
"""How long a store, once seen, keeps checksums back."""
MAX_PAUSES = 20
"""So often in a row; then one object is done in spite of stores."""
MIN_WAITING = 64
"""Objects that may wait, whether they are still stored or not; beyond, twice as many as are stored."""


@dataclass(slots=True)
class ChecksumCounts:
    """Objects, since the start."""

    made: int = 0
    """Checksums made for the first time."""
    verified: int = 0
    """Comparisons that agreed."""
    corrupt: int = 0
    """Comparisons that did not; these objects are gone."""
    failed: int = 0
    """Objects that could not be looked at behind their store."""


class Checksums:
    """Of the objects of one index.

    Args:
        is_busy: whether stores are under way.
        found_nonfinite: told of every object, how many of its rows hold NaN or Inf.
    """

    def __init__(
        self, index: Index, is_busy: Callable[[], bool], found_nonfinite: Callable[[int], None]
    ) -> None:
        self.counts = ChecksumCounts()
        self._index = index
        self._is_busy = is_busy
        self._found_nonfinite = found_nonfinite
        self._waiting: deque[StoredObject] = deque()
        self._lane: Lane | None = None
        self._stopping = False
        self._worker: asyncio.Task[None] | None = None
        self._verifying: asyncio.Task[VerifyReply] | None = None

    def start(self) -> None:
        """Start the thread now, not when it is first needed."""
        self._start_lane()

    def note(self, stored: StoredObject) -> None:
        """An object has been committed, with its checksum or without. Raises nothing."""
        if stored.checksum is not None:
            self.counts.made += 1
        self._waiting.append(stored)
        if len(self._waiting) > MIN_WAITING + 2 * len(self._index):
            # Without a pause few get their turn, and most are evicted before: they need not wait any more.
            self._waiting = deque(filter(self._is_stored, self._waiting))
        if self._worker is None and not self._stopping:
            self._worker = asyncio.get_running_loop().create_task(self._work())

    def verify(self) -> asyncio.Task[VerifyReply]:
        """Hash everything that is stored now, and compare; what differs is dropped as `corrupt`.

        Who asks while it runs gets the outcome of the run under way.

        The task raises RequestError(shutting_down) when the server stops meanwhile.
        """
        if self._verifying is None or self._verifying.done():
            self._verifying = asyncio.get_running_loop().create_task(self._verify())
        return self._verifying

    def summary(self) -> ChecksumsReport:
        """For `/status`."""
        counts = self.counts
        return ChecksumsReport(
            made=counts.made,
            verified=counts.verified,
            corrupt=counts.corrupt,
            failed=counts.failed,
            waiting=len(self._waiting),
        )

    def stop(self) -> None:
        """Look at nothing more, but for the object that is being looked at."""
        self._stopping = True

    async def close(self, timeout_s: float) -> None:
        """End the thread; nothing is hashed any more."""
        self.stop()
        for task in (self._worker, self._verifying):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._lane is not None:
            await self._lane.close(lambda: None, timeout_s)

    async def _work(self) -> None:
        """Until nothing waits."""
        try:
            while self._waiting and not self._stopping:
                await self._wait_for_a_pause()
                stored = self._waiting.popleft()
                if self._is_stored(stored):
                    await self._try_to_examine(stored)
        finally:
            self._worker = None

    async def _try_to_examine(self, stored: StoredObject) -> None:
        try:
            await self._examine(stored)
        except Exception:
            if not self.counts.failed:
                logger.exception(
                    "a stored object can't be looked at (logged once): it has no checksum until it is verified"
                )
            self.counts.failed += 1

    async def _wait_for_a_pause(self) -> None:
        for _ in range(MAX_PAUSES):
            if not self._is_busy():
                return
            await asyncio.sleep(PAUSE_S)

    async def _verify(self) -> VerifyReply:
        verified = made = corrupt = nbytes = 0
        for stored in self._index.objects():
            if self._stopping:
                raise RequestError(
                    ErrorCode.SHUTTING_DOWN, "the server is shutting down: verify when it is back"
                )
            if not self._is_stored(stored):
                continue
            found = await self._hash(stored)
            if not self._is_stored(stored):
                continue
            nbytes += stored.slot.nbytes
            if stored.checksum is None:
                self._keep(stored, found)
                made += 1
            elif stored.checksum == found:
                verified += 1
                self.counts.verified += 1
            else:
                corrupt += 1
                self.drop(stored)
        return VerifyReply(verified=verified, made=made, corrupt=corrupt, nbytes=nbytes)

    async def _examine(self, stored: StoredObject) -> None:
        rows = await self._look_for_nonfinite(stored)
        if not self._is_stored(stored):
            return
        stored.nonfinite = rows
        self._found_nonfinite(rows)
        if stored.checksum is not None:
            return
        found = await self._hash(stored)
        if stored.checksum is None and self._is_stored(stored):
            self._keep(stored, found)

    async def _look_for_nonfinite(self, stored: StoredObject) -> int:
        layout = stored.description.layout
        return await self._start_lane().run(
            nonfinite_rows,
            self._index.pool.peek(stored.slot),
            RowForm(layout.dtype, layout.row_bytes),
            timeout_s=None,
        )

    async def _hash(self, stored: StoredObject) -> bytes:
        return await self._start_lane().run(
            checksum, self._index.pool.peek(stored.slot), timeout_s=None
        )

    def _start_lane(self) -> Lane:
        if self._lane is None:
            self._lane = Lane("checksums")
        return self._lane

    def _keep(self, stored: StoredObject, found: bytes) -> None:
        stored.checksum = found
        self.counts.made += 1

    def drop(self, stored: StoredObject) -> None:
        """Its bytes are not those that were stored any more: forget it, if it is still stored."""
        if not self._is_stored(stored):
            return
        self.counts.corrupt += 1
        logger.error(
            "bytes of a stored object of %s have changed in memory: it is dropped; check this machine's memory",
            stored.key.family.model_name,
        )
        self._index.discard(stored, MissReason.CORRUPT)

    def _is_stored(self, stored: StoredObject) -> bool:
        return self._index.get(stored.key) is stored
