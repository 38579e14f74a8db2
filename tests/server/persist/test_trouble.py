"""Disks that are full, read-only, missing, another's, or taken away while the server serves."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_qclient.qcache import connect
from lmcache_qserver.testing.daemon import command, environment, running_daemon, wait_until
from tests.server.persist.l2_folder import (
    file_of,
    flush,
    left_behind,
    objects,
    persist,
    quarantined,
    tier,
    url_of,
    wait_for_index,
)
from tests.server.wire_worker import CHUNK, WireWorker, name_of, rows_of
from tests.worker_client.qcache.engine import Engine, layout_of
from tests.worker_client.qcache.test_retrieve import bits

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="file systems are mounted, and folders given away, by root only"
)


def name(number: int) -> bytes:
    return name_of(tuple(range(number, number + CHUNK)))


def mount(*arguments: str | Path) -> None:
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    at = tmp_path / "disk"
    at.mkdir()
    mount("-t", "tmpfs", "-o", "size=1m,mode=0755", "l2-test", at)
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


@needs_root
def test_c34_twelve_objects_onto_a_disk_of_1_mib(disk: Path) -> None:
    layout = layout_of(num_heads=16, total_heads=16, head_dim=128)
    tokens = tuple(range(12 * CHUNK))
    with running_daemon(l2=url_of(disk / "l2"), chunk_size=CHUNK) as daemon:
        engine = Engine(daemon.url, layout)
        with WireWorker(daemon, register=False) as one:
            engine.store_all(tokens)
            wait_until(lambda: tier(daemon)["state"] == "failing", "the disk is full")
            now = tier(daemon)
            assert now["errors"]["full"] >= 3
            assert now["errors"]["unavailable"] == now["errors"]["failed"] == 0
            assert 0 < now["written"] < 6, "196 KiB each, on 1 MiB"
            assert now["written"] == len(objects(disk / "l2"))
            assert now["waiting"] + now["writing"] == 12 - now["written"]
            assert left_behind(disk / "l2") == [], "a failed write leaves nothing"
            assert not flush(one, 100).persisted
            assert sum(daemon.status()["l2"]["lost"].values()) == 0
            with connect(daemon.url, daemon.http_url, "org/model") as context:
                result = context.retrieve(tokens)
            assert result.num_tokens == len(tokens), "all of it is served from memory"
            want = engine.values(tokens).reshape(3, len(tokens), 16, 128)
            assert np.array_equal(bits(result.tensor, "bfloat16"), want)
            mount("-o", "remount,size=8m", disk)
            wait_until(lambda: flush(one, 1000).persisted, "the rest is written")
            assert tier(daemon)["written"] == len(objects(disk / "l2")) == 12
            assert tier(daemon)["state"] == "ready"
        engine.close()
    with (
        running_daemon(l2=url_of(disk / "l2"), chunk_size=CHUNK) as daemon,
        connect(daemon.url, daemon.http_url, "org/model") as context,
    ):
        assert np.array_equal(bits(context.retrieve(tokens).tensor, "bfloat16"), want)


@needs_root
def test_a_disk_that_becomes_read_only(disk: Path) -> None:
    folder = disk / "l2"
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        for number in range(5):
            assert one.store(name(number), rows_of(number)).stored == 1
        persist(one)
        path = file_of(folder, one, name(0))
        for broken in range(4):
            os.truncate(file_of(folder, one, name(broken)), 5000)
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        wait_for_index(daemon)
        mount("-o", "remount,ro", disk)
        for number in range(4):
            assert one.read(name(number)) == "corrupt"
        assert path.exists(), "nothing can be put aside"
        assert tier(daemon)["quarantined"] == 0
        assert one.read(name(4)) == rows_of(4), "and reading is no less possible for that"
        for number in range(10, 14):
            assert one.store(name(number), rows_of(number)).stored == 1
        wait_until(lambda: tier(daemon)["state"] == "failing", "it can't be written")
        assert tier(daemon)["errors"]["refused"] >= 3
        assert one.read(name(10)) == rows_of(10)
        mount("-o", "remount,rw", disk)
        wait_until(lambda: flush(one, 1000).persisted, "it is written")
        assert one.read(name(0)) == "corrupt"
        assert len(quarantined(folder)) == 1


@needs_root
def test_a_server_refuses_to_start_on_a_read_only_disk(disk: Path) -> None:
    (disk / "l2").mkdir(mode=0o700)
    mount("-o", "remount,ro", disk)
    assert "Read-only file system" in why_it_does_not_start(url_of(disk / "l2"), disk.parent)


def why_it_does_not_start(url: str, folder: Path) -> str:
    """One line."""
    settings: dict[str, Any] = {
        "url": "tcp://127.0.0.1:0",
        "http_port": 0,
        "pool_bytes": "1MiB",
        "l2": url,
    }
    done = subprocess.run(
        command(**settings, lifeline=folder / "lifeline.sock"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr
    passed_over = (" INFO ", "Usage: ", "Try '")
    lines: list[str] = [
        line
        for line in done.stderr.splitlines()
        if line and not any(part in line for part in passed_over)
    ]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://somewhere/else", "ftp"),
        ("file://relative", "not of the form file:///path"),
        ("/a/path", "a store is file"),
        ("s3://", "names no bucket"),
    ],
)
def test_a_url_that_makes_no_sense(tmp_path: Path, url: str, why: str) -> None:
    assert why in why_it_does_not_start(url, tmp_path).lower()


def test_a_missing_parent_is_not_made(tmp_path: Path) -> None:
    told = why_it_does_not_start(url_of(tmp_path / "mount/l2"), tmp_path)
    assert f"{tmp_path}/mount does not exist" in told
    assert not (tmp_path / "mount").exists()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "l2").write_text("a file")
    assert "Not a directory" in why_it_does_not_start(url_of(tmp_path / "l2"), tmp_path)


def test_a_folder_that_others_may_write(tmp_path: Path) -> None:
    (tmp_path / "l2").mkdir()
    (tmp_path / "l2").chmod(0o777)
    assert "can be written by others" in why_it_does_not_start(url_of(tmp_path / "l2"), tmp_path)


@needs_root
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "l2").mkdir(mode=0o700)
    os.chown(tmp_path / "l2", 65534, 65534)
    assert "belongs to user 65534" in why_it_does_not_start(url_of(tmp_path / "l2"), tmp_path)


def test_a_folder_that_is_renamed_stays_the_one_that_is_written(tmp_path: Path) -> None:
    """Another of the same name (the mount point, when the disk is gone) gets nothing."""
    folder, away = tmp_path / "l2", tmp_path / "away"
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        assert one.store(name(1), rows_of(1)).stored == 1
        persist(one)
        folder.rename(away)
        folder.mkdir(mode=0o700)
        assert one.store(name(2), rows_of(2)).stored == 1
        persist(one)
        assert (len(objects(away)), list(folder.iterdir())) == (2, [])
        folder.rmdir()
        away.rename(folder)
        assert one.store(name(3), rows_of(3)).stored == 1
        persist(one)
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        assert [one.read(name(number)) for number in (1, 2, 3)] == list(map(rows_of, (1, 2, 3)))


def test_contents_that_are_taken_away_and_put_back(tmp_path: Path) -> None:
    folder, aside = tmp_path / "l2", tmp_path / "aside"
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        assert one.store(name(1), rows_of(1)).stored == 1
        persist(one)
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        wait_for_index(daemon)
        with taken_away(folder, aside):
            assert one.read(name(1)) == "not_stored"
            for number in range(2, 6):
                assert one.store(name(number), rows_of(number)).stored == 1
            wait_until(lambda: tier(daemon)["state"] == "failing", "nothing can be written")
            assert tier(daemon)["errors"]["unavailable"] >= 3
            assert one.read(name(2)) == rows_of(2)
            assert list(folder.iterdir()) == [], "an emptied folder is not filled again"
        wait_until(lambda: flush(one, 1000).persisted, "it is written")
        assert one.read(name(1)) == rows_of(1)
        assert len(objects(folder)) == 5


@contextlib.contextmanager
def taken_away(folder: Path, aside: Path) -> Iterator[None]:
    aside.mkdir()
    for item in list(folder.iterdir()):
        item.rename(aside / item.name)
    yield
    for item in list(aside.iterdir()):
        item.rename(folder / item.name)
