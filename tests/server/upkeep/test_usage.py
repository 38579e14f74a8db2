"""Sums by model, layout and rank."""

from __future__ import annotations

from lmcache_qserver.tier import ChunkStore, Entry
from lmcache_qserver.upkeep.told import usage_lines, usage_records
from lmcache_qserver.upkeep.usage import Tally, usage
from tests.server.upkeep.objects import FOREIGN, KEY, QUERY, Stored, fill, stored


async def test_everything_is_in_one_sum_and_only_one(store: ChunkStore) -> None:
    objects = {
        (QUERY, 0, 16): [stored(1), stored(2, salt="tenant"), stored(1, rows=(0, 3))],
        (QUERY, 1, 16): [stored(1, rank=1)],
        (QUERY, 0, 32): [stored(1, hidden=32)],
        (KEY, 0, 16): [stored(1, KEY)],
    }
    flat = [each for group in objects.values() for each in group]
    await fill(store, [*flat, stored(9), Stored(FOREIGN, b"mine")])
    await store.quarantine(stored(9).name)
    found = await usage(store)
    assert len(found.families) == len(objects)
    sums = sorted((tally.objects, tally.pieces, tally.nbytes) for tally in found.families.values())
    assert sums == sorted(
        (
            len(group),
            sum("." in each.name.rpartition("/")[2].removesuffix(".safetensors") for each in group),
            sum(len(each.content) for each in group),
        )
        for group in objects.values()
    )
    assert (found.total.objects, found.total.pieces) == (6, 1)
    assert found.total.nbytes == sum(len(each.content) for each in flat)
    assert (found.foreign.objects, found.foreign.nbytes) == (1, 4)
    assert found.quarantined == (1, len(stored(9).content))
    *families, total = usage_records(found)
    assert sum(record["bytes"] for record in families) == total["bytes"] == found.total.nbytes
    assert {record["model_name"] for record in families} == {QUERY, KEY}
    text = "\n".join(usage_lines(found, 0.0))
    assert "org/model##key" in text
    assert "in quarantine: 1 objects" in text
    assert "not ours: 1" in text


async def test_of_an_empty_store(store: ChunkStore) -> None:
    found = await usage(store)
    assert usage_records(found)[-1]["objects"] == 0
    assert usage_lines(found, 0.0)


def test_oldest_and_newest() -> None:
    tally = Tally()
    for when in (5.0, 0.0, 9.0):
        tally.add(Entry("a", 1, when, when))
    assert (tally.oldest, tally.newest) == (0.0, 9.0)
