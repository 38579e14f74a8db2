"""What is meant by a model and a salt, and nothing beside it."""

from __future__ import annotations

import pytest

from lmcache_qprotocol.keys import KeyFamily, ObjectKey, kv_rank, salt_digest
from lmcache_qserver.qstore.persist.purging import Purge
from lmcache_qserver.tier import ChunkStore
from lmcache_qserver.tier.paths import address_of
from lmcache_qserver.upkeep.selection import Selection, find, find_quarantined
from tests.server.upkeep.objects import FOREIGN, KEY, QUERY, Stored, fill, stored

LONG = "org/" + "x" * 200
MARKED = "org/marked##1"
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
    "a mark in the name": stored(1, MARKED + "##query"),
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
        (Selection(LONG[:96]), set()),
        (Selection(MARKED), {"a mark in the name"}),
        (Selection(MARKED + "##query"), {"a mark in the name"}),
        (Selection("org/marked"), set()),
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


MODELS = [
    "org/model",
    "org/model2",
    "org/mode",
    "org",
    "org/model##1",
    "org/model#",
    "модель",
    "../..",
    "x" * 96,
    LONG,
    LONG + "y",
    LONG[:96],
    LONG[:-1],
]
NAMES = [model + suffix for model in MODELS for suffix in ("", "##query", "##key", "##later")]


@pytest.mark.parametrize("salt", [None, "", "tenant"])
@pytest.mark.parametrize("wanted", NAMES, ids=lambda name: ascii(name)[-20:])
def test_memory_and_store_mean_the_same(wanted: str, salt: str | None) -> None:
    what = Purge(wanted, salt)
    selection = Selection(wanted, None if salt is None else salt_digest(salt))
    meant = set()
    for name in NAMES:
        for of in ("", "tenant"):
            key = KeyFamily(
                model_name=name, world_size=1, kv_rank=kv_rank(1, 0), cache_salt=of, layout_id=b""
            )
            address = address_of(ObjectKey(family=key, chunk_hash=bytes(32)))
            assert what.is_family(key) == selection.holds(address), name
            if what.is_family(key):
                assert salt in (None, of)
                meant.add(name)
    assert wanted in meant
    assert all(name == wanted or name.rpartition("##")[0] == wanted for name in meant)
    if wanted in MODELS:
        assert {wanted + "##query", wanted + "##key"} <= meant, "all that are known are met"


@pytest.mark.parametrize(
    ("model", "salt"),
    [("", None), ("x" * 100_000, None), ("\udcff", None), ("m", "tenant"), ("m", "../" * 11)],
)
def test_what_no_model_or_salt_is_called(model: str, salt: str | None) -> None:
    with pytest.raises(ValueError, match=r"name|digest|utf-8"):
        Selection(model, salt)
