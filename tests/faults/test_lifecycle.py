"""What the store promises about room, leases and silence, at the real daemon: that its settings reach what they set."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from lmcache_qserver.testing.daemon import wait_until
from tests.faults import reader
from tests.faults.actor import Actor
from tests.faults.audit import Audit
from tests.faults.paced import paced_daemon
from tests.faults.page import Phase
from tests.faults.pattern import CHUNK, HIDDEN, LAYERS
from tests.faults.worker import FaultWorker

CHUNK_BYTES = CHUNK * LAYERS * HIDDEN * 4
POOL_CHUNKS = 8
POOL_BYTES = POOL_CHUNKS * CHUNK_BYTES
TOKENS = list(range(1, POOL_CHUNKS * CHUNK + 1))
OTHERS = list(range(10_000, 10_000 + 2 * CHUNK))


def test_policy_none_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with paced_daemon(tmp_path, pool_bytes=POOL_BYTES, eviction="none") as (daemon, _):
        worker = FaultWorker(daemon.url, "worker")
        assert worker.store("a", TOKENS).captured == len(TOKENS)
        assert worker.store("b", OTHERS).lost == {"pool_full": len(OTHERS)}
        assert daemon.status()["pool"]["evictions"] == 0
        with Audit(daemon, worker.adapter._layout_id) as audit:
            assert audit.look(TOKENS[: 2 * CHUNK]).present == (0, 1)
        worker.capture.shutdown()


def test_by_default_the_least_recently_used_makes_room_and_no_more_than_needed(
    tmp_path: Path,
) -> None:
    with paced_daemon(tmp_path, pool_bytes=POOL_BYTES) as (daemon, _):
        worker = FaultWorker(daemon.url, "worker")
        worker.store("a", TOKENS)
        usage = daemon.status()["pool"]
        assert (usage["evictions"], usage["free_bytes"]) == (0, 0)
        assert worker.store("b", OTHERS).lost == {}
        assert daemon.status()["pool"]["evictions"] == 2
        worker.capture.shutdown()


def test_a_lease_that_nobody_releases_ends_by_its_time(tmp_path: Path) -> None:
    with paced_daemon(tmp_path, lease_timeout_s=0.5) as (daemon, _):
        worker = FaultWorker(daemon.url, "worker")
        worker.store("a", OTHERS)
        with Audit(daemon, worker.adapter._layout_id) as audit:
            began = time.monotonic()
            assert len(audit.lease(OTHERS)) == 2
            assert daemon.status()["leases"]["count"] == 1
            wait_until(lambda: not daemon.status()["leases"]["count"], "the lease is over", 5.0)
            assert time.monotonic() - began >= 0.5
            assert daemon.status()["pool"]["leased_bytes"] == 0
            assert daemon.status()["leases"]["expired"] == 1
        worker.capture.shutdown()


def test_the_leases_of_a_killed_reader_are_free_within_a_second(tmp_path: Path) -> None:
    with paced_daemon(tmp_path) as (daemon, _):
        worker = FaultWorker(daemon.url, "worker")
        worker.store("a", TOKENS)
        victim = Actor(reader.main, tmp_path / "reader.page", daemon.url, daemon.http_url, 10.0)
        victim.page.pause_s = 1.0
        victim.begin("retrieve", TOKENS)
        wait_until(lambda: victim.page.phase is Phase.COPYING, "it copies")
        assert daemon.status()["pool"]["leased_bytes"] == POOL_BYTES
        victim.signal(signal.SIGKILL)
        wait_until(lambda: not daemon.status()["pool"]["leased_bytes"], "nothing is leased", 1.0)
        victim.close()
        worker.capture.shutdown()


def test_a_silent_worker_stays_when_reaping_is_off(tmp_path: Path) -> None:
    with paced_daemon(tmp_path, reap_timeout_s=0, registration_grace_s=0.1) as (daemon, _):
        worker = FaultWorker(daemon.url, "worker")
        time.sleep(0.5)
        assert daemon.status()["registered_q_ids"] == ["worker"]
        worker.capture.shutdown()
