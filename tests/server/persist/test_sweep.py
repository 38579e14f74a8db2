"""What a server deletes of its folder by itself: what is too old, wherever it lies, and what is too much."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lmcache_qserver.qstore.persist.held import Held
from lmcache_qserver.qstore.persist.sweep import Swept, inspect, sweep
from lmcache_qserver.tier import ChunkStore, open_store
from lmcache_qserver.tier.chunk_store import QUARANTINE, name_before
from tests.server.tier.conformance import DEADLINE_S, names
from tests.server.upkeep.objects import Stored, fill, stored

NOW = 2e9
KEPT = [stored(number) for number in range(3)]
PUT_ASIDE = [stored(number, salt="tenant") for number in range(3)]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ChunkStore]:
    """Three objects, and three in quarantine; the first of each is 300 s old, the next 200 s."""
    store = await open_store(f"file://{tmp_path}/l2", timeout_s=DEADLINE_S)
    await fill(store, [*KEPT, *PUT_ASIDE])
    for objects in (KEPT, PUT_ASIDE):
        for number, each in enumerate(objects):
            age = 100.0 * (3 - number)
            os.utime(tmp_path / "l2" / each.name, (NOW - age, NOW - age))
    for each in PUT_ASIDE:
        await store.quarantine(each.name)
    yield store
    assert await store.close(DEADLINE_S)


async def swept(store: ChunkStore, ttl_s: float = 0.0, max_bytes: int = 0) -> tuple[Swept, Held]:
    held, counts = Held(), Swept()
    inspected = await inspect(store, held, keep_entries=True)
    assert (len(held), inspected.foreign) == (3, 0), "quarantine is not among it"
    gone = await sweep(
        store, held, inspected, max_bytes=max_bytes, ttl_s=ttl_s, wall=NOW, swept=counts
    )
    assert gone == {each.name for each in KEPT} - await names(store, "v1")
    assert {each.name for each in KEPT if each.name in held} == await names(store, "v1")
    return counts, held


async def left(store: ChunkStore) -> set[str]:
    """Names, and those before of what is in quarantine."""
    return {
        name_before(name) if name.startswith(QUARANTINE) else name for name in await names(store)
    }


def names_of(*objects: Stored) -> set[str]:
    return {each.name for each in objects}


async def test_what_is_too_old_goes_from_quarantine_too(store: ChunkStore) -> None:
    counts, _ = await swept(store, ttl_s=150.0)
    assert await left(store) == names_of(KEPT[2], PUT_ASIDE[2])
    nbytes = sum(len(each.content) for each in (*KEPT[:2], *PUT_ASIDE[:2]))
    assert counts == Swept(expired=4, surplus=0, nbytes=nbytes)


async def test_what_is_in_quarantine_is_not_too_much(store: ChunkStore) -> None:
    counts, held = await swept(store, max_bytes=sum(len(each.content) for each in KEPT))
    assert (counts, len(held)) == (Swept(), 3)
    counts, held = await swept(store, max_bytes=int(2.5 * len(KEPT[0].content)))
    assert await left(store) == names_of(*KEPT[1:], *PUT_ASIDE)
    assert counts == Swept(expired=0, surplus=1, nbytes=len(KEPT[0].content))
    assert held.nbytes == sum(len(each.content) for each in KEPT[1:])
