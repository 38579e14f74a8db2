"""Every object is proven; what is not whole is told apart from what is not there and from what can't be read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache_qserver.tier import (
    ChunkStore,
    Corrupt,
    PutOutcome,
    Refused,
    Transfer,
    Unavailable,
    open_store,
)
from lmcache_qserver.tier.format import ALIGNMENT, MAX_HEADER_BYTES, header_bytes
from lmcache_qserver.upkeep.reading import Memory, prove, read_header
from lmcache_qserver.upkeep.selection import Selection
from lmcache_qserver.upkeep.verify import AT_ONCE, Verdict, verify
from tests.server.tier.conformance import DEADLINE_S, MIB, names, put
from tests.server.upkeep.objects import FOREIGN, KEY, Stored, fill, stored

IN_DATA = 8 * 4_200
"""A bit behind the header."""
LARGE = 65_536
"""head_dim of an object of 2 MiB."""


async def verdicts(
    store: ChunkStore, model: str | None = None, keeper: ChunkStore | None = None
) -> dict[str, Verdict]:
    found = [verdict async for verdict in verify(store, Selection(model), keeper)]
    assert len({verdict.entry.name for verdict in found}) == len(found)
    return {verdict.entry.name: verdict for verdict in found}


async def the_verdict(store: ChunkStore) -> Verdict:
    (verdict,) = (await verdicts(store)).values()
    return verdict


def header_flips(content: bytes) -> list[int]:
    """Bits all over an object: its frame, its metadata, its padding, its data."""
    step = len(content) * 8 // 60
    return [0, 63, 64, *range(65, len(content) * 8, step), len(content) * 8 - 1]


async def test_what_is_whole_is_whole(store: ChunkStore) -> None:
    objects = [
        *(stored(number) for number in range(3 * AT_ONCE)),
        stored(1, salt="tenant"),
        stored(1, rows=(0, 3)),
        stored(1, KEY, rank=1),
    ]
    await fill(store, objects)
    found = await verdicts(store)
    assert found.keys() == {each.name for each in objects}
    assert {verdict.code for verdict in found.values()} == {"whole"}


async def test_any_bit_that_flips_is_found(store: ChunkStore) -> None:
    """Each in an object of its own, all over header and data."""
    content = stored(0).content
    damaged = [stored(number).flipped(bit) for number, bit in enumerate(header_flips(content))]
    await fill(store, damaged)
    found = await verdicts(store)
    assert found.keys() == {each.name for each in damaged}
    assert {verdict.code for verdict in found.values()} == {"corrupt"}
    assert all(verdict.why for verdict in found.values())


@pytest.mark.parametrize("left", [1, 7, 8, 4095, 4096, 4097, -1])
async def test_what_is_cut_off_is_corrupt(store: ChunkStore, left: int) -> None:
    whole = stored(1)
    await fill(store, [Stored(whole.name, whole.content[:left])])
    assert (await the_verdict(store)).code == "corrupt"


async def test_what_is_longer_is_corrupt(store: ChunkStore) -> None:
    whole = stored(1)
    await fill(store, [Stored(whole.name, whole.content + b"\x00")])
    assert (await the_verdict(store)).code == "corrupt"


async def test_an_empty_file_is_corrupt(tmp_path: Path) -> None:
    store = await open_store(f"file://{tmp_path}/l2")
    await fill(store, [stored(1)])
    os.truncate(tmp_path / "l2" / stored(1).name, 0)
    verdict = await the_verdict(store)
    assert (verdict.code, verdict.why) == ("corrupt", "the object is empty")
    await store.close(DEADLINE_S)


@pytest.mark.parametrize(
    "other",
    [
        stored(2),
        stored(1, salt="tenant"),
        stored(1, KEY),
        stored(1, rank=1),
        stored(1, rows=(0, 3)),
    ],
)
async def test_a_whole_object_in_anothers_place_is_corrupt(
    store: ChunkStore, other: Stored
) -> None:
    await fill(store, [Stored(stored(1).name, other.content)])
    verdict = await the_verdict(store)
    assert verdict.code == "corrupt"
    assert other.name in verdict.why


async def test_foreign_names_are_told_and_not_read(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(store, [Stored(FOREIGN, b"mine")])
    monkeypatch.setattr(store, "get_into", None)
    verdict = await the_verdict(store)
    assert (verdict.code, verdict.entry.name) == ("foreign", FOREIGN)


async def test_only_the_model_that_is_meant(store: ChunkStore) -> None:
    await fill(store, [stored(1).flipped(IN_DATA), stored(1, KEY)])
    assert (await verdicts(store, KEY)).keys() == {stored(1, KEY).name}
    assert (await verdicts(store, "org/model")).keys() == {stored(1).name, stored(1, KEY).name}


async def test_what_is_corrupt_is_put_aside_and_can_be_stored_again(store: ChunkStore) -> None:
    bad, good = stored(1).flipped(IN_DATA), stored(2)
    await fill(store, [bad, good, Stored(FOREIGN, b"mine")])
    found = await verdicts(store, keeper=store)
    assert {name for name, verdict in found.items() if verdict.is_moved} == {bad.name}
    assert await names(store, "v1") == {good.name, FOREIGN}
    assert await store.quarantined() == (1, len(bad.content))
    assert await put(store, bad.name, stored(1).content) is PutOutcome.WRITTEN
    found = await verdicts(store)
    assert {verdict.code for verdict in found.values()} == {"whole", "foreign"}


async def test_without_being_asked_nothing_is_moved(store: ChunkStore) -> None:
    bad = stored(1).flipped(IN_DATA)
    await fill(store, [bad])
    await verdicts(store)
    assert await names(store) == {bad.name}


async def test_what_can_not_be_moved_is_told(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/l2"
    store = await open_store(url)
    await fill(store, [stored(1).flipped(IN_DATA)])
    reader = await open_store(url, read_only=True)
    (verdict,) = (await verdicts(reader, keeper=reader)).values()
    assert (verdict.code, verdict.is_moved) == ("corrupt", False)
    assert "not moved" in verdict.why
    for each in (store, reader):
        await each.close(DEADLINE_S)


# --- while others work on it ---


def before_each_get(
    store: ChunkStore,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[str, int], Transfer[None] | None],
) -> None:
    """`happens(name, number of this get)` may answer in the store's place."""
    real, count = store.get_into, iter(range(1_000))

    def get_into(name: str, targets: Sequence[memoryview], *rest: Any, **more: Any) -> Any:
        return happens(name, next(count)) or real(name, targets, *rest, **more)

    monkeypatch.setattr(store, "get_into", get_into)


def failed(error: Exception) -> Transfer[None]:
    transfer: Transfer[None] = Transfer()
    transfer.fail(error)
    transfer.end()
    return transfer


async def test_what_is_deleted_before_it_is_read_is_gone_not_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store(f"file://{tmp_path}/l2")
    await fill(store, [stored(1), stored(2)])

    def happens(name: str, _number: int) -> None:
        if name == stored(1).name:
            os.unlink(tmp_path / "l2" / name)

    before_each_get(store, monkeypatch, happens)
    found = await verdicts(store, keeper=store)
    assert {name: verdict.code for name, verdict in found.items()} == {
        stored(1).name: "gone",
        stored(2).name: "whole",
    }
    assert await store.quarantined() == (0, 0)
    await store.close(DEADLINE_S)


@pytest.mark.parametrize(("after", "code"), [("deleted", "gone"), ("stored again", "whole")])
async def test_what_looks_corrupt_because_it_was_replaced_is_looked_at_again(
    after: str, code: str, store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = stored(1)
    await fill(store, [whole.flipped(IN_DATA)])
    judged: list[str] = []

    async def replacing(*arguments: Any) -> Any:
        judged.append(whole.name)
        try:
            return await prove(*arguments)
        except Corrupt:
            await store.delete([whole.name])
            if after == "stored again":
                await put(store, whole.name, whole.content)
            raise

    monkeypatch.setattr("lmcache_qserver.upkeep.verify.prove", replacing)
    (verdict,) = (await verdicts(store, keeper=store)).values()
    assert (verdict.code, verdict.is_moved) == (code, False)
    assert len(judged) == (1 if after == "deleted" else 2)
    assert await store.quarantined() == (0, 0)


@pytest.mark.parametrize("error", [Unavailable("a disk hangs"), Refused("no rights")])
async def test_what_can_not_be_read_is_neither_whole_nor_corrupt(
    error: Unavailable | Refused, store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(store, [stored(1), stored(2)])
    before_each_get(
        store, monkeypatch, lambda name, _: failed(error) if name == stored(1).name else None
    )
    found = await verdicts(store, keeper=store)
    assert (found[stored(1).name].code, found[stored(1).name].why) == (error.code, str(error))
    assert found[stored(2).name].code == "whole"
    assert await names(store) == {stored(1).name, stored(2).name}


async def test_a_store_that_goes_away_ends_it(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_prefix: str = "") -> Any:
        raise Unavailable("gone")

    monkeypatch.setattr(store, "list", gone)
    with pytest.raises(Unavailable):
        await verdicts(store)


# --- memory ---


async def test_a_large_object_is_proven_piece_by_piece(store: ChunkStore) -> None:
    large = stored(1, hidden=LARGE)
    assert len(large.content) > 2 * MIB
    assert len(large.content) % MAX_HEADER_BYTES
    memory = Memory(MAX_HEADER_BYTES)
    await fill(store, [large])
    entry = await store.head(large.name)
    assert entry is not None
    assert (await prove(store, entry, memory)).address.name == large.name
    for byte in (5_000, MIB - 1, MIB, MIB + 1, 2 * MIB, len(large.content) - 1):
        await store.delete([large.name])
        await fill(store, [large.flipped(8 * byte)])
        entry = await store.head(large.name)
        assert entry is not None
        with pytest.raises(Corrupt, match="have changed"):
            await prove(store, entry, memory)
    await asyncio.sleep(0)  # pieces come back in the loop's next turn
    assert len(memory._free) == 1


async def test_a_length_that_is_wrong_is_found_before_everything_is_read(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody's terabyte under a name of ours."""
    whole = stored(1)
    await fill(store, [Stored(whole.name, whole.content + bytes(3 * MAX_HEADER_BYTES))])
    gets: list[int] = []
    before_each_get(store, monkeypatch, lambda _, number: gets.append(number))
    entry = await store.head(whole.name)
    assert entry is not None
    with pytest.raises(Corrupt, match="bytes of data instead of"):
        await prove(store, entry, Memory(MAX_HEADER_BYTES))
    assert gets == [0]


async def test_memory_is_used_again_when_no_transfer_uses_it_and_no_sooner(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(MAX_HEADER_BYTES)
    await fill(store, [stored(1)])
    entry = await store.head(stored(1).name)
    assert entry is not None
    hanging: Transfer[None] = Transfer()
    before_each_get(store, monkeypatch, lambda _, number: hanging if number == 0 else None)
    reading = asyncio.ensure_future(prove(store, entry, memory))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    assert memory._free == []
    await prove(store, entry, memory)
    await asyncio.sleep(0)
    assert len(memory._free) == 1  # another
    hanging.fail(Unavailable("late"))
    hanging.end()
    await asyncio.sleep(0)
    assert len(memory._free) == 2


# --- headers alone ---


async def test_a_header_is_read_alone_however_long_it_is(store: ChunkStore) -> None:
    long = stored(1, model="m" * 5_000 + "##query")
    assert header_bytes(memoryview(long.content)) > ALIGNMENT
    for each in (stored(1), long):
        await fill(store, [each])
        entry = await store.head(each.name)
        assert entry is not None
        assert (await read_header(store, entry)).address.name == each.name
    for content in (
        b"x",
        b"\x00" * 5000,
        stored(2).content[:4095],
        stored(2).flipped(3000).content,
    ):
        await store.delete([stored(2).name])
        await put(store, stored(2).name, content)
        entry = await store.head(stored(2).name)
        assert entry is not None
        with pytest.raises(Corrupt):
            await read_header(store, entry)
