"""A store that is only looked at: nothing changes, not even when an object was last used."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from lmcache_qserver.tier import ChunkStore, Refused, open_store
from tests.server.tier.conformance import DEADLINE_S, NAME, get, names, put


async def opened(folder: Path, read_only: bool = False) -> ChunkStore:
    return await open_store(f"file://{folder}", timeout_s=DEADLINE_S, read_only=read_only)


def traces(folder: Path) -> dict[str, tuple[int, ...]]:
    """All that lies there, with lengths and times."""
    found: dict[str, tuple[int, ...]] = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        found[str(path)] = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if path.is_file():  # looking at a folder is a use of it, says the kernel
            found[str(path)] += (status.st_atime_ns,)
    return found


async def test_looking_leaves_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "l2"
    store = await opened(folder)
    await put(store, NAME, b"x" * 100)
    await put(store, "broken", b"y")
    await store.quarantine("broken")
    await store.close(DEADLINE_S)
    (folder / ".tmp" / "123-dead").write_bytes(b"half")
    os.utime(folder / NAME, (1_000_000, 2_000_000))  # the kernel, too, would mark it as used now
    before = traces(folder)
    store = await opened(folder, read_only=True)
    assert await get(store, NAME, 100) == b"x" * 100
    assert await names(store, "v1") == {NAME}
    assert await store.folders("v1") == ["v1/model=2Fa"]
    assert await store.quarantined() == (1, 1)
    entry = await store.head(NAME)
    assert entry is not None
    assert entry.used == 2_000_000
    assert await store.close(DEADLINE_S)
    assert traces(folder) == before


async def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="does not exist"):
        await opened(tmp_path / "l2", read_only=True)
    assert os.listdir(tmp_path) == []


async def test_a_folder_that_could_not_be_written_can_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "l2").mkdir(mode=0o777)
    (tmp_path / "l2").chmod(0o777)
    with pytest.raises(Refused, match="by others"):
        await opened(tmp_path / "l2")
    store = await opened(tmp_path / "l2", read_only=True)
    assert await names(store) == set()
    assert await store.quarantined() == (0, 0)
    await store.close(DEADLINE_S)


CHANGES: list[Callable[[ChunkStore], Awaitable[object]]] = [
    lambda store: store.put("a", [memoryview(b"x")]),
    lambda store: store.delete([NAME]),
    lambda store: store.quarantine(NAME),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["file", "memory"])
async def test_what_would_change_it_is_refused(
    change: Callable[[ChunkStore], Awaitable[object]], kind: str, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}" if kind == "file" else "memory://"
    if kind == "file":
        store = await open_store(url)
        await put(store, NAME, b"x")
        await store.close(DEADLINE_S)
    store = await open_store(url, read_only=True)
    with pytest.raises(Refused, match="for reading only"):
        await change(store)
    assert await names(store) == ({NAME} if kind == "file" else set())
    await store.close(DEADLINE_S)
