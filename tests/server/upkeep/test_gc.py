"""What has to go: decided purely, and done to stores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_qserver.tier import ChunkStore, Entry, open_store
from lmcache_qserver.upkeep.gc import Plan, delete, expired, plan, surplus
from tests.server.tier.conformance import DEADLINE_S, names
from tests.server.upkeep.objects import FOREIGN, Stored, fill, stored

entries = st.lists(
    st.builds(
        lambda name, nbytes, modified, idle: Entry(name, nbytes, modified, modified + idle),
        st.uuids().map(str),
        st.integers(1, 1000),
        st.integers(0, 100),
        st.integers(0, 100),
    ),
    unique_by=lambda entry: entry.name,
    max_size=30,
)


def entry(name: str, nbytes: int = 10, modified: float = 0, used: float | None = None) -> Entry:
    return Entry(name, nbytes, modified, modified if used is None else used)


def test_too_old_is_what_was_put_before_however_often_it_is_used() -> None:
    old, used, new = entry("a", modified=1), entry("b", modified=2, used=99), entry("c", modified=3)
    assert expired([new, used, old], 3) == [old, used]
    assert expired([new, used, old], 1) == []


def test_too_much_is_what_was_unused_longest() -> None:
    first, second, third = entry("a", used=3), entry("b", used=1), entry("c", used=2)
    given = [first, second, third]
    assert surplus(given, 30) == []
    assert surplus(given, 29) == [second]
    assert surplus(given, 20) == [second]
    assert surplus(given, 19) == [second, third]
    assert surplus(given, 0) == [second, third, first]
    assert surplus([entry("b"), entry("a")], 10) == [entry("a")]


def test_what_is_too_much_alone_takes_nothing_with_it() -> None:
    old, newer, endless = entry("a", used=1), entry("b", used=2), entry("c", 1 << 40, used=3)
    assert surplus([old, newer, endless], 20) == [endless]
    assert surplus([old, newer, endless], 10) == [endless, old]


@given(entries, st.integers(0, 20_000))
def test_no_more_goes_than_has_to(given_entries: list[Entry], max_bytes: int) -> None:
    gone = surplus(given_entries, max_bytes)
    left = sum(each.nbytes for each in given_entries) - sum(each.nbytes for each in gone)
    assert left <= max_bytes
    assert not gone or left + gone[-1].nbytes > max_bytes
    stay = [each for each in given_entries if each not in gone]
    assert all(each.nbytes <= max_bytes for each in stay)
    by_use = [each for each in gone if each.nbytes <= max_bytes]
    assert all(each.used <= other.used for each in by_use for other in stay)


async def test_foreign_names_and_quarantine_are_left_alone_and_count_for_nothing(
    store: ChunkStore,
) -> None:
    objects = [stored(number) for number in range(3)]
    foreign = Stored(FOREIGN, bytes(100_000))
    await fill(store, [*objects, stored(9), foreign])
    await store.quarantine(stored(9).name)
    nbytes = len(objects[0].content)
    everything = await plan(store, 4e9, None, 0)
    assert (len(everything.surplus), everything.expired, everything.quarantined) == (3, [], [])
    assert (everything.kept_objects, everything.kept_bytes, everything.foreign) == (0, 0, 1)
    enough = await plan(store, 4e9, None, 3 * nbytes)
    assert enough == Plan([], [], [], 3, 3 * nbytes, 1)
    async for _ in delete(store, everything.surplus):
        pass
    assert await names(store, "v1") == {FOREIGN}
    assert await store.quarantined() == (1, nbytes)


async def test_what_is_too_old_goes_from_quarantine_too(store: ChunkStore) -> None:
    await fill(store, [stored(1), stored(2), Stored("quarantine/v1/mine.txt", b"mine")])
    await store.quarantine(stored(1).name)
    (kept,) = await names(store, "quarantine/v1/org=2Fmodel=23=23query")
    assert (await plan(store, 0.0, 0.0, None)).quarantined == []
    found = await plan(store, 4e9, 0.0, None)
    assert [each.name for each in found.quarantined] == [kept]
    assert [each.name for each in found.expired] == [stored(2).name]
    async for _ in delete(store, found.quarantined):
        pass
    assert await names(store) == {stored(2).name, "quarantine/v1/mine.txt"}


async def test_old_ones_first_then_as_many_as_are_too_much(tmp_path: Path) -> None:
    store = await open_store(f"file://{tmp_path}/l2")
    objects = [stored(number) for number in range(5)]
    await fill(store, objects)
    used_and_put = [(1900, 100), (1500, 1400), (1300, 1300), (1700, 1200), (1600, 1600)]
    for each, times in zip(objects, used_and_put, strict=True):
        os.utime(tmp_path / "l2" / each.name, times)
    nbytes = len(objects[0].content)
    found = await plan(store, 2000.0, 900.0, 2 * nbytes)
    assert [each.name for each in found.expired] == [objects[0].name]  # used last, and too old
    assert [each.name for each in found.surplus] == [objects[2].name, objects[1].name]
    assert (found.kept_objects, found.kept_bytes) == (2, 2 * nbytes)
    await store.close(DEADLINE_S)


@pytest.mark.parametrize("dry_run", [False, True])
async def test_deleting_goes_by_batches_and_a_dry_run_deletes_nothing(
    store: ChunkStore, dry_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_qserver.upkeep.gc.BATCH_NAMES", 2)
    objects = [stored(number) for number in range(5)]
    await fill(store, objects)
    listed = [each async for each in store.list()]
    batches = [list(batch) async for batch in delete(store, listed, dry_run)]
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert [each for batch in batches for each in batch] == listed
    assert len(await names(store)) == (5 if dry_run else 0)
