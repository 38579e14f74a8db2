"""`memory://` keeps the rules of every store."""

from __future__ import annotations

from lmcache_qserver.tier import ChunkStore, open_store
from lmcache_qserver.tier.objects import ObjectStore
from tests.server.tier.conformance import DEADLINE_S, StoreConformance


class TestMemoryStore(StoreConformance):
    """Two stores over one obstore."""

    async def open(self) -> ChunkStore:
        store = await open_store("memory://", timeout_s=DEADLINE_S)
        assert isinstance(store, ObjectStore)
        self.place = store._store
        return store

    async def open_second(self) -> ChunkStore:
        return ObjectStore("memory://", self.place, DEADLINE_S)
