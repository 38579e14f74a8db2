"""C24 on disk: whatever a salt says, it keeps tenants apart, and purging one leaves all others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_qprotocol.messages import PurgeReply
from lmcache_qserver.testing.daemon import running_daemon
from tests.server.persist.l2_folder import file_of, objects, persist, quarantined, tier, url_of
from tests.server.test_salts import NAME, SALTS
from tests.server.wire_worker import CHUNK, MODEL, WireWorker, rows_of

NUMBERS = {salt: number for number, salt in enumerate(SALTS.values())}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Nothing else may appear beside it."""
    (tmp_path / "beside").mkdir()
    before = outside(tmp_path)
    yield tmp_path / "beside/l2"
    assert outside(tmp_path) == before


def outside(root: Path) -> set[Path]:
    """Where a salt might have led to."""
    seen = set(root.iterdir()) | set((root / "beside").iterdir()) | set(Path("/dev/shm").iterdir())
    seen |= {path for path in Path("/tmp").iterdir() if "salt" in path.name}
    return {path for path in seen if path.name != "l2" and "lmcache" not in path.name}


def purge(worker: WireWorker, salt: str | None) -> PurgeReply:
    reply: PurgeReply = worker.client.ask("purge_q", MODEL, salt).result
    return reply


def read_all(worker: WireWorker) -> dict[str, bytes | str]:
    return {salt: worker.read(NAME, salt=salt) for salt in NUMBERS}


def test_c24_salts_on_disk_and_one_is_purged_after_another(folder: Path) -> None:
    there: dict[str, bytes | str] = {salt: rows_of(number) for salt, number in NUMBERS.items()}
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        for salt, number in NUMBERS.items():
            assert one.store(NAME, rows_of(number), salt=salt).stored == 1
        persist(one)
        paths = {salt: file_of(folder, one, NAME, salt) for salt in NUMBERS}
        assert sorted(paths.values()) == objects(folder), "one object each"
        assert {path.relative_to(folder).parts[0] for path in paths.values()} == {"v1"}
        check_purge(one, "", there, paths, dropped=1)
        told = json.dumps(daemon.status()) + daemon.log()
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        there = {salt: known(rows) for salt, rows in there.items()}
        # What is purged here is in the pool in part: the first half has just been read.
        for salt in list(NUMBERS)[: len(NUMBERS) // 2]:
            assert one.read(NAME, salt=salt) == there[salt]
        for number, salt in enumerate(["_default", "@", "..", SALTS["longest"]]):
            in_pool = list(NUMBERS).index(salt) < len(NUMBERS) // 2 or number > 0
            check_purge(one, salt, there, paths, dropped=int(in_pool))
        told += json.dumps(daemon.status()) + daemon.log()
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        assert read_all(one) == {salt: known(rows) for salt, rows in there.items()}
        assert purge(one, None).deleted == len(objects(folder)) + len(NUMBERS) - 5
        assert objects(folder) == []
        assert set(read_all(one).values()) == {"purged", "not_stored"}
        assert tier(daemon)["objects"] == 0
    for name in ("path", "emoji", "newline", "longest", "300 bytes"):
        assert SALTS[name] not in told, "salts may be secrets"
        assert not any(SALTS[name] in str(path) for path in folder.rglob("*"))


def known(rows: bytes | str) -> bytes | str:
    """The next server does not know why it is not there."""
    return "not_stored" if isinstance(rows, str) else rows


def check_purge(
    one: WireWorker,
    salt: str,
    there: dict[str, bytes | str],
    paths: dict[str, Path],
    dropped: int,
) -> None:
    """It is gone in memory and on disk; nothing else is."""
    nbytes = paths[salt].stat().st_size
    assert purge(one, salt) == PurgeReply(dropped=dropped, deleted=1, deleted_bytes=nbytes)
    there[salt] = "purged" if dropped else "not_stored"
    assert {other: path.exists() for other, path in paths.items()} == {
        other: there[other] == rows_of(NUMBERS[other]) for other in paths
    }
    assert read_all(one) == there
    assert purge(one, salt) == PurgeReply(dropped=0, deleted=0, deleted_bytes=0)


def test_what_waits_to_be_written_is_purged_too(folder: Path) -> None:
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        for number in range(200):
            chunk = number.to_bytes(32, "big")
            assert one.store(chunk, rows_of(number), salt="gone").stored == 1
            assert one.store(chunk, rows_of(number), salt="stays").stored == 1
        assert tier(daemon)["waiting"], "much is not written yet"
        reply = purge(one, "gone")
        assert (reply.dropped, reply.message) == (200, "")
        persist(one)
        assert len(objects(folder)) == 200
        now = tier(daemon)
        assert now["lost"]["purged"] + reply.deleted == 200
        for number in range(200):
            chunk = number.to_bytes(32, "big")
            assert one.read(chunk, salt="gone") == "purged"
            assert one.read(chunk, salt="stays") == rows_of(number)


def test_what_is_in_quarantine_is_purged_by_its_salt_too(folder: Path) -> None:
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        for salt in ("gone", "stays"):
            assert one.store(NAME, rows_of(1), salt=salt).stored == 1
        persist(one)
        paths = {salt: file_of(folder, one, NAME, salt) for salt in ("gone", "stays")}
    nbytes = {salt: path.stat().st_size - 1 for salt, path in paths.items()}
    for salt, path in paths.items():
        os.truncate(path, nbytes[salt])
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        assert [one.read(NAME, salt=salt) for salt in paths] == ["corrupt", "corrupt"]
        assert len(quarantined(folder)) == 2
        assert purge(one, "gone") == PurgeReply(dropped=0, deleted=1, deleted_bytes=nbytes["gone"])
        (left,) = quarantined(folder)
        assert left.relative_to(folder / "quarantine").parent == (
            paths["stays"].relative_to(folder).parent
        )


def test_what_was_purged_can_be_stored_again(folder: Path) -> None:
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        for number in (1, 2):
            assert one.store(NAME, rows_of(number)).stored == 1
            persist(one)
            assert one.read(NAME) == rows_of(number)
            assert purge(one, None).deleted == 1
            assert one.read(NAME) == "purged"
        assert one.store(NAME, rows_of(3)).stored == 1
        persist(one)
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        assert one.read(NAME) == rows_of(3)
