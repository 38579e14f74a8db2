"""Stored objects on their way into the persistent tier, behind the stores that made them.

    commit ─▶ WAITING ── its turn ──▶ WRITING ─┬─ written, or there already ─▶ persisted
                 │  ▲                           ├─ the store fails, may work later ──┐
                 │  └───────────────────────────┼────────────────────────────────────┘
                 │                              └─ it can never be written ─▶ lost ("failed", "corrupt")
                 └─ has left the pool before its turn ─▶ lost ("evicted", "purged", ...)

    submitted = written + already_there + lost + waiting + writing

Pins. What is being written is leased until nobody touches its bytes any more (`Transfer.when_over`). What waits is
leased too, first come, as long as all pins together stay within bytes and count: so it can't be evicted before it is
written. What comes beyond waits without a pin. Eviction prefers what was unused longest, which as a rule is persisted;
if it takes one that is not, that is counted as lost. While the store fails, nothing that waits is pinned: storing goes
on, out of the pool alone.

A store under way goes first: a put reads and writes as many bytes as its copy does. So a put begins in a pause; when
there is none, one at a time begins nevertheless, after `PAUSE_S`.

The oldest goes first, but for models of which the store has refused an object last: they let the others pass. What is
refused may be one model's folder (it belongs to another user, something else lies in its place), and each further
attempt makes the pause longer that everybody waits for.

A put is never cancelled. The event loop alone changes anything here; checksums are made, and files written, in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lmcache_qprotocol.keys import KeyFamily
from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.copying.checksum import checksum
from lmcache_qserver.pool import Pool
from lmcache_qserver.qstore.index import Index
from lmcache_qserver.qstore.persist.breaker import Breaker
from lmcache_qserver.qstore.persist.held import Held
from lmcache_qserver.qstore.persist.records import header_of_stored, name_of_stored
from lmcache_qserver.qstore.stored_object import StoredObject
from lmcache_qserver.tier import (
    ChunkStore,
    Corrupt,
    Full,
    PutOutcome,
    Refused,
    TierError,
    Transfer,
    Unavailable,
)
from lmcache_qserver.tier.format import Header, encode
from lmcache_qserver.tier.threads import Threads

logger = logging.getLogger(__name__)

WRITES = 4
"""Puts under way at a time."""
PAUSE_S = 0.25
"""How long stores hold back the next put."""
LOOK_S, LONGEST_LOOK_S = 0.005, 0.5
"""How often it is looked whether they have ended; and whether puts that take long have."""
LOST = ("evicted", "expired", "purged", "corrupt", "failed")
"""Why an object is not written, and never will be."""
UNWANTED = ("evicted", "corrupt", "failed")
"""The reasons of these that nobody has asked for."""
ERRORS = ("unavailable", "full", "refused", "failed")
"""Why an attempt to write has failed."""


class WriteBehind:
    """Of one index. Objects wait from `note` on; writing begins with `attach`.

    Args:
        is_busy: whether stores are under way.
        drop_corrupt: forgets an object whose bytes have changed in memory.
        pin_bytes, pin_count: how much may be pinned.
        wall: seconds since the epoch.
        clock: seconds, monotonic.

    Attributes:
        outcomes: objects by `PutOutcome`.
        lost: objects by `LOST`.
        errors: attempts by `ERRORS`.
    """

    def __init__(
        self,
        index: Index,
        held: Held,
        is_busy: Callable[[], bool],
        drop_corrupt: Callable[[StoredObject], None],
        *,
        pin_bytes: int,
        pin_count: int,
        wall: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.submitted = 0
        self.outcomes: Counter[PutOutcome] = Counter()
        self.written_bytes = 0
        self.lost: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.breaker = Breaker()
        self._index = index
        self._held = held
        self._is_busy = is_busy
        self._drop_corrupt = drop_corrupt
        self._pin_bytes = pin_bytes
        self._pin_count = pin_count
        self._wall = wall
        self._clock = clock
        self._store: ChunkStore | None = None
        self._threads: Threads | None = None
        self._waiting: dict[StoredObject, None] = {}
        self._waiting_bytes = 0
        self._pinned: set[StoredObject] = set()
        self._pinned_bytes = 0
        self._refused: set[str] = set()  # models whose last put was refused
        self._writing: dict[StoredObject, MissReason | None] = {}
        """And why they have left the pool's index meanwhile, if they have."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._worker: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._hurry = False
        self._closed = False

    @property
    def _pool(self) -> Pool:
        return self._index.pool

    @property
    def is_failing(self) -> bool:
        """Whether something waits that can't be written now; with nothing to write, nobody knows."""
        return self.breaker.is_open and bool(self._waiting or self._writing)

    @property
    def waiting(self) -> int:
        """Objects that wait for their turn."""
        return len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """Their bytes."""
        return self._waiting_bytes

    @property
    def writing(self) -> int:
        """Objects that are being written."""
        return len(self._writing)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pool that can't be evicted because they wait to be written, or are being."""
        return self._pinned_bytes

    def attach(self, store: ChunkStore, threads: Threads) -> None:
        """The store is open: what waits can be written.

        Args:
            threads: make the checksums.
        """
        self._store = store
        self._threads = threads
        self._go_on()

    def note(self, stored: StoredObject) -> None:
        """An object has been committed and is not in the persistent tier yet."""
        self.submitted += 1
        self._wait(stored)
        self._go_on()

    def forgotten(self, stored: StoredObject, reason: MissReason) -> None:
        """It has left the index; if it waits, it is lost, but for one whose write is under way."""
        if stored in self._writing:
            self._writing[stored] = reason
        elif stored in self._waiting:
            self._take(stored)
            self._unpin(stored)
            self.lost[_lost_by(reason)] += 1
            self._note_idle()

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nothing waits and nothing is written; stores don't hold it back any more.

        Returns:
            False when something is left: time is over, or the store fails.
        """
        self._hurry = True
        end = self._clock() + timeout_s
        while not self._idle.is_set():
            if self.breaker.is_open or self._store is None:
                break
            try:
                await asyncio.wait_for(self._idle.wait(), min(0.1, max(0.0, end - self._clock())))
            except asyncio.TimeoutError:
                if self._clock() >= end:
                    break
        self._hurry = False
        return self._idle.is_set()

    async def settle(self, which: Callable[[KeyFamily], bool]) -> None:
        """Wait until none of these is being written."""
        while any(which(stored.key.family) for stored in self._writing):
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def close(self, timeout_s: float) -> bool:
        """Begin nothing more, and wait for what is under way; False if something still is."""
        self._closed = True
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        return not self._tasks

    # --- waiting ------------------------------------------------------------------------------------------------

    def _wait(self, stored: StoredObject) -> None:
        self._waiting[stored] = None
        self._waiting_bytes += stored.slot.nbytes
        self._idle.clear()
        room = self._pinned_bytes + stored.slot.span <= self._pin_bytes
        if room and len(self._pinned) < self._pin_count and not self.breaker.is_open:
            self._pin(stored)

    def _take(self, stored: StoredObject) -> None:
        del self._waiting[stored]
        self._waiting_bytes -= stored.slot.nbytes

    def _pin(self, stored: StoredObject) -> None:
        if stored not in self._pinned:
            self._pool.lease(stored.slot)
            self._pinned.add(stored)
            self._pinned_bytes += stored.slot.span

    def _unpin(self, stored: StoredObject) -> None:
        if stored in self._pinned:
            self._pinned.remove(stored)
            self._pinned_bytes -= stored.slot.span
            self._pool.release(stored.slot)

    def _note_idle(self) -> None:
        if not self._waiting and not self._writing:
            self._idle.set()

    # --- writing ------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self._worker is None and self._store is not None and self._waiting and not self._closed:
            self._worker = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        """Until nothing waits."""
        try:
            while self._waiting:
                await self._wait_for_a_turn()
                if self._waiting:
                    self._begin(self._next())
        finally:
            self._worker = None

    def _next(self) -> StoredObject:
        first = next(iter(self._waiting))
        if not self._refused:
            return first
        others = (one for one in self._waiting if one.key.family.model_name not in self._refused)
        return next(others, first)

    async def _wait_for_a_turn(self) -> None:
        began = self._clock()
        for delay_s in iter(lambda: self._delay_s(began), 0.0):
            await asyncio.sleep(delay_s)

    def _delay_s(self, began: float) -> float:
        """Seconds until it is worth looking again; 0: the next may begin.

        Args:
            began: when its turn would have been.
        """
        now = self._clock()
        if pause_s := self.breaker.wait_s(now):
            return min(pause_s, LONGEST_LOOK_S)
        if len(self._writing) >= self._most():
            return min(LONGEST_LOOK_S, max(LOOK_S, (now - began) / 4))
        return LOOK_S if self._is_held_back() and now - began < PAUSE_S else 0.0

    def _is_held_back(self) -> bool:
        return self._is_busy() and not self._hurry

    def _most(self) -> int:
        """Puts that may be under way now; one finds out whether a store that failed works again."""
        return 1 if self.breaker.is_open or self._is_held_back() else WRITES

    def _begin(self, stored: StoredObject) -> None:
        self.breaker.allows(self._clock())
        self._take(stored)
        self._pin(stored)
        self._writing[stored] = None
        task = asyncio.get_running_loop().create_task(self._write(stored))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, stored: StoredObject) -> None:
        """To its end, whatever that is; the object counts as being written until nobody touches its bytes any more."""
        transfers: list[Transfer[Any]] = []
        again = False
        try:
            await self._put(stored, transfers)
        except (Unavailable, Full, Refused) as error:
            again = True
            if isinstance(error, Refused):
                self._refused.add(stored.key.family.model_name)
            self._note_error(error)
        except Corrupt:
            self.lost["corrupt"] += 1
            self._drop_corrupt(stored)
        except Exception:
            logger.exception("a stored object can't be written to the persistent tier")
            self.errors["failed"] += 1
            self.lost["failed"] += 1
        for transfer in transfers:
            await transfer.wait_until_over()
        self._end(stored, again)

    async def _put(self, stored: StoredObject, transfers: list[Transfer[Any]]) -> None:
        assert self._store is not None
        assert self._threads is not None
        view = memoryview(self._pool.view(stored.slot))  # type: ignore[arg-type]  # numpy's stubs, Python 3.10
        header = header_of_stored(stored, self._wall() - (self._clock() - stored.created))
        proving = self._threads.submit(partial(_prove, header, view, stored.checksum))
        transfers.append(proving)
        head = await proving
        name = name_of_stored(stored)
        putting = self._store.put(name, [memoryview(head), view])
        transfers.append(putting)
        outcome = await putting
        self.breaker.worked()
        self._refused.discard(stored.key.family.model_name)
        self.outcomes[outcome] += 1
        nbytes = len(head) + view.nbytes
        if outcome is PutOutcome.WRITTEN:
            self.written_bytes += nbytes
        self._held.add(name, header.address, nbytes)
        self._held.describe(header)
        stored.persisted = True

    def _end(self, stored: StoredObject, again: bool) -> None:
        gone = self._writing.pop(stored)
        self._unpin(stored)
        if again and gone is None:
            self._wait(stored)
        elif again:
            self.lost[_lost_by(gone)] += 1
        self._note_idle()
        self._go_on()

    def _note_error(self, error: TierError) -> None:
        was_open = self.breaker.is_open
        self.errors[error.code] += 1
        self.breaker.failed(self._clock())
        if self.breaker.is_open and not was_open:
            logger.error(
                "the persistent tier fails: %s; nothing is written for a while, storing goes on in memory",
                error,
            )
            for stored in self._waiting:
                self._unpin(stored)


def _prove(header: Header, view: memoryview, expected: bytes | None) -> bytes:
    """The header, of bytes that are still what they were when they were stored, if that is known. Runs in a thread."""
    if expected is not None and checksum(np.frombuffer(view, np.uint8)) != expected:
        raise Corrupt("the object's bytes have changed in memory")
    return encode(header, view)


def _lost_by(reason: MissReason | None) -> str:
    return reason.value if reason is not None and reason.value in LOST else "failed"
