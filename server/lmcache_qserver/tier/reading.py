"""A file's bytes into given buffers, a piece at a time: two threads read, one of them shows the bytes to an observer.

    the get's thread    next piece, read ─▶ show what has arrived ─▶ next ... ─▶ wait for the helper, show the rest
    a helper            next piece, read ─▶ next ...

Who comes first takes the next piece, so a helper that never comes, or is late, costs nothing. Pieces are taken in the
file's order (the kernel reads ahead for those who do so) and shown in it, soon after they have arrived: a checksum
finds them in the processor's cache. (Measured, 64 MiB, two idle cores, against one read of it all: reading and then
hashing 0.82; hashing each piece once it is read 0.88; with a second thread that only hashes 0.95; with one that reads
1.3. Where the second core has other work: 0.8 to 0.9.)

When `run` returns, nobody touches the buffers or holds a view of them, whatever has happened.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence

from lmcache_qserver.tier.chunk_store import Observe
from lmcache_qserver.tier.errors import Corrupt

PIECE_BYTES = 1 << 20
"""A core's cache of the second level, where we measured; half and double of it were as fast."""
IOV_MAX = 1024

Piece = tuple[int, list[memoryview]]
"""The place in the file, and what to fill from there."""


class Reading:
    """One get.

    Args:
        fd: open until `run` returns.
        name: for people.
        observe: see `ChunkStore.get_into`.
    """

    def __init__(
        self,
        fd: int,
        name: str,
        targets: Sequence[memoryview],
        offset: int,
        observe: Observe | None,
    ) -> None:
        self._fd = fd
        self._name = name
        self._pieces = list(_cut(targets, offset))
        self._arrived = [False] * len(self._pieces)
        self._observe = observe
        self._next = 0
        self._shown = 0
        self._claiming = threading.Lock()
        self._helping = threading.Lock()
        self._failed: BaseException | None = None

    def run(self, ask: Callable[[Callable[[], None]], None]) -> None:
        """Read it all. What a read or the observer raises is raised once nobody reads any more.

        Args:
            ask: gets `help`, to be run in another thread if one is free.
        """
        if len(self._pieces) > 1:
            ask(self.help)
        try:
            while self._read_next():
                self._show()
            with self._helping:
                if self._failed is not None:
                    raise self._failed
            self._show()
        finally:
            self._end()

    def help(self) -> None:
        """In another thread: take pieces until there are none."""
        with self._helping:
            try:
                while self._read_next():
                    pass
            except BaseException as error:  # noqa: BLE001 - it is raised where the get runs
                self._failed = error
                self._stop()

    def _read_next(self) -> bool:
        with self._claiming:
            index = self._next
            if index >= len(self._pieces):
                return False
            self._next += 1
        self._read(*self._pieces[index])
        self._arrived[index] = True
        return True

    def _read(self, offset: int, left: list[memoryview]) -> None:
        while left:
            done = os.preadv(self._fd, left[:IOV_MAX], offset)
            if not done:
                raise Corrupt(f"{self._name} has become shorter while it was read")
            offset += done
            left = behind(left, done)

    def _show(self) -> None:
        """All that has arrived without a gap and has not been shown."""
        while self._observe and self._shown < len(self._pieces) and self._arrived[self._shown]:
            for view in self._pieces[self._shown][1]:
                self._observe(view)
            self._shown += 1

    def _stop(self) -> None:
        with self._claiming:
            self._next = len(self._pieces)

    def _end(self) -> None:
        self._stop()
        with self._helping:  # a helper that comes later finds nothing
            self._pieces = []
            self._next = 0
            self._failed = self._observe = None


def behind(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the parts behind `done` bytes."""
    while parts and done >= parts[0].nbytes:
        done -= parts[0].nbytes
        parts = parts[1:]
    return [parts[0][done:], *parts[1:]] if done else parts


def _cut(targets: Sequence[memoryview], offset: int) -> Iterator[Piece]:
    views: list[memoryview] = []
    nbytes = 0
    for target in targets:
        while target.nbytes:
            view = target[: PIECE_BYTES - nbytes]
            target = target[view.nbytes :]
            views.append(view)
            nbytes += view.nbytes
            if nbytes == PIECE_BYTES:
                yield offset, views
                offset, views, nbytes = offset + nbytes, [], 0
    if views:
        yield offset, views
