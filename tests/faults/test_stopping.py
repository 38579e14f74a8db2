"""SIGTERM while stores are under way: they have their deadline, and a second SIGTERM ends all waiting."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_qprotocol.reasons import LossReason
from lmcache_qserver.testing.daemon import RunningDaemon, wait_until
from tests.faults.paced import paced_daemon
from tests.faults.page import Page
from tests.faults.pattern import CHUNK
from tests.faults.worker import FaultWorker

HANGS_S = 60.0
"""Longer than any wait of these tests."""
AT_ONCE_S = 3.0
"""Includes ending the process, and a second for answers that nobody reads."""
TOKENS = list(range(1, 3 * CHUNK + 1))


@pytest.fixture
def workers() -> Iterator[list[FaultWorker]]:
    """Closed at the end; the server is gone by then."""
    opened: list[FaultWorker] = []
    yield opened
    for worker in opened:
        worker.capture.shutdown()


def store_under_way(daemon: RunningDaemon, page: Page, workers: list[FaultWorker]) -> FaultWorker:
    """A worker whose store is being copied."""
    worker = FaultWorker(daemon.url, "worker")
    workers.append(worker)
    worker.submit("r", TOKENS)
    wait_until(lambda: page.copies_under_way > 0, "a copy runs")
    return worker


def test_c37_sigterm_lets_stores_under_way_end(tmp_path: Path, workers: list[FaultWorker]) -> None:
    names_before = set(os.listdir("/dev/shm"))
    with paced_daemon(tmp_path, pause_s=0.2, drain_timeout_s=30.0) as (daemon, page):
        worker = store_under_way(daemon, page, workers)
        daemon.process.terminate()
        worker.settle("r")
        assert (worker.account.captured, worker.account.lost.total()) == (len(TOKENS), 0)
        assert daemon.process.wait(20) == 0
        assert "Traceback" not in daemon.log()
        assert "stopping before" not in daemon.log()
        assert sorted(os.listdir(tmp_path)) == ["daemon.log", "server.page"]
    assert {
        name for name in set(os.listdir("/dev/shm")) - names_before if "lmcache" in name
    } == set()


def test_what_comes_after_sigterm_is_refused_and_counted(
    tmp_path: Path, workers: list[FaultWorker]
) -> None:
    with paced_daemon(tmp_path, pause_s=0.3, drain_timeout_s=30.0) as (daemon, page):
        worker = store_under_way(daemon, page, workers)
        daemon.process.terminate()
        wait_until(lambda: "stopping; stores" in daemon.log(), "the signal has been seen")
        worker.submit("late", [9999, *TOKENS])
        worker.settle("late")
        worker.settle("r")
        lost = {reason.value: tokens for reason, tokens in worker.account.lost.items() if tokens}
        assert lost == {"server_unavailable": len(TOKENS) + 1}
        assert worker.account.captured == len(TOKENS)
        assert daemon.process.wait(20) == 0


def test_a_store_that_hangs_has_until_the_deadline(
    tmp_path: Path, workers: list[FaultWorker]
) -> None:
    with paced_daemon(tmp_path, pause_s=HANGS_S, drain_timeout_s=0.5) as (daemon, page):
        worker = store_under_way(daemon, page, workers)
        began = time.monotonic()
        daemon.process.terminate()
        assert daemon.process.wait(20) == 0
        took_s = time.monotonic() - began
        assert 0.5 <= took_s < 0.5 + AT_ONCE_S
        assert "stopping before all stores have ended" in daemon.log()
        assert "Traceback" not in daemon.log()
        worker.settle("r")
        assert worker.account.lost[LossReason.SERVER_UNAVAILABLE] == len(TOKENS)
        assert worker.account.pending == 0


def test_a_second_sigterm_stops_at_once_even_while_a_store_hangs_in_its_lane(
    tmp_path: Path, workers: list[FaultWorker]
) -> None:
    with paced_daemon(tmp_path, pause_s=HANGS_S, drain_timeout_s=HANGS_S) as (daemon, page):
        store_under_way(daemon, page, workers)
        daemon.process.terminate()
        wait_until(lambda: "stopping; stores" in daemon.log(), "the first signal has been seen")
        with pytest.raises(Exception, match="timed out"):
            daemon.process.wait(0.3)
        began = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(20) == 0
        assert time.monotonic() - began < AT_ONCE_S
        assert "Traceback" not in daemon.log()
