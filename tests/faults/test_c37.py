"""Case C37: a worker that dies while it stores, or is idle for longer than the grace, leaves nothing in the server.

Its third part, SIGTERM with stores in flight, is in test_stopping.py.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.testing.daemon import wait_until
from tests.faults import worker
from tests.faults.actor import Actor
from tests.faults.audit import Audit
from tests.faults.footprint import footprint, shared_memory_names
from tests.faults.paced import paced_daemon
from tests.faults.pattern import CHUNK
from tests.faults.worker import FaultWorker, WorkerState

PAUSE_S = 0.1
TOKENS = list(range(1, 4 * CHUNK + 1))


def test_c37_a_worker_is_killed_while_it_stores(tmp_path: Path) -> None:
    names_before = shared_memory_names()
    with paced_daemon(tmp_path) as (daemon, page):
        witness = FaultWorker(daemon.url, "witness")
        witness.store("w", [7, *TOKENS])
        before = footprint(daemon.pid)
        victim = Actor(worker.main, tmp_path / "worker.page", daemon.url, "victim", 5.0)
        page.pause_s = PAUSE_S
        victim.begin("store", "r", TOKENS)
        wait_until(lambda: page.copies_under_way > 0, "a copy runs")
        victim.signal(signal.SIGKILL)
        assert page.copies_under_way, "it died while it was being copied from"
        wait_until(
            lambda: daemon.status()["registered_q_ids"] == ["witness"], "it is released", 1.0
        )
        wait_until(lambda: not daemon.status()["pool"]["reserved_bytes"], "its room is free", 1.0)
        wait_until(lambda: footprint(daemon.pid) == before, "nothing of it is left", 1.0)
        victim.close()
        with Audit(daemon, witness.adapter._layout_id) as audit:
            assert set(audit.look(TOKENS).missing.values()) <= {
                MissReason.COPY_FAILED,
                MissReason.NOT_STORED,
            }
            assert audit.look(TOKENS).present == ()
        page.pause_s = 0.0
        assert witness.store("again", TOKENS).captured == 2 * len(TOKENS) + 1
        witness.capture.shutdown()
    assert shared_memory_names() == names_before


def test_c37_a_worker_is_idle_for_longer_than_the_grace(tmp_path: Path) -> None:
    """It has not stored yet, so it has not pinged; its first store is lost, counted, and brings it back."""
    with paced_daemon(tmp_path, registration_grace_s=0.3, reap_timeout_s=4.0) as (daemon, _):
        before = (
            daemon.open_files("memfd:lmcache-q-ring"),
            len(os.listdir(f"/proc/{daemon.pid}/task")),
        )
        idle = FaultWorker(daemon.url, "idle")
        wait_until(lambda: "silent for too long" in daemon.log(), "it is reaped")
        assert daemon.status()["registered_q_ids"] == []
        wait_until(lambda: "lmcache-q-ring" not in str(footprint(daemon.pid)), "its ring is gone")
        after = (
            daemon.open_files("memfd:lmcache-q-ring"),
            len(os.listdir(f"/proc/{daemon.pid}/task")),
        )
        assert after == before
        state: WorkerState = idle.store("first", TOKENS)
        assert state.lost == {"server_unavailable": len(TOKENS)}
        assert idle.come_back().healthy
        wait_until(lambda: daemon.status()["registered_q_ids"] == ["idle"], "it is back")
        captured = idle.store("second", TOKENS).captured
        assert captured == len(TOKENS)
        idle.capture.shutdown()
