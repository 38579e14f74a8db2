"""A server is killed in the middle of writing, and another begins on the same folder."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lmcache_qserver.testing.daemon import running_daemon
from tests.server.persist.l2_folder import (
    flush,
    left_behind,
    objects,
    persist,
    persisted,
    quarantined,
    tier,
    url_of,
    wait_for_index,
)
from tests.server.wire_worker import CHUNK, WireWorker, name_of, rows_of

CHUNKS = 1000
ASKED = 50
"""Chunks per question whether they are persisted."""


def name(number: int) -> bytes:
    return name_of(tuple(range(number, number + CHUNK)))


def store_until_killed(folder: Path, seed: int, first_kill: int) -> tuple[int, set[int]]:
    """Store chunks, ask now and then, and kill the server while it writes.

    Args:
        first_kill: chunks that are stored at least.

    Returns:
        How many chunks were stored, and which of them were said to be persisted.
    """
    rng = random.Random(seed)
    acknowledged: set[int] = set()
    with (
        running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon,
        WireWorker(daemon) as worker,
    ):
        for number in range(CHUNKS):
            assert worker.store(name(number), rows_of(number)).stored == 1
            if rng.random() < 0.02:
                some = rng.sample(range(number + 1), min(ASKED, number + 1))
                answers = persisted(worker, *map(name, some))
                acknowledged |= {one for one, yes in zip(some, answers, strict=True) if yes}
            if rng.random() < 0.004 and flush(worker).persisted:
                acknowledged |= set(range(number + 1))
            if number >= first_kill and tier(daemon)["writing"]:
                answers = persisted(worker, *map(name, range(number + 1)))
                daemon.process.kill()
                daemon.process.wait()
                acknowledged |= {one for one, yes in enumerate(answers) if yes}
                return number + 1, acknowledged
    raise AssertionError("the server was never seen writing")


def check_the_next(folder: Path, stored: int, acknowledged: set[int]) -> None:
    """What another server has of it, and a third one, which nobody has read from, stores again."""
    (folder / ".tmp/1-0123456789abcdef").write_bytes(b"of one more that was killed")
    with (
        running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon,
        WireWorker(daemon) as worker,
    ):
        assert left_behind(folder) == []
        found = {number: worker.read(name(number)) for number in range(CHUNKS)}
        there = {number for number, rows in found.items() if rows == rows_of(number)}
        others = {rows for number, rows in found.items() if number not in there}
        assert others <= {"not_stored"}
        assert acknowledged <= there
        assert there <= set(range(stored))
        assert quarantined(folder) == []
        assert not any(tier(daemon)["missed"].values())
    files = {path: path.stat().st_mtime_ns for path in objects(folder)}
    assert len(files) == len(there)
    with (
        running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon,
        WireWorker(daemon) as worker,
    ):
        assert wait_for_index(daemon)["objects"] == len(files)
        check_storing_again(worker, there, stored)
        now = tier(daemon)
        assert (now["submitted"], now["already_there"]) == (stored - len(there), 0)
        assert {path: path.stat().st_mtime_ns for path in files} == files
        assert len(objects(folder)) == stored


def check_storing_again(worker: WireWorker, there: set[int], stored: int) -> None:
    """What is persisted is a duplicate, the rest is stored."""
    for number in range(stored):
        outcome = worker.store(name(number), rows_of(number))
        assert (outcome.stored, outcome.duplicate) == (number not in there, number in there)
    persist(worker)


@pytest.mark.parametrize("first_kill", [pytest.param(120, marks=pytest.mark.faults), 900])
def test_a_server_killed_while_it_writes(tmp_path: Path, first_kill: int) -> None:
    stored, acknowledged = store_until_killed(tmp_path / "l2", first_kill, first_kill)
    print(f"killed after {stored} chunks, {len(acknowledged)} of them acknowledged as persisted")
    check_the_next(tmp_path / "l2", stored, acknowledged)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(10, 20))
def test_a_server_killed_at_many_moments(tmp_path: Path, seed: int) -> None:
    first_kill = random.Random(seed).randrange(CHUNKS - 50)
    stored, acknowledged = store_until_killed(tmp_path / "l2", seed, first_kill)
    check_the_next(tmp_path / "l2", stored, acknowledged)


@pytest.mark.faults
def test_several_kills_in_a_row(tmp_path: Path) -> None:
    """Each server goes on where the one before was killed."""
    acknowledged: set[int] = set()
    most = 0
    for seed in range(3):
        with (
            running_daemon(l2=url_of(tmp_path / "l2"), chunk_size=CHUNK) as daemon,
            WireWorker(daemon) as worker,
        ):
            assert left_behind(tmp_path / "l2") == []
            rng = random.Random(seed)
            for number in range(most, most + rng.randrange(20, 60)):
                assert worker.store(name(number), rows_of(number)).stored == 1
                most = number + 1
            if seed % 2:
                persist(worker)
                acknowledged |= set(range(most - 20, most))
            assert worker.store(name(most), rows_of(most)).stored == 1
            most += 1
            daemon.process.kill()
            daemon.process.wait()
    check_the_next_has(tmp_path / "l2", most, acknowledged)


def check_the_next_has(folder: Path, stored: int, acknowledged: set[int]) -> None:
    with (
        running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon,
        WireWorker(daemon) as worker,
    ):
        for number in range(stored):
            found = worker.read(name(number))
            allowed = (
                {rows_of(number)} if number in acknowledged else {rows_of(number), "not_stored"}
            )
            assert found in allowed


def test_a_chunk_stored_again_before_it_is_indexed_is_not_written_again(tmp_path: Path) -> None:
    with (
        running_daemon(l2=url_of(tmp_path / "l2"), chunk_size=CHUNK) as daemon,
        WireWorker(daemon) as worker,
    ):
        assert worker.store(name(1), rows_of(1)).stored == 1
        assert worker.store(name(1), rows_of(2)).duplicate == 1
        persist(worker)
        (path,) = objects(tmp_path / "l2")
        before = path.stat()
    with (
        running_daemon(l2=url_of(tmp_path / "l2"), chunk_size=CHUNK) as daemon,
        WireWorker(daemon) as worker,
    ):
        outcome = worker.store(name(1), rows_of(1))
        assert outcome.stored + outcome.duplicate == 1
        persist(worker)
        now = tier(daemon)
        assert (now["written"], now["already_there"]) == (0, outcome.stored)
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert worker.read(name(1)) == rows_of(1)
