"""`memory://` keeps the rules of every store."""

from __future__ import annotations

import asyncio

import obstore
import pytest

from lmcache_qserver.tier import ChunkStore, open_store
from lmcache_qserver.tier.objects import ObjectStore
from tests.server.tier.conformance import DEADLINE_S, NAME, StoreConformance


class TestMemoryStore(StoreConformance):
    """Two stores over one obstore."""

    async def open(self) -> ChunkStore:
        store = await open_store("memory://", timeout_s=DEADLINE_S)
        assert isinstance(store, ObjectStore)
        self.place = store._store
        return store

    async def open_second(self) -> ChunkStore:
        return ObjectStore("memory://", self.place, DEADLINE_S)


async def test_what_nobody_expects_of_the_library_ends_a_transfer_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = await open_store("memory://")

    async def fail(*_args: object, **_options: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(obstore, "put_async", fail)
    monkeypatch.setattr(obstore, "get_async", fail)
    for transfer in (
        store.put(NAME, [memoryview(b"x")]),
        store.get_into(NAME, [memoryview(bytearray(1))]),
    ):
        with pytest.raises(RuntimeError, match="a fault"):
            await transfer
        await asyncio.wait_for(transfer.wait_until_over(), DEADLINE_S)
    assert await store.close(DEADLINE_S)
