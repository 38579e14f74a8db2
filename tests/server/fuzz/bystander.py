"""The oracle of hostile runs: a client that behaves, and what the daemon may hold afterwards.

After whatever was sent by others

    the daemon lives, and its log holds no traceback
    every valid request of the bystander is answered within `ANSWER_S`, and its chunk is read as it was stored
    its descriptors and threads return to where they were
    its memory has grown by no more than a bound
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from lmcache_qserver.testing.daemon import RunningDaemon, wait_until
from tests.server.ring_writer import BLOCK_BYTES
from tests.server.wire_worker import WireWorker

ANSWER_S = 4.0
"""Far more than any request needs, and less than any time-out of the daemon's: who waits for a peer is seen."""
MIB = 1 << 20


class Bystander:
    """A worker and reader with one stored chunk, and the daemon's resources as they were when it began.

    Args:
        growth_bytes: how much more memory the daemon may hold at the end.
    """

    def __init__(self, daemon: RunningDaemon, growth_bytes: int = 32 * MIB) -> None:
        self.daemon = daemon
        self._salt = os.urandom(4).hex()
        self._name, self._rows = os.urandom(32), os.urandom(BLOCK_BYTES)
        self._worker = WireWorker(daemon, f"bystander-{self._salt}")
        self.slowest_s = 0.0
        self.check()
        daemon.status()
        self._files, self._threads = daemon.open_files(), _threads(daemon)
        self._most_bytes = daemon.resident_bytes() + growth_bytes

    def close(self) -> None:
        """Go, after a last look."""
        self.check_resources()
        with self._worker as worker:
            worker.client.ask("unregister_q_cache", worker.instance_id)

    def check(self) -> None:
        """A ping, a store and a read, in time and right; the store because others may have evicted the chunk."""
        began = time.monotonic()
        worker = self._worker
        assert worker.client.ask("noop").result == "OK"
        assert worker.client.ask("ping", worker.instance_id).result is True
        outcome = worker.store(self._name, self._rows, salt=self._salt)
        assert outcome.stored + outcome.duplicate == 1, outcome
        assert worker.read(self._name, salt=self._salt) == self._rows
        took = time.monotonic() - began
        self.slowest_s = max(self.slowest_s, took)
        assert took < ANSWER_S, f"six requests took {took:.1f} s"
        assert self.daemon.process.poll() is None

    def check_resources(self) -> None:
        """What the others have used is back; call it when they are gone."""
        self.check()
        daemon = self.daemon
        wait_until(
            lambda: daemon.open_files() <= self._files,
            f"descriptors are back at {self._files}",
            deadline_s=30,
        )
        wait_until(lambda: _threads(daemon) <= self._threads, "threads are gone", deadline_s=30)
        now = daemon.resident_bytes()
        assert now <= self._most_bytes, f"{(now - self._most_bytes) / MIB:.0f} MiB too many"
        assert "Traceback" not in daemon.log(), daemon.log()


def _threads(daemon: RunningDaemon) -> int:
    return len(list(Path(f"/proc/{daemon.pid}/task").iterdir()))
