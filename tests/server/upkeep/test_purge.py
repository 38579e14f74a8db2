"""A purge takes all that is meant and nothing else, however much it is."""

from __future__ import annotations

import pytest

from lmcache_qprotocol.keys import salt_digest
from lmcache_qserver.tier import ChunkStore
from lmcache_qserver.tier.chunk_store import QUARANTINE, name_before
from lmcache_qserver.upkeep.purge import purge, purge_selected
from lmcache_qserver.upkeep.selection import Selection
from tests.server.tier.conformance import names
from tests.server.upkeep.objects import FOREIGN, KEY, QUERY, Stored, fill, stored

PLAIN, TENANT, OTHER_FEATURE = stored(1), stored(2, salt="tenant"), stored(1, KEY, salt="tenant")
OTHER_MODEL = stored(1, "org/model2##query", salt="tenant")
ALL = (PLAIN, TENANT, OTHER_FEATURE, OTHER_MODEL)


@pytest.mark.parametrize(
    ("model", "salt", "gone"),
    [
        ("org/model", None, {PLAIN, TENANT, OTHER_FEATURE}),
        (QUERY, None, {PLAIN, TENANT}),
        ("org/model", "tenant", {TENANT, OTHER_FEATURE}),
        ("org/model", "", {PLAIN}),
        ("org/model", "nobody", set()),
        ("nobody", None, set()),
    ],
)
async def test_what_goes_and_what_stays(
    store: ChunkStore, model: str, salt: str | None, gone: set[Stored]
) -> None:
    await fill(store, [*ALL, Stored(FOREIGN, b"mine")])
    digest = None if salt is None else salt_digest(salt)
    meant = await purge_selected(store, Selection(model, digest), dry_run=True)
    assert await names(store) == {each.name for each in ALL} | {FOREIGN}
    counts = await purge(store, model, salt)
    assert await names(store) == {each.name for each in set(ALL) - gone} | {FOREIGN}
    assert counts == meant
    assert counts.objects == sum(counts.models.values()) == len(gone)
    assert counts.nbytes == sum(len(each.content) for each in gone)
    assert (await purge(store, model, salt)).objects == 0


@pytest.mark.parametrize(
    ("model", "salt", "gone"),
    [
        ("org/model", None, {PLAIN, TENANT, OTHER_FEATURE}),
        (QUERY, None, {PLAIN, TENANT}),
        ("org/model", "tenant", {TENANT, OTHER_FEATURE}),
        ("org/model", "", {PLAIN}),
        ("org/model", "nobody", set()),
        ("nobody", None, set()),
    ],
)
async def test_the_same_goes_from_quarantine_and_nothing_else(
    store: ChunkStore, model: str, salt: str | None, gone: set[Stored]
) -> None:
    """Though nothing of the purged model is left outside, and broken bytes say nothing."""
    for each in (*ALL, PLAIN):
        await fill(store, [Stored(each.name, b"x")])
        await store.quarantine(each.name)
    await fill(store, [PLAIN])
    digest = None if salt is None else salt_digest(salt)
    meant = await purge_selected(store, Selection(model, digest), dry_run=True)
    assert await store.quarantined() == (5, 5)
    counts = await purge(store, model, salt)
    assert counts == meant
    number = len(gone) + (PLAIN in gone)
    assert (counts.quarantined, counts.quarantined_bytes) == (number, number)
    assert counts.objects == (PLAIN in gone)
    left = {name_before(name) for name in await names(store, QUARANTINE)}
    assert left == {each.name for each in set(ALL) - gone}
    assert await store.quarantined() == (5 - number, 5 - number)


async def test_what_is_put_aside_while_it_runs_goes_too(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = store.delete

    async def delete(batch: list[str]) -> None:
        if TENANT.name in batch:
            await store.quarantine(TENANT.name)
        await real(batch)

    monkeypatch.setattr(store, "delete", delete)
    await fill(store, ALL)
    await purge(store, "org/model", "tenant")
    assert await names(store) == {PLAIN.name, OTHER_MODEL.name}


async def test_foreign_names_among_them_are_left_and_counted(store: ChunkStore) -> None:
    beside = f"{PLAIN.name.rpartition('/')[0]}/readme.txt"
    await fill(store, [PLAIN, Stored(beside, b"mine")])
    counts = await purge(store, "org/model")
    assert (counts.objects, counts.foreign) == (1, 1)
    assert await names(store) == {beside}


async def test_more_than_a_batch(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleted while it is listed: nothing is passed over."""
    monkeypatch.setattr("lmcache_qserver.upkeep.purge.BATCH_NAMES", 3)
    for adapter in ("files", "objects"):
        monkeypatch.setattr(f"lmcache_qserver.tier.{adapter}.PAGE_ENTRIES", 4)
    batches: list[int] = []
    real = store.delete

    async def delete(batch: list[str]) -> None:
        batches.append(len(batch))
        await real(batch)

    monkeypatch.setattr(store, "delete", delete)
    await fill(store, [stored(number, salt=f"s{number % 2}") for number in range(50)])
    counts = await purge(store, "org/model")
    assert counts.objects == 50
    assert await names(store) == set()
    assert max(batches) == 3
