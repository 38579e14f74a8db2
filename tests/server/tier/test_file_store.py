"""`file://` keeps the rules of every store; and what disks, rights and other processes can do to it."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache_qserver.tier import (
    ChunkStore,
    Corrupt,
    Entry,
    Full,
    NotThere,
    PutOutcome,
    Refused,
    TierError,
    Unavailable,
    disk,
    open_store,
)
from lmcache_qserver.tier.chunk_store import QUARANTINE
from lmcache_qserver.tier.disk import TMP, Disk
from tests.server.tier.conformance import (
    DEADLINE_S,
    KIB,
    MIB,
    NAME,
    SIZES,
    StoreConformance,
    data_of,
    get,
    names,
    put,
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


async def opened(folder: Path, **options: Any) -> ChunkStore:
    return await open_store(f"file://{folder}", timeout_s=DEADLINE_S, **options)


class TestFileStore(StoreConformance):
    """A folder."""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "l2"

    async def open(self) -> ChunkStore:
        return await opened(self.folder)


class TestDirectFileStore(TestFileStore):
    """Around the page cache."""

    async def open(self) -> ChunkStore:
        return await opened(self.folder, direct=True)


class TestFileStoreWithoutLinks(TestFileStore):
    """A file system that has no hard links."""

    @pytest.fixture(autouse=True)
    def _no_links(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_args: object, **_options: object) -> None:
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "link", refuse)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "l2"


@pytest.fixture
async def store(folder: Path) -> AsyncIterator[ChunkStore]:
    store = await opened(folder)
    yield store
    assert await store.close(DEADLINE_S)


def left_behind(folder: Path) -> list[str]:
    return os.listdir(folder / TMP)


async def failing_put(store: ChunkStore, kind: type[TierError], nbytes: int = MIB) -> str:
    transfer = store.put(NAME, [memoryview(data_of(nbytes))])
    with pytest.raises(kind) as told:
        await transfer
    await asyncio.wait_for(transfer.wait_until_over(), DEADLINE_S)
    return str(told.value)


# --- who may read, and what is left ---


async def test_files_are_0600_and_folders_0700(store: ChunkStore, folder: Path) -> None:
    await put(store, NAME, b"x")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_dir()}
    assert modes | {stat.S_IMODE(folder.stat().st_mode)} == {0o700}
    assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o600


@pytest.mark.parametrize("umask", [0o000, 0o077])
async def test_whatever_the_umask_is(folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = await opened(folder)
        await put(store, NAME, b"x")
        await store.close(DEADLINE_S)
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / NAME).parent.stat().st_mode) == 0o700


async def test_nothing_temporary_is_left(store: ChunkStore, folder: Path) -> None:
    await put(store, NAME, b"x")
    await put(store, NAME, b"x")
    assert left_behind(folder) == []
    assert (folder / NAME).stat().st_nlink == 1


async def test_opening_sweeps_what_dead_writers_left_and_nothing_of_the_living(
    store: ChunkStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / TMP / "123-dead").write_bytes(b"half")
    swept = asyncio.Event()
    loop = asyncio.get_running_loop()
    real = os.fdatasync

    def hold(fd: int) -> None:
        other = asyncio.run_coroutine_threadsafe(_open_and_close(folder), loop)
        other.result(DEADLINE_S)
        loop.call_soon_threadsafe(swept.set)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", hold)
    assert await put(store, NAME, b"x") is PutOutcome.WRITTEN
    await asyncio.wait_for(swept.wait(), DEADLINE_S)
    assert left_behind(folder) == []


async def test_what_is_no_file_of_a_writer_does_not_keep_a_store_from_opening(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a pipe would wait for ever, and a folder can't be unlinked."""
    (folder / TMP).mkdir(parents=True)
    folder.chmod(0o700)
    os.mkfifo(folder / TMP / "pipe")
    (folder / TMP / "folder").mkdir()
    (folder / TMP / "link").symlink_to("elsewhere")
    monkeypatch.chdir(folder / TMP)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    (folder / TMP / "123-dead").write_bytes(b"half")
    store = await asyncio.wait_for(opened(folder), DEADLINE_S)
    assert await put(store, NAME, b"x") is PutOutcome.WRITTEN
    await store.close(DEADLINE_S)
    assert sorted(left_behind(folder)) == ["folder", "link", "pipe", "socket"]


async def _open_and_close(folder: Path) -> None:
    other = await opened(folder)
    await other.close(DEADLINE_S)


@pytest.mark.parametrize("taken", ["file", "folder"])
async def test_a_put_whose_file_or_folder_is_taken_away_writes_again(
    store: ChunkStore, folder: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    real, calls = os.fdatasync, 0

    def take(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            if taken == "file":
                (folder / TMP / left_behind(folder)[0]).unlink()
            else:
                shutil.rmtree(folder / "v1")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", take)
    data = data_of(10_000)
    assert await put(store, NAME, data) is PutOutcome.WRITTEN
    assert calls == 2
    assert await get(store, NAME, 10_000) == data.tobytes()
    assert left_behind(folder) == []


WRITER = """
import asyncio, sys, threading
sys.path[:0] = {path!r}
from lmcache_qserver.tier import open_store
async def main():
    store = await open_store("file://" + sys.argv[1])
    data = bytes(range(256)) * 4096
    for index in range(100000):
        await store.put(f"v1/x/{{index}}", [memoryview(data)])
        print(index, flush=True)
asyncio.run(main())
"""


async def test_sigkill_loses_nothing_that_was_acknowledged(folder: Path) -> None:
    script = WRITER.format(path=sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(20)]
        writer.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout if line.endswith("\n")]
    store = await opened(folder)
    assert left_behind(folder) == []
    listed = [entry async for entry in store.list()]
    assert {f"v1/x/{index}" for index in acknowledged} <= {entry.name for entry in listed}
    assert {entry.nbytes for entry in listed} == {MIB}
    for entry in listed:
        assert await get(store, entry.name, MIB) == bytes(range(256)) * 4096
    await store.close(DEADLINE_S)


# --- use and quarantine ---


@needs_root
@pytest.mark.parametrize("small_disk", ["noatime"], indirect=True)
async def test_reading_from_the_beginning_is_use_whatever_the_mount_thinks(
    small_disk: Path,
) -> None:
    store = await opened(small_disk)
    await put(store, NAME, b"xyz")
    os.utime(small_disk / NAME, (1e9, 1e9))
    target = [memoryview(bytearray(1))]
    await store.get_into(NAME, target, 1, to_end=False)
    assert await store.head(NAME) == Entry(NAME, 3, 1e9, used=1e9)
    began = time.time()
    await store.get_into(NAME, target, to_end=False)
    entry = await store.head(NAME)
    assert entry is not None
    assert entry.modified == 1e9
    assert began - 1 < entry.used < time.time() + 1
    assert [listed async for listed in store.list()] == [entry]
    await store.close(DEADLINE_S)


async def test_who_may_not_mark_a_use_can_read_all_the_same(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise PermissionError(errno.EPERM, "")

    await put(store, NAME, b"x")
    monkeypatch.setattr(os, "utime", refuse)
    assert await get(store, NAME, 1) == b"x"


async def test_quarantine_is_ours_alone_and_nobody_elses_place(
    store: ChunkStore, folder: Path, tmp_path: Path
) -> None:
    await put(store, NAME, b"x")
    await put(store, "v1/x/y", b"x")
    await store.quarantine(NAME)
    *folders, kept = sorted((folder / QUARANTINE).rglob("*"))
    assert kept.parent == folder / QUARANTINE / Path(NAME).parent
    assert kept.name.endswith(Path(NAME).name)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    for each in (folder / QUARANTINE, *folders):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    assert await names(store, "v1") == {"v1/x/y"}
    with pytest.raises(Refused, match="not a file"):
        await store.quarantine("v1/x")
    (tmp_path / "elsewhere").mkdir()
    for link in (folder / QUARANTINE, folder / QUARANTINE / "v1"):
        shutil.rmtree(folder / QUARANTINE)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(Refused):
            await store.quarantine("v1/x/y")
        assert await names(store) == {"v1/x/y"}
        link.unlink()
        (folder / QUARANTINE).mkdir(exist_ok=True)
    assert list((tmp_path / "elsewhere").iterdir()) == []


async def test_a_quarantine_that_somebody_empties_is_made_again(
    store: ChunkStore, folder: Path
) -> None:
    for content in (b"x", b"y"):
        await put(store, NAME, content)
        os.utime(folder / NAME, (1e9, 1e9))
        await store.quarantine(NAME)
        (entry,) = [entry async for entry in store.list(QUARANTINE)]
        assert (entry.modified, await get(store, entry.name, 1)) == (1e9, content)
        shutil.rmtree(folder / QUARANTINE)


# --- the order of a put, on which surviving a power cut hangs ---


@pytest.mark.parametrize("direct", [False, True])
async def test_bytes_are_synced_before_the_name_and_the_name_before_the_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    store = await opened(folder, direct=direct)
    calls: list[str] = []

    def record(what: str) -> Callable[..., Any]:
        real = getattr(os, what)

        def recorded(*args: Any, **options: Any) -> Any:
            place = os.readlink(f"/proc/self/fd/{args[0]}") if what == "fsync" else ""
            calls.append(f"{what} {Path(place).relative_to(folder)}" if place else what)
            return real(*args, **options)

        return recorded

    for what in ("mkdir", "writev", "fdatasync", "link", "rename", "fsync", "unlink"):
        monkeypatch.setattr(os, what, record(what))
    assert await put(store, "v1/a/b", bytes(4 * KIB), bytes(8 * KIB)) is PutOutcome.WRITTEN
    write = ["writev", "fdatasync", "link"]
    folders = ["mkdir", "fsync .", "mkdir", "fsync v1"]
    assert calls == [*folders, *write, "fsync v1/a", "unlink"]
    calls.clear()
    assert await put(store, "v1/a/c", b"x") is PutOutcome.WRITTEN
    assert calls == [*write, "fsync v1/a", "unlink"]
    calls.clear()
    # Whoever wrote it may not have synced its name yet.
    assert await put(store, "v1/a/c", b"x") is PutOutcome.ALREADY_THERE
    assert calls == ["fsync v1/a"]
    calls.clear()
    await store.delete(["v1/a/b", "v1/a/c"])
    assert calls == ["unlink", "unlink", "fsync v1/a"]
    await put(store, "v1/a/d", b"x")
    calls.clear()
    # A purge of its quarantine would be for nothing if it came back under its name.
    await store.quarantine("v1/a/d")
    assert calls == [*["mkdir"] * 3, "rename", "fsync v1/a"]
    await store.close(DEADLINE_S)


@pytest.mark.parametrize("nbytes", [*SIZES[:4], 100_000, MIB + 4096, 2 * MIB + 1])
@pytest.mark.parametrize("offset", [0, 1])
async def test_direct_writes_any_length_from_any_address(
    folder: Path, nbytes: int, offset: int
) -> None:
    store = await opened(folder, direct=True)
    data = data_of(nbytes + offset)[offset:]
    await put(store, NAME, bytes(4 * KIB), data, b"tail")
    assert await get(store, NAME, 4 * KIB + nbytes + 4) == bytes(4 * KIB) + data.tobytes() + b"tail"
    await store.close(DEADLINE_S)


async def test_writes_that_come_back_short_go_on(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write, real_read = os.writev, os.preadv

    def write(fd: int, parts: Sequence[memoryview]) -> int:
        return real_write(fd, [parts[0][:1000]])

    def read(fd: int, parts: Sequence[memoryview], offset: int) -> int:
        return real_read(fd, [parts[0][:1000]], offset)

    monkeypatch.setattr(os, "writev", write)
    monkeypatch.setattr(os, "preadv", read)
    data = data_of(10_500)
    await put(store, NAME, b"header", data)
    assert await get(store, NAME, 10_506) == b"header" + data.tobytes()


# --- disks and rights ---


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """1 MiB, and some folders; a parameter is one more option of the mount."""
    option = getattr(request, "param", "rw")
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size=1280k,mode=0700,{option}", "none", str(place)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("can't mount a small file system here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@needs_root
async def test_a_full_disk_says_so_each_time_and_keeps_what_it_has(small_disk: Path) -> None:
    """C34: twelve objects onto a disk of 1 MiB."""
    store = await opened(small_disk)
    outcomes: list[str] = []
    for index in range(12):
        try:
            outcomes.append((await put(store, f"v1/x/{index}", data_of(300 * KIB, index))).value)
        except TierError as error:
            outcomes.append(error.code)
    assert outcomes == ["written"] * 4 + ["full"] * 8
    assert left_behind(small_disk) == []
    assert await names(store) == {f"v1/x/{index}" for index in range(4)}
    for index in range(4):
        assert await get(store, f"v1/x/{index}", 300 * KIB) == data_of(300 * KIB, index).tobytes()
    await store.delete(["v1/x/0"])
    assert await put(store, "v1/x/9", data_of(300 * KIB)) is PutOutcome.WRITTEN
    await store.close(DEADLINE_S)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, Full),
        (errno.EDQUOT, Full),
        (errno.EIO, Unavailable),
        (errno.ESTALE, Unavailable),
        (errno.EROFS, Refused),
        (errno.EACCES, Refused),
    ],
)
@pytest.mark.parametrize("call", ["writev", "fdatasync", "fsync"])
async def test_what_the_disk_says_has_a_kind_and_leaves_nothing(
    store: ChunkStore,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    number: int,
    kind: type[TierError],
) -> None:
    def fail(*_args: object) -> None:
        raise OSError(number, "")

    monkeypatch.setattr(os, call, fail)
    assert os.strerror(number) in await failing_put(store, kind)
    assert left_behind(folder) == []


async def test_a_missing_parent_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"mounted\?\): make it first"):
        await opened(tmp_path / "not" / "there")
    assert not (tmp_path / "not").exists()


async def test_a_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused):
        await opened(tmp_path / "file")
    with pytest.raises(Refused):
        await opened(tmp_path / "file" / "below")


@needs_root
async def test_a_folder_of_somebody_else_is_refused(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    with pytest.raises(Refused, match="belongs to user 12345"):
        await opened(folder)


@pytest.mark.parametrize("mode", [0o770, 0o707])
async def test_a_folder_that_others_can_write_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(Refused, match="chmod"):
        await opened(folder)


@needs_root
async def test_a_read_only_disk_is_refused_at_opening(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(Refused, match="Read-only"):
        await opened(small_disk)


@needs_root
async def test_a_disk_that_becomes_read_only_refuses_puts_and_can_be_read(
    small_disk: Path,
) -> None:
    store = await opened(small_disk)
    await put(store, NAME, b"x")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert "Read-only" in await failing_put_of(store, "v1/x/y", Refused)
    assert await get(store, NAME, 1) == b"x"
    with pytest.raises(Refused):
        await store.delete([NAME])
    with pytest.raises(Refused):
        await store.quarantine(NAME)
    await store.close(DEADLINE_S)


async def failing_put_of(store: ChunkStore, name: str, kind: type[TierError]) -> str:
    with pytest.raises(kind) as told:
        await store.put(name, [memoryview(b"x")])
    return str(told.value)


async def test_a_folder_that_is_taken_away_is_unavailable_and_not_made_again(
    store: ChunkStore, folder: Path
) -> None:
    await put(store, NAME, b"x")
    shutil.rmtree(folder)
    assert "taken away" in await failing_put(store, Unavailable)
    assert await store.head(NAME) is None
    with pytest.raises(NotThere):
        await get(store, NAME, 1)
    assert await names(store) == set()
    assert not folder.exists()


async def test_another_disk_mounted_over_it_gets_nothing(store: ChunkStore, folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.mkdir()
    await put(store, NAME, b"x")
    assert os.listdir(folder) == []
    assert await get(store, NAME, 1) == b"x"


# --- what else may lie in the folder ---


async def test_links_and_strangers_are_neither_listed_nor_followed(
    store: ChunkStore, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    await put(store, "v1/a/b", b"x")
    (folder / "v1/a/link").symlink_to(tmp_path / "secret")
    (folder / "v1/loop").symlink_to(folder / "v1")
    (folder / "v1/a/what is this").write_bytes(b"")
    (folder / "v1/a/.hidden").write_bytes(b"")
    os.mkfifo(folder / "v1/a/pipe")
    assert await names(store) == {"v1/a/b"}
    for name in ("v1/a", "v1/a/link", "v1/a/pipe"):
        with pytest.raises(Refused):
            await get(store, name, 6)
        with pytest.raises(Refused, match="not a file"):
            await put(store, name, b"x")


async def test_a_file_that_shrinks_while_it_is_read_is_corrupt(
    store: ChunkStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(store, NAME, data_of(100_000))
    real = os.preadv

    def shrink(fd: int, parts: Sequence[memoryview], offset: int) -> int:
        os.truncate(folder / NAME, 5000)
        return real(fd, parts, offset)

    monkeypatch.setattr(os, "preadv", shrink)
    with pytest.raises(Corrupt, match="shorter"):
        await get(store, NAME, 100_000)


async def test_many_objects_are_listed_a_page_at_a_time(folder: Path) -> None:
    made = Disk(str(folder))
    for index in range(2000):
        path = folder / f"v1/m/{index % 16:02x}"
        path.mkdir(parents=True, exist_ok=True)
        (path / str(index)).write_bytes(b"x")
    assert len(list(made.entries(""))) == 2000
    made.close()
    store = await opened(folder)
    assert len(await names(store)) == 2000
    assert len(await names(store, "v1/m/0a")) == 125
    await store.delete([entry.name async for entry in store.list("v1/m/0a")])
    assert len(await names(store)) == 1875
    await store.close(DEADLINE_S)


# --- a disk that hangs ---


async def test_a_hanging_disk_is_answered_in_time_and_keeps_the_buffer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store(f"file://{folder}", timeout_s=0.2)
    thaw = threading.Event()
    real = os.fdatasync

    def hang(fd: int) -> None:
        assert thaw.wait(DEADLINE_S)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", hang)
    transfers = [store.put(f"v1/x/{index}", [memoryview(b"x")]) for index in range(6)]
    for transfer in transfers:
        with pytest.raises(Unavailable):
            await transfer
    # Four threads hang; what waited behind them will never run, and what comes is not even queued.
    assert [transfer.is_over for transfer in transfers] == [False] * 4 + [True] * 2
    late = store.put("v1/x/late", [memoryview(b"x")])
    assert late.has_outcome
    with pytest.raises(Unavailable, match="hangs"):
        await late
    assert late.is_over
    assert not await store.close(0.05)
    thaw.set()
    for transfer in transfers[:4]:
        await asyncio.wait_for(transfer.wait_until_over(), DEADLINE_S)
    assert await store.close(DEADLINE_S)


async def test_a_disk_that_comes_back_works_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store(f"file://{folder}", timeout_s=0.1)
    thaw = threading.Event()
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (thaw.wait(DEADLINE_S), real(fd)))
    hung = [store.put(f"v1/x/{index}", [memoryview(b"x")]) for index in range(4)]
    for transfer in hung:
        with pytest.raises(Unavailable):
            await transfer
    thaw.set()
    for transfer in hung:
        await asyncio.wait_for(transfer.wait_until_over(), DEADLINE_S)
    assert await put(store, "v1/x/5", b"x") is PutOutcome.WRITTEN
    # Unknown was right: they have been written after all.
    assert len(await names(store)) == 5
    await store.close(DEADLINE_S)


def test_a_process_with_a_hanging_write_can_end(folder: Path) -> None:
    script = f"""
import asyncio, os, sys, threading
sys.path[:0] = {sys.path!r}
from lmcache_qserver.tier import open_store
async def main():
    store = await open_store("file://{folder}")
    os.fdatasync = lambda fd: threading.Event().wait()
    store.put("v1/x", [memoryview(b"x")])
    assert not await store.close(0.05)
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", script], timeout=DEADLINE_S, check=True)


def test_rename_new_never_replaces(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "new").write_bytes(b"new")
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(FileExistsError):
            disk.rename_new(fd, "old", "new")
        disk.rename_new(fd, "old", "newer")
    finally:
        os.close(fd)
    assert (tmp_path / "new").read_bytes() == b"new"
    assert (tmp_path / "newer").read_bytes() == b"old"
