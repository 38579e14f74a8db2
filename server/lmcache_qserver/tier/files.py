"""`file:///PATH`: objects as files on a disk of this machine, or on one that several machines share.

The loop's side. Threads of its own do the work (threads.py), as disk.py says how; who reads never waits behind who
writes. A put is on the disk when it is answered.
"""

from __future__ import annotations

import asyncio
import builtins
import itertools
from collections.abc import AsyncIterator, Sequence
from functools import partial

from lmcache_qserver.tier.chunk_store import (
    ChunkStore,
    Entry,
    Observe,
    PutOutcome,
    byte_views,
    check_name,
    check_prefix,
)
from lmcache_qserver.tier.disk import Disk
from lmcache_qserver.tier.threads import Threads
from lmcache_qserver.tier.transfer import Transfer

THREADS = 4
"""For reading, and as many for writing. Measured: one thread 1.0, four 1.8 to 2.2 times the throughput of small
objects."""
PAGE_ENTRIES = 512
DELETE_NAMES = 256
"""Names per job, so that a large purge lets others in between."""


class FileStore(ChunkStore):
    """Get one by `open_store`."""

    def __init__(self, disk: Disk, threads: Threads, writers: Threads) -> None:
        self.url = f"file://{disk.root}"
        self._disk = disk
        self._threads = threads
        self._writers = writers

    @classmethod
    async def open(
        cls,
        path: str,
        *,
        timeout_s: float,
        direct: bool = False,
        threads: int = THREADS,
        read_only: bool = False,
    ) -> FileStore:
        """Open the folder, and sweep what dead writers left.

        Args:
            read_only: touch nothing, see `Disk`.

        Raises:
            TierError: it can't be used; says why.
        """
        crew = Threads("l2-files", threads, timeout_s)
        try:
            disk = await crew.submit(partial(Disk, path, direct, read_only))
        except BaseException:
            await crew.close(0.0)
            raise
        return cls(disk, crew, Threads("l2-writers", threads, timeout_s))

    def put(self, name: str, parts: Sequence[memoryview]) -> Transfer[PutOutcome]:
        """See `ChunkStore`."""
        return self._writers.submit(partial(self._disk.put, check_name(name), byte_views(parts)))

    def get_into(
        self,
        name: str,
        targets: Sequence[memoryview],
        offset: int = 0,
        to_end: bool = True,
        observe: Observe | None = None,
    ) -> Transfer[None]:
        """See `ChunkStore`."""
        views = byte_views(targets, writable=True)
        return self._threads.submit(
            partial(self._disk.get_into, check_name(name), views, offset, to_end, observe)
        )

    async def head(self, name: str) -> Entry | None:
        """See `ChunkStore`."""
        return await self._threads.submit(partial(self._disk.head, check_name(name)))

    async def delete(self, names: Sequence[str]) -> None:
        """See `ChunkStore`."""
        checked = [check_name(name) for name in names]
        for first in range(0, len(checked), DELETE_NAMES):
            await self._writers.submit(
                partial(self._disk.delete, checked[first : first + DELETE_NAMES])
            )

    async def quarantine(self, name: str) -> None:
        """See `ChunkStore`."""
        await self._threads.submit(partial(self._disk.quarantine, check_name(name)))

    async def folders(self, prefix: str = "") -> builtins.list[str]:
        """See `ChunkStore`."""
        return await self._threads.submit(partial(self._disk.folders, check_prefix(prefix)))

    async def list(self, prefix: str = "") -> AsyncIterator[Entry]:
        """See `ChunkStore`."""
        entries = self._disk.entries(check_prefix(prefix))
        while page := await self._threads.submit(
            lambda: list(itertools.islice(entries, PAGE_ENTRIES))
        ):
            for entry in page:
                yield entry

    async def close(self, timeout_s: float) -> bool:
        """See `ChunkStore`."""
        read, written = await asyncio.gather(
            self._threads.close(timeout_s), self._writers.close(timeout_s)
        )
        if read and written:
            self._disk.close()
        return read and written
