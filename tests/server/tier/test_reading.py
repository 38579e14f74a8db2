"""A get that two threads share: whatever the helper does, the bytes are right, and nobody keeps them."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from lmcache_qserver.tier import ChunkStore, Corrupt, Transfer, Unavailable, open_store
from lmcache_qserver.tier.helper import Helper
from lmcache_qserver.tier.reading import PIECE_BYTES, Reading
from tests.server.tier.conformance import (
    DEADLINE_S,
    MIB,
    NAME,
    data_of,
    put,
    until_resizable,
)

NBYTES = 8 * PIECE_BYTES + 5
HELPER = "l2-files-helper"

Read = Callable[[int, Sequence[memoryview], int], int]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ChunkStore]:
    store = await open_store(f"file://{tmp_path}/l2", timeout_s=DEADLINE_S)
    await put(store, NAME, data_of(NBYTES))
    yield store
    assert await store.close(DEADLINE_S)


class Get:
    """A get under way, and what its observer has seen."""

    def __init__(self, store: ChunkStore) -> None:
        self.target = bytearray(NBYTES)
        self.seen = bytearray()
        self.transfer: Transfer[None] = store.get_into(
            NAME, [memoryview(self.target)], observe=self.observe
        )

    def observe(self, data: memoryview) -> None:
        self.seen += data

    async def succeeds(self) -> None:
        await self.transfer
        await self.ends()
        assert self.seen == self.target == data_of(NBYTES).tobytes()

    async def ends(self) -> None:
        """The target is the caller's again, and nobody has a view of it."""
        await asyncio.wait_for(self.transfer.wait_until_over(), DEADLINE_S)
        await until_resizable(self.target)
        self.target.pop()


def is_helper() -> bool:
    return threading.current_thread().name == HELPER


def hook_reads(monkeypatch: pytest.MonkeyPatch, before: Callable[[bool], None]) -> None:
    """Call `before(is it the helper?)` before each read."""
    real: Read = os.preadv

    def read(fd: int, parts: Sequence[memoryview], offset: int) -> int:
        before(is_helper())
        return real(fd, parts, offset)

    monkeypatch.setattr(os, "preadv", read)


async def test_both_read(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    reads = {False: 0, True: 0}

    def count(helper: bool) -> None:
        reads[helper] += 1
        if reads[helper] == 1:
            both.wait(DEADLINE_S)

    hook_reads(monkeypatch, count)
    await Get(store).succeeds()
    assert sum(reads.values()) == 9


async def test_a_piece_that_comes_late_is_shown_in_its_place(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    helping, others = threading.Event(), threading.Semaphore(0)

    def dawdle(helper: bool) -> None:
        if helper and not helping.is_set():
            helping.set()
            for _ in range(8):  # all but its own
                assert others.acquire(timeout=DEADLINE_S)
        elif not helper:
            assert helping.wait(DEADLINE_S)
            others.release()

    hook_reads(monkeypatch, dawdle)
    await Get(store).succeeds()


@pytest.mark.parametrize("helper_comes", ["never", "late"])
async def test_without_a_helper(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch, helper_comes: str
) -> None:
    asked: list[Callable[[], None]] = []
    monkeypatch.setattr(Helper, "ask", lambda _self, work: asked.append(work))
    get = Get(store)
    await get.succeeds()
    if helper_comes == "late":
        monkeypatch.setattr(os, "preadv", None)
        for work in asked:
            work()
    assert len(asked) == 1


async def test_what_fits_one_piece_asks_for_no_help(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Helper, "ask", None)
    await put(store, "small", data_of(MIB))
    target = bytearray(MIB)
    await store.get_into("small", [memoryview(target)])
    assert target == data_of(MIB).tobytes()


@pytest.mark.parametrize("who", ["helper", "thread"])
async def test_what_goes_wrong_in_either_is_the_outcome(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    both, stopped = threading.Barrier(2), threading.Event()
    reads = {False: 0, True: 0}
    told: list[bool] = []
    stop = Reading._stop

    def tell(reading: Reading) -> None:
        stop(reading)
        stopped.set()

    def fail(helper: bool) -> None:
        reads[helper] += 1
        if reads[helper] == 1:
            both.wait(DEADLINE_S)
            if helper == (who == "helper"):
                raise OSError(errno.EIO, "")
            told.append(stopped.wait(DEADLINE_S))

    hook_reads(monkeypatch, fail)
    monkeypatch.setattr(Reading, "_stop", tell)
    get = Get(store)
    with pytest.raises(Unavailable, match="Input/output"):
        await get.transfer
    await get.ends()
    assert told == [True]
    assert reads == {False: 1, True: 1}  # and nobody reads on
    monkeypatch.undo()
    await Get(store).succeeds()


async def test_a_helper_that_hangs_keeps_the_buffer_and_only_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store(f"file://{tmp_path}/l2", timeout_s=0.2)
    await put(store, NAME, data_of(NBYTES))
    hanging, thaw = threading.Event(), threading.Event()

    def hang(helper: bool) -> None:
        if helper:
            hanging.set()
            assert thaw.wait(DEADLINE_S)
        else:
            assert hanging.wait(DEADLINE_S)

    hook_reads(monkeypatch, hang)
    get = Get(store)
    with pytest.raises(Unavailable, match="not done"):
        await get.transfer
    assert not get.transfer.is_over
    for _ in range(3):
        await Get(store).succeeds()  # nobody waits for a helper that is busy
    assert not get.transfer.is_over
    thaw.set()
    await get.ends()
    assert await store.close(DEADLINE_S)


async def test_the_buffer_is_the_helpers_until_it_has_read_whatever_happens_to_the_thread(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    helping, failing, thaw = threading.Event(), threading.Event(), threading.Event()

    def fail(helper: bool) -> None:
        if helper:
            helping.set()
            assert thaw.wait(DEADLINE_S)
        else:
            assert helping.wait(DEADLINE_S)
            failing.set()
            raise OSError(errno.EIO, "")

    hook_reads(monkeypatch, fail)
    get = Get(store)
    assert await asyncio.to_thread(failing.wait, DEADLINE_S)
    await asyncio.sleep(0.05)
    assert not get.transfer.is_over
    thaw.set()
    with pytest.raises(Unavailable):
        await get.transfer
    await get.ends()


async def test_an_observer_that_gives_up_ends_the_reading(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Helper, "ask", lambda *_args: None)
    reads = 0

    def count(_helper: bool) -> None:
        nonlocal reads
        reads += 1

    def refuse(_data: memoryview) -> None:
        raise Corrupt("seen enough")

    hook_reads(monkeypatch, count)
    with pytest.raises(Corrupt, match="seen enough"):
        await store.get_into(NAME, [np.zeros(NBYTES, np.uint8).data], observe=refuse)
    assert reads == 1


def test_a_helper_has_one_thing_to_do_or_none() -> None:
    helper = Helper("helper")
    began, go_on, done = threading.Event(), threading.Event(), threading.Semaphore(0)

    def work() -> None:
        began.set()
        assert go_on.wait(DEADLINE_S)
        done.release()

    helper.ask(work)
    assert began.wait(DEADLINE_S)
    helper.ask(done.release)  # busy: forgotten
    go_on.set()
    assert done.acquire(timeout=DEADLINE_S)
    assert not done.acquire(timeout=0.05)
    for _ in range(100):  # it may not be idle quite yet
        helper.ask(done.release)
        if done.acquire(timeout=0.1):
            break
    else:
        raise AssertionError("it never helps again")
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "helper"]
    helper.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
