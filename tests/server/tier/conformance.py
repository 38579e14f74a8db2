"""What every ChunkStore must do. An adapter's test class inherits this and says how to open it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from lmcache_qserver.tier import ChunkStore, Corrupt, Entry, NotThere, PutOutcome, Transfer
from lmcache_qserver.tier.chunk_store import QUARANTINE, Observe, name_before
from lmcache_qserver.tier.errors import TierError, Unavailable

KIB, MIB = 1 << 10, 1 << 20
SIZES = [1, 4 * KIB - 1, 4 * KIB, 4 * KIB + 1, 16 * MIB, 64 * MIB]
DEADLINE_S = 60.0
FDS = "/proc/self/fd"
SPARE_FDS = 8
"""What connections and threads may open of their own accord."""
NAME = "v1/model=2Fa/nosalt/ab/abcd.safetensors"

ODD_NAMES = [
    "a",
    "-",
    "~",
    "=",
    "_.",
    "v1/=2E=2E/x",
    "v1/=2E./x..",
    "v1/Model/x",
    "v1/model/x",
    "v1/a=b/c~d",
    "/".join("x" * 100 for _ in range(8)),
    "y" * 200,
]
BAD_NAMES = [
    "",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "../a",
    ".tmp/a",
    "a/.b",
    "a b",
    "a\nb",
    "a\n",
    "a\x00b",
    "a%41",
    "a\\b",
    "a:b",
    "a?b",
    "a#b",
    "é",
    "🙂",
    "z" * 201,
    "/".join("x" * 100 for _ in range(9)),
]


def data_of(nbytes: int, seed: int = 0) -> Any:
    """Bytes of which no two stretches are alike: a uint8 array (whose buffer mypy sees from Python 3.12 on)."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


async def put(store: ChunkStore, name: str, *parts: object) -> PutOutcome:
    """Store, and see that the buffers come back."""
    transfer = store.put(name, [memoryview(part) for part in parts])  # type: ignore[arg-type]  # buffers
    outcome = await transfer
    await asyncio.wait_for(transfer.wait_until_over(), DEADLINE_S)
    return outcome


async def get(store: ChunkStore, name: str, nbytes: int) -> bytes:
    """All of an object of this length."""
    target = bytearray(nbytes)
    transfer = store.get_into(name, [memoryview(target)])
    try:
        await transfer
    finally:
        await asyncio.wait_for(transfer.wait_until_over(), DEADLINE_S)
    return bytes(target)


async def names(store: ChunkStore, prefix: str = "") -> set[str]:
    """All names."""
    return {entry.name async for entry in store.list(prefix)}


class StoreConformance:
    """Adapters say how to open; `second` is another store over the same place."""

    async def open(self) -> ChunkStore:
        raise NotImplementedError

    async def open_second(self) -> ChunkStore:
        return await self.open()

    async def kept(self, store: ChunkStore) -> list[bytes]:
        """What lies in quarantine, read as any object."""
        return [
            await get(store, entry.name, entry.nbytes) async for entry in store.list(QUARANTINE)
        ]

    @pytest.fixture
    async def store(self) -> AsyncIterator[ChunkStore]:
        store = await self.open()
        yield store
        assert await store.close(DEADLINE_S)

    @pytest.fixture
    async def second(self, store: ChunkStore) -> AsyncIterator[ChunkStore]:
        second = await self.open_second()
        yield second
        assert await second.close(DEADLINE_S)

    @pytest.mark.parametrize("nbytes", SIZES)
    async def test_what_is_put_is_what_is_got(self, store: ChunkStore, nbytes: int) -> None:
        data = data_of(nbytes)
        assert await put(store, NAME, data) is PutOutcome.WRITTEN
        assert await get(store, NAME, nbytes) == data.tobytes()
        entry = await store.head(NAME)
        assert entry is not None
        assert (entry.name, entry.nbytes) == (NAME, nbytes)

    @pytest.mark.parametrize("nbytes", SIZES)
    async def test_parts_of_any_size_are_joined_and_scattered(
        self, store: ChunkStore, nbytes: int
    ) -> None:
        header, data = data_of(4 * KIB, 1), data_of(nbytes, 2)
        await put(store, NAME, header, data)
        first, second = bytearray(4 * KIB), bytearray(nbytes)
        await store.get_into(NAME, [memoryview(first), memoryview(second)])
        assert (bytes(first), bytes(second)) == (header.tobytes(), data.tobytes())

    async def test_many_parts(self, store: ChunkStore) -> None:
        data = data_of(3000)
        await put(store, NAME, *(data[i : i + 1] for i in range(3000)))
        assert await get(store, NAME, 3000) == data.tobytes()
        targets = [bytearray(1) for _ in range(3000)]
        await store.get_into(NAME, [memoryview(target) for target in targets])
        assert b"".join(targets) == data.tobytes()

    async def test_a_part_of_an_object_can_be_read(self, store: ChunkStore) -> None:
        data = data_of(10_000)
        await put(store, NAME, data)
        target = bytearray(100)
        await store.get_into(NAME, [memoryview(target)], 5000, to_end=False)
        assert bytes(target) == data[5000:5100].tobytes()
        await store.get_into(NAME, [memoryview(target)], 9900)
        assert bytes(target) == data[9900:].tobytes()

    @pytest.mark.parametrize("nbytes", [1, MIB, MIB + 1, 20 * MIB + 5])
    async def test_an_observer_sees_every_byte_once_and_in_order(
        self, store: ChunkStore, nbytes: int
    ) -> None:
        header, data = data_of(4 * KIB, 1), data_of(nbytes, 2)
        await put(store, NAME, header, data)
        targets = [bytearray(4 * KIB), bytearray(nbytes)]
        seen: list[bytes] = []
        reading = store.get_into(
            NAME, [memoryview(target) for target in targets], observe=_into(seen)
        )
        await reading
        assert seen[0] == header.tobytes()  # of one target at a time
        assert b"".join(seen) == header.tobytes() + data.tobytes() == b"".join(targets)
        await asyncio.wait_for(reading.wait_until_over(), DEADLINE_S)
        del reading
        for target in targets:
            await until_resizable(target)

    async def test_an_observer_of_a_part_sees_the_part(self, store: ChunkStore) -> None:
        data = data_of(3 * MIB)
        await put(store, NAME, data)
        targets = [memoryview(bytearray(1)) for _ in range(3000)]
        seen: list[bytes] = []
        await store.get_into(NAME, targets, MIB, to_end=False, observe=_into(seen))
        assert seen == [bytes([byte]) for byte in data[MIB : MIB + 3000]]

    async def test_what_an_observer_raises_is_the_outcome(self, store: ChunkStore) -> None:
        await put(store, NAME, data_of(3 * MIB))
        target = bytearray(3 * MIB)

        def refuse(_data: memoryview) -> None:
            raise Corrupt("not what I hoped for")

        reading = store.get_into(NAME, [memoryview(target)], observe=refuse)
        with pytest.raises(Corrupt, match="hoped for"):
            await reading
        await asyncio.wait_for(reading.wait_until_over(), DEADLINE_S)
        del reading
        await until_resizable(target)

    async def test_of_what_is_not_there_an_observer_sees_nothing(self, store: ChunkStore) -> None:
        seen: list[bytes] = []
        with pytest.raises(NotThere):
            await store.get_into(NAME, [memoryview(bytearray(9))], observe=_into(seen))
        assert seen == []

    @pytest.mark.parametrize(
        ("nbytes", "offset", "to_end"),
        [
            (9_999, 0, True),
            (10_001, 0, True),
            (10_001, 0, False),
            (100, 5_000, True),
            (1, 10_000, False),
            (100, 50_000, True),
            (40 * MIB, 0, True),
        ],
    )
    async def test_another_length_is_corrupt(
        self, store: ChunkStore, nbytes: int, offset: int, to_end: bool
    ) -> None:
        await put(store, NAME, data_of(10_000))
        transfer = store.get_into(NAME, [memoryview(bytearray(nbytes))], offset, to_end)
        with pytest.raises(Corrupt):
            await transfer
        await asyncio.wait_for(transfer.wait_until_over(), DEADLINE_S)

    async def test_a_second_put_changes_nothing(
        self, store: ChunkStore, second: ChunkStore
    ) -> None:
        data = data_of(5000)
        assert await put(store, NAME, data) is PutOutcome.WRITTEN
        for other in (store, second):
            assert await put(other, NAME, data_of(5000, 1)) is PutOutcome.ALREADY_THERE
            assert await put(other, NAME, data_of(99, 2)) is PutOutcome.ALREADY_THERE
            assert await get(other, NAME, 5000) == data.tobytes()

    async def test_of_puts_at_once_one_writes_and_all_succeed(
        self, store: ChunkStore, second: ChunkStore
    ) -> None:
        candidates = [data_of(MIB, seed) for seed in range(8)]
        transfers = [
            (store, second)[index % 2].put(NAME, [memoryview(data)])
            for index, data in enumerate(candidates)
        ]
        outcomes = await asyncio.gather(*transfers)
        assert sorted(outcomes) == [PutOutcome.ALREADY_THERE] * 7 + [PutOutcome.WRITTEN]
        winner = candidates[outcomes.index(PutOutcome.WRITTEN)].tobytes()
        assert await get(store, NAME, MIB) == winner
        assert await get(second, NAME, MIB) == winner

    @pytest.mark.parametrize("turns", [0, 1, 3, 10])
    async def test_a_cancelled_put_goes_on_and_never_mixes_bytes(
        self, store: ChunkStore, turns: int
    ) -> None:
        """The buffer is used for something else as soon as it is free again, and no sooner."""
        for round_number in range(3):
            name = f"v1/m/{turns}-{round_number}"
            data = data_of(16 * MIB, round_number)
            before = data.tobytes()
            transfer = store.put(name, [memoryview(data)])
            waiter = asyncio.ensure_future(_wait_for(transfer))
            for _ in range(turns):
                await asyncio.sleep(0)
            waiter.cancel()
            transfer.when_over(lambda data=data: data.fill(7))  # type: ignore[misc]  # a default binds it
            await asyncio.wait_for(transfer.wait_until_over(), DEADLINE_S)
            assert waiter.done()
            assert await transfer is PutOutcome.WRITTEN
            await asyncio.sleep(0)
            assert data[0] == data[-1] == 7
            assert await get(store, name, len(before)) == before

    async def test_cancelling_who_waits_for_the_buffers_does_not_free_them(
        self, store: ChunkStore
    ) -> None:
        transfer = store.put(NAME, [memoryview(data_of(16 * MIB))])
        waiter = asyncio.ensure_future(transfer.wait_until_over())
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.wait([waiter])
        if not transfer.has_outcome:  # else it was too fast to tell
            assert not transfer.is_over
        assert await transfer is PutOutcome.WRITTEN
        await asyncio.wait_for(transfer.wait_until_over(), DEADLINE_S)

    async def test_a_cancelled_get_fills_its_target_or_leaves_it_alone_once_it_is_over(
        self, store: ChunkStore
    ) -> None:
        data = data_of(16 * MIB)
        await put(store, NAME, data)
        target = np.zeros(16 * MIB, np.uint8)
        transfer = store.get_into(NAME, [target.data])
        waiter = asyncio.ensure_future(_wait_for(transfer))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.wait_for(transfer.wait_until_over(), DEADLINE_S)
        target[:] = 0
        await asyncio.sleep(0.05)
        assert not target.any()

    async def test_the_buffers_can_be_given_away_when_it_is_over(self, store: ChunkStore) -> None:
        data = bytearray(data_of(MIB))
        transfer = store.put(NAME, [memoryview(data)])
        await transfer
        await asyncio.wait_for(transfer.wait_until_over(), DEADLINE_S)
        del transfer
        await until_resizable(data)
        target = bytearray(MIB)
        reading = store.get_into(NAME, [memoryview(target)])
        await reading
        await asyncio.wait_for(reading.wait_until_over(), DEADLINE_S)
        del reading
        await until_resizable(target)

    async def test_reading_while_another_deletes(
        self, store: ChunkStore, second: ChunkStore
    ) -> None:
        data = data_of(20 * MIB).tobytes()
        for round_number in range(4):
            name = f"{NAME}.{round_number}"
            await put(store, name, data)
            target = bytearray(len(data))
            reading = store.get_into(name, [memoryview(target)])
            for _ in range(round_number):
                await asyncio.sleep(0.002)
            await second.delete([name])
            try:
                await reading
            except (NotThere, Corrupt):
                pass
            else:
                assert bytes(target) == data
            await asyncio.wait_for(reading.wait_until_over(), DEADLINE_S)
            assert await store.head(name) is None

    async def test_what_is_not_there(self, store: ChunkStore) -> None:
        assert await store.head(NAME) is None
        with pytest.raises(NotThere):
            await get(store, NAME, 10)
        with pytest.raises(NotThere):
            await get(store, NAME, 40 * MIB)
        await store.delete([NAME, "a/b"])
        assert await names(store) == set()
        assert await names(store, "v1/model") == set()

    async def test_what_is_deleted_is_gone_and_can_be_put_again(self, store: ChunkStore) -> None:
        data = data_of(100)
        await put(store, NAME, data_of(100, 1))
        await put(store, "b", data)
        await store.delete([NAME])
        assert await store.head(NAME) is None
        assert await names(store) == {"b"}
        assert await put(store, NAME, data) is PutOutcome.WRITTEN
        assert await get(store, NAME, 100) == data.tobytes()

    async def test_odd_names_are_kept_apart(self, store: ChunkStore, second: ChunkStore) -> None:
        assert len(set(ODD_NAMES)) == len(ODD_NAMES)
        for index, name in enumerate(ODD_NAMES):
            assert await put(store, name, bytes([index])) is PutOutcome.WRITTEN
        for index, name in enumerate(ODD_NAMES):
            assert await get(second, name, 1) == bytes([index])
        assert await names(second) == set(ODD_NAMES)

    @pytest.mark.parametrize("name", BAD_NAMES)
    async def test_bad_names_never_reach_the_store(self, store: ChunkStore, name: str) -> None:
        with pytest.raises(ValueError, match="no name"):
            store.put(name, [memoryview(b"x")])
        with pytest.raises(ValueError, match="no name"):
            store.get_into(name, [memoryview(bytearray(1))])
        with pytest.raises(ValueError, match="no name"):
            await store.head(name)
        with pytest.raises(ValueError, match="no name"):
            await store.delete(["a", name])
        with pytest.raises(ValueError, match="no name"):
            await store.quarantine(name)
        if name:
            with pytest.raises(ValueError, match="no name"):
                await names(store, name)
            with pytest.raises(ValueError, match="no name"):
                await store.folders(name)

    async def test_no_bytes_are_no_object(self, store: ChunkStore) -> None:
        for parts in ([], [memoryview(b"")], [memoryview(b""), memoryview(b"")]):
            with pytest.raises(ValueError, match="at least one byte"):
                store.put(NAME, parts)
        with pytest.raises(ValueError, match="at least one byte"):
            store.get_into(NAME, [])
        assert await store.head(NAME) is None
        await put(store, NAME, b"", b"x", b"")
        assert await get(store, NAME, 1) == b"x"

    async def test_wrong_buffers_are_refused(self, store: ChunkStore) -> None:
        with pytest.raises(ValueError, match="contiguous"):
            store.put(NAME, [memoryview(bytes(10))[::2]])
        with pytest.raises(ValueError, match="writable"):
            store.get_into(NAME, [memoryview(bytes(10))])

    async def test_list_tells_names_lengths_and_ages(self, store: ChunkStore) -> None:
        wanted = {f"v1/m/{index % 7}/{index}": index + 1 for index in range(40)}
        for name, nbytes in wanted.items():
            await put(store, name, bytes(nbytes))
        await put(store, "v1/mm/0/0", b"x")
        listed = [entry async for entry in store.list("v1/m")]
        assert {entry.name: entry.nbytes for entry in listed} == wanted
        assert len(listed) == len(wanted)
        assert await names(store, "v1/m/3") == {name for name in wanted if "/3/" in name}
        assert await names(store) == wanted.keys() | {"v1/mm/0/0"}
        entry = await store.head("v1/m/0/0")
        assert isinstance(entry, Entry)
        assert abs(listed[0].modified - entry.modified) < 60

    async def test_what_begins_alike_can_be_listed_alone(self, store: ChunkStore) -> None:
        alike = ["v1/m/ab-", "v1/m/ab.e/f", "v1/m/ab/d", "v1/m/abc"]
        for name in (*alike, "v1/m/aa", "v1/m/a", "v1/m/aB", "v1/m/ac", "v1/mm/ab", "v1/l/ab", "w"):
            await put(store, name, b"x")
        for start, wanted in (
            ("v1/m/ab", alike),
            ("v1/m/ab-", []),
            ("v1/m/ab.", alike[1:2]),
            ("v1/m/ab/", alike[2:3]),
            ("v1/mm", ["v1/mm/ab"]),
            ("v", [*alike, "v1/m/a", "v1/m/aB", "v1/m/aa", "v1/m/ac", "v1/mm/ab", "v1/l/ab"]),
            ("v1/m/b", []),
            ("v2/m/ab", []),
        ):
            found = [entry.name async for entry in store.list_beginning(start)]
            assert sorted(found) == sorted(wanted), start

    async def test_a_list_can_be_left(
        self, store: ChunkStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However often: the fixture sees that nothing is under way, we that nothing stays open."""
        for adapter in ("files", "objects"):
            monkeypatch.setattr(f"lmcache_qserver.tier.{adapter}.PAGE_ENTRIES", 2)
        for index in range(9):
            await put(store, f"v1/{index % 3}/{index}", b"x")
        assert len(await names(store)) == 9
        before = len(os.listdir(FDS))
        for _ in range(4 * SPARE_FDS):
            listing = store.list("v1")
            assert (await anext(listing)).name.startswith("v1/")
            await listing.aclose()  # type: ignore[attr-defined]  # it is a generator
        assert len(os.listdir(FDS)) < before + SPARE_FDS

    async def test_use_is_told_as_far_as_the_store_knows(self, store: ChunkStore) -> None:
        began = time.time()
        await put(store, NAME, b"xy")
        await get(store, NAME, 2)
        entry = await store.head(NAME)
        assert entry is not None
        assert began - 2 < entry.modified <= entry.used < time.time() + 2  # S3 counts seconds
        (listed,) = [one async for one in store.list()]
        assert (listed.name, listed.nbytes) == (entry.name, entry.nbytes)
        assert abs(listed.modified - entry.modified) < 1  # a list of Ceph's counts milliseconds
        assert began - 2 < listed.modified <= listed.used < time.time() + 2

    async def test_folders_are_one_level_of_names(
        self, store: ChunkStore, second: ChunkStore
    ) -> None:
        for name in ("v1/m/a/1", "v1/m/a/2", "v1/m=23/b/1", "v1/m.x/1", "v1/l", "v2/m/a/1", "w"):
            await put(store, name, b"x")
        for each in (store, second):
            assert await each.folders() == ["v1", "v2"]
            assert await each.folders("v1") == ["v1/m", "v1/m.x", "v1/m=23"]
            assert await each.folders("v1/m") == ["v1/m/a"]
            for nothing in ("v1/m/a", "v1/m/a/1", "v1/l", "v", "v3", "v1/no/such"):
                assert await each.folders(nothing) == []

    async def test_what_is_in_quarantine_has_left_its_name(
        self, store: ChunkStore, second: ChunkStore
    ) -> None:
        other = NAME.replace("abcd", "abce")
        await put(store, other, b"other")
        for text in (b"broken", b"broken again"):
            assert await put(store, NAME, text) is PutOutcome.WRITTEN
            await second.quarantine(NAME)
            assert await store.head(NAME) is None
            with pytest.raises(NotThere):
                await get(store, NAME, len(text))
            assert await names(store, "v1") == {other}
        assert await put(store, NAME, b"whole") is PutOutcome.WRITTEN
        assert await get(store, NAME, 5) == b"whole"
        assert await names(second, "v1") == {NAME, other}
        assert await second.folders("v1") == ["v1/model=2Fa"]
        assert sorted(await self.kept(store)) == [b"broken", b"broken again"]
        assert await second.quarantined() == (2, len(b"brokenbroken again"))

    async def test_what_is_in_quarantine_lies_in_its_own_folder_there(
        self, store: ChunkStore, second: ChunkStore
    ) -> None:
        others = ["v1/a/b/c", "v1/a/b/d-e", "v1/a/f/c", "v2/a/b/c", "top"]
        for name in others:
            await put(store, name, name.encode())
            await store.quarantine(name)
        found = {entry.name async for entry in second.list(QUARANTINE)}
        assert sorted(map(name_before, found)) == sorted(others)
        assert await second.folders(f"{QUARANTINE}/v1/a") == [
            f"{QUARANTINE}/v1/a/b",
            f"{QUARANTINE}/v1/a/f",
        ]
        below = await names(second, f"{QUARANTINE}/v1/a/b")
        assert {name_before(name) for name in below} == {"v1/a/b/c", "v1/a/b/d-e"}
        for kept in below:
            entry = await second.head(kept)
            assert entry is not None
            assert await get(second, kept, entry.nbytes) == name_before(kept).encode()
        await second.delete(sorted(below))
        assert await names(store) == found - below
        assert await names(store, "v1") == set()

    async def test_a_name_that_is_too_long_to_be_kept_stays(self, store: ChunkStore) -> None:
        longest = "/".join(["x" * 99] * 9)
        await put(store, longest, b"x")
        with pytest.raises(ValueError, match="no name"):
            await store.quarantine(longest)
        assert await names(store) == {longest}

    async def test_quarantine_of_what_is_not_there_is_nothing(self, store: ChunkStore) -> None:
        await put(store, "v1/a/b", b"x")
        await store.quarantine("v1/a/c")
        await store.quarantine("v2/a/b")
        assert await names(store) == {"v1/a/b"}
        assert await self.kept(store) == []
        assert await store.quarantined() == (0, 0)

    async def test_the_longest_name_can_be_put_aside(self, store: ChunkStore) -> None:
        await put(store, f"v1/{'y' * 200}", b"x")
        await store.quarantine(f"v1/{'y' * 200}")
        assert await names(store, "v1") == set()
        assert await self.kept(store) == [b"x"]

    async def test_close_waits_for_puts_and_then_refuses(
        self, store: ChunkStore, second: ChunkStore
    ) -> None:
        data = data_of(4 * MIB)
        transfers = [store.put(f"{NAME}.{index}", [memoryview(data)]) for index in range(8)]
        assert await store.close(DEADLINE_S)
        assert all(transfer.is_over for transfer in transfers)
        assert [await transfer for transfer in transfers] == [PutOutcome.WRITTEN] * 8
        assert len(await names(second)) == 8
        late = store.put(NAME, [memoryview(data)])
        with pytest.raises(Unavailable):
            await late
        assert late.is_over
        assert await store.close(DEADLINE_S)

    async def test_every_error_has_a_code(self) -> None:
        codes = [kind.code for kind in TierError.__subclasses__()]
        assert sorted(codes) == ["corrupt", "full", "not_there", "refused", "unavailable"]


def _into(seen: list[bytes]) -> Observe:
    return lambda data: seen.append(bytes(data))


async def _wait_for(transfer: Transfer[Any]) -> None:
    await transfer


async def until_resizable(buffer: bytearray) -> None:
    """A bytearray can't be resized as long as anybody has a view of it."""
    for _ in range(100):
        try:
            buffer.append(0)
        except BufferError:
            await asyncio.sleep(0.01)
        else:
            return
    raise AssertionError("somebody still has a view of the buffer")
