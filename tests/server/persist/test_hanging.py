"""A persistent tier that does not answer: readers are answered in bounded time, and storing goes on."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmcache_qserver.testing.daemon import (
    RunningDaemon,
    environment,
    running_daemon,
    start_daemon,
    stop_daemon,
    wait_until,
)
from tests.server.persist.hanging_daemon import HANGS
from tests.server.persist.l2_folder import flush, objects, persist, tier, url_of, wait_for_index
from tests.server.wire_worker import CHUNK, WireWorker, leftovers, name_of, rows_of

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 0.5
BOUNDED_S = 4.0
"""Generous: one time-out and a slow machine."""
SLOTS = 256


def name(number: int) -> bytes:
    return name_of(tuple(range(number, number + CHUNK)))


@contextlib.contextmanager
def hanging_daemon(
    folder: Path, **settings: Any
) -> Iterator[tuple[RunningDaemon, WireWorker, Path]]:
    """Its tier hangs while the third of these exists."""
    own = folder / "daemon"
    own.mkdir(exist_ok=True)
    hangs = folder / "hangs"
    roots = os.pathsep.join([str(ROOT), environment()["PYTHONPATH"]])
    daemon = start_daemon(
        own,
        env={HANGS: str(hangs), "PYTHONPATH": roots},
        module="tests.server.persist.hanging_daemon",
        **{
            "l2": url_of(folder / "l2"),
            "chunk_size": CHUNK,
            "pool_bytes": "1MiB",
            "l2_timeout_s": TIMEOUT_S,
            **settings,
        },
    )
    try:
        with WireWorker(daemon) as worker:
            yield daemon, worker, hangs
        if daemon.process.poll() is None:
            assert stop_daemon(daemon) == 0, daemon.log()
        assert "Traceback" not in daemon.log(), daemon.log()
    finally:
        hangs.unlink(missing_ok=True)
        if daemon.process.poll() is None:
            daemon.process.kill()
            daemon.process.wait()


def timed_read(worker: WireWorker, number: int) -> bytes | str:
    began = time.monotonic()
    found = worker.read(name(number))
    assert time.monotonic() - began < BOUNDED_S
    return found


def filled(folder: Path, count: int) -> None:
    """A folder in which the first chunks lie."""
    with (
        running_daemon(l2=url_of(folder / "l2"), chunk_size=CHUNK) as daemon,
        WireWorker(daemon) as worker,
    ):
        for number in range(count):
            assert worker.store(name(number), rows_of(number)).stored == 1
        persist(worker)


def test_readers_are_answered_and_are_served_again_when_it_answers(tmp_path: Path) -> None:
    filled(tmp_path, 8)
    with hanging_daemon(tmp_path) as (daemon, worker, hangs):
        wait_for_index(daemon)
        assert worker.read(name(0)) == rows_of(0)
        hangs.touch()
        for number in range(1, 8):
            assert timed_read(worker, number) == "unavailable"
            assert timed_read(worker, 0) == rows_of(0), "the pool needs no store"
        assert tier(daemon)["state"] == "failing"
        began = time.monotonic()
        for _ in range(20):
            assert worker.read(name(1)) == "unavailable"
        assert time.monotonic() - began < BOUNDED_S, "an open breaker asks nothing"
        assert tier(daemon)["missed"]["unavailable"] >= 27
        hangs.unlink()
        wait_until(lambda: worker.read(name(1)) == rows_of(1), "it is read again")
        assert [worker.read(name(number)) for number in range(8)] == list(map(rows_of, range(8)))
        assert tier(daemon)["state"] == "ready"
        assert leftovers(daemon) == {"reserved": 0, "leased": 0, "leases": 0}


def test_storing_goes_on_far_beyond_the_pool_and_pins_are_given_back(tmp_path: Path) -> None:
    with hanging_daemon(tmp_path) as (daemon, worker, hangs):
        hangs.touch()
        for number in range(SLOTS // 2):
            assert worker.store(name(number), rows_of(number)).stored == 1
        wait_until(lambda: tier(daemon)["state"] == "failing", "the breaker is open")
        now = tier(daemon)
        assert now["pinned_bytes"] <= 5 * 4096, "only what a thread still reads"
        assert now["errors"]["unavailable"] >= 3
        began = time.monotonic()
        for number in range(SLOTS // 2, 4 * SLOTS):
            assert worker.store(name(number), rows_of(number)).stored == 1, "it must not be refused"
        assert time.monotonic() - began < 30
        now = tier(daemon)
        assert now["lost"]["evicted"] > 2 * SLOTS
        assert now["waiting"] <= SLOTS
        reply = flush(worker, 200)
        assert not reply.persisted
        assert reply.waiting == now["waiting"] + now["writing"]
        assert "failing" in reply.message
        hangs.unlink()
        wait_until(lambda: tier(daemon)["state"] == "ready", "it is written again")
        persist(worker)
        now = tier(daemon)
        assert now["written"] + now["already_there"] + now["lost"]["evicted"] == 4 * SLOTS
        assert len(objects(tmp_path / "l2")) >= now["written"]
        last = 4 * SLOTS - 1
        assert worker.read(name(last)) == rows_of(last)
        assert leftovers(daemon) == {"reserved": 0, "leased": 0, "leases": 0}


def test_what_waits_in_the_pool_is_not_evicted_before_its_turn(tmp_path: Path) -> None:
    """As long as the store is slow and does not fail: the first quarter of the pool is kept for it."""
    with hanging_daemon(tmp_path, l2_timeout_s=60) as (daemon, worker, hangs):
        hangs.touch()
        for number in range(3 * SLOTS):
            assert worker.store(name(number), rows_of(number)).stored == 1
        now = tier(daemon)
        pinned = now["pinned_bytes"] // 4096
        assert pinned == SLOTS // 4
        assert now["lost"]["evicted"] == 2 * SLOTS
        for number in range(pinned):
            assert worker.read(name(number)) == rows_of(number)
        hangs.unlink()
        persist(worker)
        assert worker.read(name(pinned)) == "evicted"
        assert tier(daemon)["written"] == SLOTS
        assert [worker.read(name(number)) for number in range(pinned)] == list(
            map(rows_of, range(pinned))
        )


def test_a_chunk_that_may_be_there_is_stored_without_its_answer(tmp_path: Path) -> None:
    filled(tmp_path, 4)
    with hanging_daemon(tmp_path) as (daemon, worker, hangs):
        wait_for_index(daemon)
        hangs.touch()
        for number in range(4):
            began = time.monotonic()
            assert worker.store(name(number), rows_of(number)).stored == 1
            assert time.monotonic() - began < BOUNDED_S
            assert worker.read(name(number)) == rows_of(number)
        hangs.unlink()
        persist(worker)
        assert tier(daemon)["already_there"] == 4


def test_it_begins_and_ends_while_the_tier_hangs(tmp_path: Path) -> None:
    (tmp_path / "hangs").touch()
    began = time.monotonic()
    with hanging_daemon(tmp_path) as (daemon, worker, _):
        assert time.monotonic() - began < 15
        assert worker.store(name(1), rows_of(1)).stored == 1
        assert worker.read(name(1)) == rows_of(1)
        assert timed_read(worker, 2) in ("unavailable", "not_stored")
        wait_until(lambda: tier(daemon)["errors"]["unavailable"], "a put has not been answered")
        began = time.monotonic()
        assert stop_daemon(daemon) == 0, daemon.log()
        assert time.monotonic() - began < 15
    assert objects(tmp_path / "l2") == []


def test_the_log_tells_what_the_end_has_left_unwritten(tmp_path: Path) -> None:
    with hanging_daemon(tmp_path, drain_timeout_s=0.2) as (daemon, worker, hangs):
        hangs.touch()
        for number in range(20):
            assert worker.store(name(number), rows_of(number)).stored == 1
        assert stop_daemon(daemon) == 0, daemon.log()
        told = re.search(r"(\d+) objects .* were not written .*; (\d+) are being", daemon.log())
        assert told is not None, daemon.log()
        assert int(told[1]) + int(told[2]) == 20
    assert objects(tmp_path / "l2") == []
