"""The oracle of hostile runs: a client that behaves, and what the daemon may hold afterwards.

After whatever was sent by others

    the daemon lives, and its log holds no traceback
    every valid request of the bystander is answered within `ANSWER_S`, with a result or the expected error
    its descriptors and threads return to where they were
    its memory has grown by no more than a bound
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from lmcache_qprotocol.keys import KeyFamily, kv_rank
from lmcache_qprotocol.layout import layout_id
from lmcache_qprotocol.messages import ChunkQuery, RangeKey, StoreProof
from lmcache_qserver.testing.bare_client import (
    SMALL_LAYOUT,
    BareClient,
    BareLifeline,
    register_small_ring,
    small_ring,
)
from lmcache_qserver.testing.daemon import RunningDaemon, wait_until
from tests.server.fuzz.ring_writer import RingWriter

ANSWER_S = 2.0
"""Far more than any request needs, and less than any time-out of the daemon's: who waits for a peer is seen."""
MIB = 1 << 20


class Bystander:
    """A worker and reader with one stored chunk, and the daemon's resources as they were when it began.

    Args:
        growth_bytes: how much more memory the daemon may hold at the end.
    """

    def __init__(self, daemon: RunningDaemon, growth_bytes: int = 32 * MIB) -> None:
        self.daemon = daemon
        self.client = BareClient(daemon.url)
        self.lifeline = BareLifeline(daemon.lifeline)
        _, self._pool_fd = self.lifeline.attach(self.client.hello().session)
        self._ring = RingWriter(small_ring())
        self._name = f"bystander-{os.urandom(4).hex()}"
        register_small_ring(self.client, self.lifeline, self._name, 16, ring=self._ring.ring)
        self.hashes = (os.urandom(32),)
        self.family = KeyFamily(
            model_name="test/model##query",
            world_size=1,
            kv_rank=kv_rank(1, 0),
            cache_salt=self._name,
            layout_id=layout_id(SMALL_LAYOUT),
        )
        self.slowest_s = 0.0
        self.check()
        daemon.status()
        self._files, self._threads = daemon.open_files(), _threads(daemon)
        self._most_bytes = daemon.resident_bytes() + growth_bytes

    def close(self) -> None:
        """Go, after a last look."""
        self.check_resources()
        self.client.ask("unregister_q_cache", self._name)
        self.lifeline.socket.close()
        self.client.socket.close()
        self._ring.close(self._pool_fd)

    def check(self) -> None:
        """One valid request of every kind, answered in time."""
        began = time.monotonic()
        key = RangeKey(
            model_name=self.family.model_name,
            world_size=1,
            worker_id=0,
            end=16,
            cache_salt=self._name,
            chunk_hashes=self.hashes,
            layout_id=self.family.layout_id,
        )
        nonce = self._ring.write(block=0, start=0)
        ask = self.client.ask
        assert ask("noop").result == "OK"
        assert ask("ping", self._name).result is True
        result = ask(
            "store_q", key, self._name, ((0,),), b"", StoreProof(nonces=(nonce,))
        ).result
        assert result.ok, result
        query = ChunkQuery(family=self.family, chunk_hashes=self.hashes)
        assert ask("lookup_q", query).result.prefix == 1
        lease = ask("retrieve_q", query).result
        assert len(lease.chunks) == 1
        ask("release_q", (lease.lease_id,))
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
            deadline_s=10,
        )
        wait_until(lambda: _threads(daemon) <= self._threads, "threads are gone", deadline_s=10)
        now = daemon.resident_bytes()
        assert now <= self._most_bytes, f"{(now - self._most_bytes) / MIB:.0f} MiB too many"
        assert "Traceback" not in daemon.log(), daemon.log()


def _threads(daemon: RunningDaemon) -> int:
    return len(list(Path(f"/proc/{daemon.pid}/task").iterdir()))
