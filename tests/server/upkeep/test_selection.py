"""What is meant by a model and a salt, and nothing beside it."""

from __future__ import annotations

import pytest

from lmcache_qprotocol.keys import salt_digest
from lmcache_qserver.tier import ChunkStore
from lmcache_qserver.upkeep.selection import Selection, find, find_quarantined
from tests.server.upkeep.objects import FOREIGN, KEY, QUERY, Stored, fill, stored

LONG = "org/" + "x" * 200
OBJECTS = {
    "query": stored(1),
    "query, tenant": stored(2, salt="tenant"),
    "query, other": stored(3, salt="other"),
    "query, rank 1": stored(1, rank=1),
    "key": stored(1, KEY),
    "key, tenant": stored(1, KEY, salt="tenant"),
    "of a later feature": stored(1, "org/model##later"),
    "no feature": stored(1, "org/model"),
    "longer name": stored(1, "org/model2##query"),
    "other organization": stored(1, "model##query"),
    "long": stored(1, LONG + "##query"),
    "long, other": stored(1, LONG + "y##query"),
}
MODEL = {"query", "query, tenant", "query, other", "query, rank 1", "key", "key, tenant"}
MODEL |= {"of a later feature", "no feature"}
TENANT = salt_digest("tenant")


async def meant(store: ChunkStore, selection: Selection) -> set[str]:
    labels = {each.name: label for label, each in OBJECTS.items()}
    return {
        labels.get(found.entry.name, found.entry.name) async for found in find(store, selection)
    }


@pytest.mark.parametrize(
    ("selection", "labels"),
    [
        (Selection(), set(OBJECTS)),
        (Selection("org/model"), MODEL),
        (Selection(QUERY), {"query", "query, tenant", "query, other", "query, rank 1"}),
        (Selection("org/model", TENANT), {"query, tenant", "key, tenant"}),
        (Selection(KEY, TENANT), {"key, tenant"}),
        (Selection(None, TENANT), {"query, tenant", "key, tenant"}),
        (
            Selection("org/model", ""),
            MODEL - {"query, tenant", "query, other", "key, tenant"},
        ),
        (Selection("org/model", salt_digest("nobody")), set()),
        (Selection("org"), set()),
        (Selection("org/mode"), set()),
        (Selection("org/model#"), set()),
        (Selection("org/model##"), set()),
        (Selection(LONG), {"long"}),
        (Selection(LONG + "##query"), {"long"}),
        (Selection(LONG + "##key"), set()),
    ],
)
async def test_what_is_meant(store: ChunkStore, selection: Selection, labels: set[str]) -> None:
    await fill(store, OBJECTS.values())
    assert await meant(store, selection) == labels


async def test_foreign_names_are_told_where_they_lie_and_quarantine_is_left_out(
    store: ChunkStore,
) -> None:
    folder = stored(1).name.rpartition("/")[0]
    beside = f"{folder}/readme.txt"
    broken = stored(1)
    await fill(store, [Stored(FOREIGN, b"x"), Stored(beside, b"x"), broken, stored(1, KEY)])
    await store.quarantine(broken.name)
    assert await meant(store, Selection()) == {FOREIGN, beside, "key"}
    assert await meant(store, Selection(QUERY)) == {beside}
    assert await meant(store, Selection(KEY)) == {"key"}
    for selection, found in ((Selection(), [broken.name]), (Selection(KEY), [])):
        kept = [each async for each in find_quarantined(store, selection)]
        assert [each.address and each.address.name for each in kept] == found


@pytest.mark.parametrize(
    ("model", "salt"),
    [("", None), ("x" * 100_000, None), ("\udcff", None), ("m", "tenant"), ("m", "../" * 11)],
)
def test_what_no_model_or_salt_is_called(model: str, salt: str | None) -> None:
    with pytest.raises(ValueError, match=r"name|digest|utf-8"):
        Selection(model, salt)
