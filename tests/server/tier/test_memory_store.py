"""`memory://` keeps the rules of every store."""

from __future__ import annotations

import asyncio
from pickle import PickleBuffer
from typing import Any

import obstore
import pytest

from lmcache_qserver.tier import ChunkStore, PutOutcome, open_store
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
    store = await open_store("memory://", timeout_s=5.0)

    async def fail(*_args: object, **_options: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(obstore, "put_async", fail)
    monkeypatch.setattr(obstore, "get_async", fail)
    for transfer in (
        store.put(NAME, [memoryview(b"x")]),
        store.get_into(NAME, [memoryview(bytearray(1))]),
    ):
        with pytest.raises(RuntimeError, match="a fault"):
            await asyncio.wait_for(transfer, 1.0)
        await asyncio.wait_for(transfer.wait_until_over(), DEADLINE_S)
    assert await store.close(DEADLINE_S)


async def test_an_answer_is_not_the_end_while_the_library_holds_on_to_the_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A body that is still under way, a retry: nothing says so but the buffer itself."""
    held: list[PickleBuffer] = []

    async def answer_and_hold(_store: object, _name: str, parts: Any, **_options: object) -> None:
        held.extend(PickleBuffer(part) for part in parts)

    monkeypatch.setattr(obstore, "put_async", answer_and_hold)
    store = ObjectStore("s3://bucket", None, DEADLINE_S)
    transfer = store.put(NAME, [memoryview(b"x"), memoryview(b"y")])
    assert await transfer is PutOutcome.WRITTEN
    await asyncio.sleep(0.02)
    assert not transfer.is_over
    held.pop(0).release()
    await asyncio.sleep(0.02)
    assert not transfer.is_over
    assert not await store.close(0.01)
    held.pop(0).release()
    await asyncio.wait_for(transfer.wait_until_over(), DEADLINE_S)
    assert await store.close(DEADLINE_S)
