"""A store that is looked at and not touched: what would change it is Refused."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Sequence

from lmcache_qserver.tier.chunk_store import ChunkStore, Entry, Observe, PutOutcome
from lmcache_qserver.tier.errors import Refused
from lmcache_qserver.tier.transfer import Transfer


class ReadOnlyStore(ChunkStore):
    """Get one by `open_store(url, read_only=True)`."""

    def __init__(self, store: ChunkStore) -> None:
        self.url = store.url
        self._store = store

    def put(self, name: str, parts: Sequence[memoryview]) -> Transfer[PutOutcome]:
        """Fails."""
        transfer: Transfer[PutOutcome] = Transfer()
        transfer.fail(self._refused())
        transfer.end()
        return transfer

    def get_into(
        self,
        name: str,
        targets: Sequence[memoryview],
        offset: int = 0,
        to_end: bool = True,
        observe: Observe | None = None,
    ) -> Transfer[None]:
        """See `ChunkStore`."""
        return self._store.get_into(name, targets, offset, to_end, observe)

    async def head(self, name: str) -> Entry | None:
        """See `ChunkStore`."""
        return await self._store.head(name)

    async def delete(self, names: Sequence[str]) -> None:
        """Fails."""
        raise self._refused()

    async def quarantine(self, name: str) -> None:
        """Fails."""
        raise self._refused()

    def list(self, prefix: str = "") -> AsyncIterator[Entry]:
        """See `ChunkStore`."""
        return self._store.list(prefix)

    def list_beginning(self, start: str) -> AsyncIterator[Entry]:
        """See `ChunkStore`."""
        return self._store.list_beginning(start)

    async def folders(self, prefix: str = "") -> builtins.list[str]:
        """See `ChunkStore`."""
        return await self._store.folders(prefix)

    async def close(self, timeout_s: float) -> bool:
        """See `ChunkStore`."""
        return await self._store.close(timeout_s)

    def _refused(self) -> Refused:
        return Refused(f"{self.url} is open for reading only")
