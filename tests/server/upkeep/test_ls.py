"""Objects, one by one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lmcache_qprotocol.keys import salt_digest
from lmcache_qserver.tier import ChunkStore, NotThere, Transfer, open_store
from lmcache_qserver.upkeep.ls import Listed, ls
from lmcache_qserver.upkeep.selection import Selection
from lmcache_qserver.upkeep.told import listed_cells, listed_record
from tests.server.tier.conformance import DEADLINE_S
from tests.server.upkeep.objects import CREATED, FOREIGN, QUERY, START, Stored, fill, stored

LONG = "m" * 200 + "##query"


async def listing(store: ChunkStore, headers: bool) -> dict[str, Listed]:
    return {each.found.entry.name: each async for each in ls(store, Selection(), headers)}


async def test_what_a_name_tells(store: ChunkStore) -> None:
    piece = stored(1, salt="tenant", rows=(0, 3), rank=1)
    await fill(store, [piece, stored(2), Stored(FOREIGN, b"mine")])
    found = await listing(store, headers=False)
    record = listed_record(found[piece.name])
    assert record["kind"] == "object"
    assert (record["model_name"], record["salt"], record["rows"], record["bytes"]) == (
        QUERY,
        salt_digest("tenant"),
        (0, 3),
        len(piece.content),
    )
    cells = listed_cells(found[piece.name], record["modified"] + 3 * 86400)
    assert (cells[0], *cells[2:5], *cells[6:]) == (
        QUERY,
        "1/2",
        salt_digest("tenant"),
        "0-3",
        "4.2 KiB",
        "3 d 0 h",
    )
    assert listed_cells(found[stored(2).name], 0.0)[3:5] == ("-", "all")
    assert listed_record(found[FOREIGN])["kind"] == "foreign"


async def test_what_a_header_tells(store: ChunkStore) -> None:
    piece, long = stored(1, rows=(2, 5)), stored(3, LONG)
    await fill(store, [piece, stored(2), long, Stored(FOREIGN, b"mine")])
    found = await listing(store, headers=True)
    assert found.keys() == {piece.name, stored(2).name, long.name, FOREIGN}
    assert listed_cells(found[piece.name], 0.0)[4:6] == ("2-5", f"{START + 2}-{START + 5}")
    record = listed_record(found[stored(2).name])
    assert (record["rows"], record["token_range"], record["created"]) == (
        (0, 8),
        (START, START + 8),
        CREATED,
    )
    assert listed_record(found[long.name])["model_name"] == LONG


async def test_a_header_that_makes_no_sense_is_told(store: ChunkStore) -> None:
    await fill(store, [stored(1).flipped(3000), stored(2)])
    found = await listing(store, headers=True)
    assert found[stored(1).name].error == "corrupt"
    assert listed_cells(found[stored(1).name], 0.0)[5] == "corrupt"
    assert listed_record(found[stored(1).name])["error"] == "corrupt"
    assert found[stored(2).name].error == ""


async def test_an_empty_file_has_no_header(tmp_path: Path) -> None:
    store = await open_store(f"file://{tmp_path}/l2")
    await fill(store, [stored(1)])
    os.truncate(tmp_path / "l2" / stored(1).name, 0)
    assert (await listing(store, headers=True))[stored(1).name].error == "corrupt"
    await store.close(DEADLINE_S)


async def test_what_is_deleted_meanwhile_is_left_out(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(store, [stored(1), stored(2)])
    real = store.get_into

    def get_into(name: str, *rest: Any, **more: Any) -> Any:
        if name == stored(2).name:
            return real(name, *rest, **more)
        transfer: Transfer[None] = Transfer()
        transfer.fail(NotThere("gone"))
        transfer.end()
        return transfer

    monkeypatch.setattr(store, "get_into", get_into)
    assert (await listing(store, headers=True)).keys() == {stored(2).name}


async def test_a_models_name_can_not_drive_the_terminal(store: ChunkStore) -> None:
    evil = stored(1, "a\x1b[2J\nb##query")
    await fill(store, [evil])
    for headers in (False, True):
        cell = listed_cells((await listing(store, headers))[evil.name], 0.0)[0]
        assert cell == "a\\x1b[2J\\nb##query"
