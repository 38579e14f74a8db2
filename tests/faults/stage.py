"""One server, and who works with it; they stay from run to run, as far as they survive.

    worker, reader     processes, to be hit
    witness            a worker in this process: writes the same prompts beside the worker; shows that the server works
    audit              a reader in this process: looks at every object

Checks after every run, in `Stage.check`: see docs/faults.md.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.testing.daemon import (
    RunningDaemon,
    stop_daemon,
    wait_until,
)
from tests.faults import reader, worker
from tests.faults.actor import Actor
from tests.faults.audit import Audit, Presence
from tests.faults.footprint import Footprint, footprint, shared_memory_names
from tests.faults.paced import start_paced_daemon
from tests.faults.page import Page
from tests.faults.pattern import CHUNK

POOL_BYTES = 16 << 20
RELEASE_S = 1.0
"""The announced bound: a dead client's instance and leases are gone."""
TRIES = 5
CLEAN_S = 10.0
"""For everything else to be at rest: what is left then is left for ever."""
REMEMBERED = 24
"""Sequences that the driver reads again; more than the pool holds, so that some have been evicted."""
RECENT = 8
"""So many of the last prompts are read: earlier ones may have been evicted, which leaves nothing to read."""
GONE = frozenset({MissReason.NOT_STORED, MissReason.EVICTED, MissReason.COPY_FAILED})


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long everybody waits for everybody, seconds."""

    reap_timeout_s: float = 120.0
    lease_timeout_s: float = 60.0
    reply_timeout_s: float = 5.0


class Stage:
    """See the head of this file.

    Args:
        folder: for sockets, logs and pages.
    """

    def __init__(self, folder: Path, patience: Patience = Patience()) -> None:
        self.patience = patience
        self.folder = folder
        self.server_page = Page(folder / "server.page")
        self._names_before = shared_memory_names()
        self._first_token = 1
        self._requests = 0
        self.known: deque[list[int]] = deque(maxlen=REMEMBERED)
        """Prompts of which something may be stored, by this server."""
        self.readable: deque[list[int]] = deque(maxlen=RECENT)
        """Prompts of which something was."""
        self.daemon: RunningDaemon
        self.worker: Actor | None = None
        self.reader: Actor | None = None
        self.worker_id = "worker-0"
        self.boots = 0

    def open(self) -> None:
        """Start the server, and let everybody come; then `close`, or `abandon` if something fails on the way."""
        self.daemon = self._start_daemon()
        self.witness = worker.FaultWorker(self.daemon.url, "witness", self.patience.reply_timeout_s)
        self.witness.store("first", self.new_tokens(2 * CHUNK))
        self.audit = self._open_audit()
        self._alone = self._measure()
        self.raise_worker()
        self._with_worker = self._measure()
        self.raise_reader()
        self._with_both = self._measure()

    def abandon(self) -> None:
        """Kill what still runs. Idempotent."""
        for actor in (self.worker, self.reader):
            if actor is not None and actor.process.exitcode is None:
                actor.process.kill()
                actor.process.join()
        if self.boots and self.daemon.process.poll() is None:
            self.daemon.process.kill()
            self.daemon.process.wait()

    # --- who is there -------------------------------------------------------------------------------------------

    def _start_daemon(self, **addresses: Any) -> RunningDaemon:
        self.server_page.clear()
        self.boots += 1
        patience = self.patience
        (self.folder / "ready.json").unlink(missing_ok=True)
        return start_paced_daemon(
            self.folder,
            pool_bytes=POOL_BYTES,
            reap_timeout_s=patience.reap_timeout_s,
            registration_grace_s=10 * patience.reap_timeout_s,
            lease_timeout_s=patience.lease_timeout_s,
            **addresses,
        )

    def _open_audit(self) -> Audit:
        return Audit(self.daemon, self.witness.adapter._layout_id)

    def _measure(self) -> Footprint:
        """What the server holds when nothing happens."""
        last = footprint(self.daemon.pid)

        def settled() -> bool:
            nonlocal last
            before, last = last, footprint(self.daemon.pid)
            return before == last

        time.sleep(0.1)  # connections that have just been closed
        wait_until(settled, "the server is at rest")
        return last

    def raise_worker(self, same_id: bool = True) -> None:
        """A new worker process, if there is none."""
        if self.worker is None:
            if not same_id:
                self.worker_id = f"worker-{self._requests}"
            self.worker = Actor(
                worker.main,
                self.folder / "worker.page",
                self.daemon.url,
                self.worker_id,
                self.patience.reply_timeout_s,
            )

    def raise_reader(self) -> None:
        """A new reader process, if there is none."""
        if self.reader is None:
            self.reader = Actor(
                reader.main,
                self.folder / "reader.page",
                self.daemon.url,
                self.daemon.http_url,
                2 * self.patience.reply_timeout_s,
            )

    def bury_worker(self) -> None:
        """The worker is dead."""
        assert self.worker is not None
        self.worker.close()
        self.worker = None

    def bury_reader(self) -> None:
        """The reader is dead."""
        assert self.reader is not None
        self.reader.close()
        self.reader = None

    def restart_server(self) -> None:
        """The server is dead: another one at the same addresses."""
        former = self.daemon
        port = int(former.http_url.rpartition(":")[2])
        self.audit.close()
        self.known.clear()
        self.readable.clear()
        self.daemon = self._start_daemon(url=former.url, http_port=port)
        assert self.daemon.boot_id != former.boot_id
        self.audit = self._open_audit()

    def close(self) -> None:
        """Everybody leaves; the server ends well, and nothing has a name in /dev/shm."""
        for actor in (self.worker, self.reader):
            if actor is not None:
                actor.close()
        self.worker = self.reader = None
        self.audit.close()
        self.witness.capture.shutdown()
        assert stop_daemon(self.daemon) == 0, self.daemon.log()
        assert "Traceback" not in self.daemon.log(), self.daemon.log()
        assert shared_memory_names() <= self._names_before

    # --- prompts ------------------------------------------------------------------------------------------------

    def new_tokens(self, count: int) -> list[int]:
        """Tokens that no prompt had before."""
        first, self._first_token = self._first_token, self._first_token + count
        return list(range(first, first + count))

    def new_request_id(self) -> str:
        """Another one."""
        self._requests += 1
        return f"r{self._requests}"

    def remember(self, tokens: list[int], is_there: bool = True) -> None:
        """Something of a prompt may be stored; if it is known to be there, it is worth reading."""
        self.known.append(tokens)
        if is_there:
            self.readable.append(tokens)

    # --- checks -------------------------------------------------------------------------------------------------

    def wait_until_gone(self, instance_id: str) -> float:
        """A client has been killed; seconds until its instance is released, or nobody holds a lease any more.

        Args:
            instance_id: empty for a reader, the only one that leases just then.

        Raises:
            AssertionError: it takes longer than announced.
        """
        began = time.monotonic()

        def is_gone() -> bool:
            status = self.daemon.status()
            if instance_id:
                return instance_id not in status["registered_q_ids"]
            return not status["leases"]["count"]

        wait_until(is_gone, "the dead client is gone", RELEASE_S)
        return time.monotonic() - began

    def wait_until_clean(self) -> None:
        """Nothing that is not in use is left in the server.

        Raises:
            AssertionError: something is, after the deadline.
        """
        left = "nothing was looked at"

        def is_clean() -> bool:
            nonlocal left
            left = self._what_is_left()
            return not left

        try:
            wait_until(is_clean, "nothing of the dead is left", CLEAN_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {left}\n{self.daemon.log()[-4000:]}") from None

    def _what_is_left(self) -> str:
        """What is not as it must be when nothing is under way; empty when all is."""
        status = self.daemon.status()
        pool, ids = status["pool"], ["witness"] + [self.worker_id] * (self.worker is not None)
        counted = sum(
            pool[f"{state}_bytes"] for state in ("free", "reserved", "committed", "leased")
        )
        assert counted == pool["capacity_bytes"], f"the pool's account is wrong: {pool}"
        stored = sum(model["bytes"] for model in status["models"])
        kept = pool["committed_bytes"] + pool["leased_bytes"] + pool["reserved_bytes"]
        problems = {
            "instances": None if sorted(status["registered_q_ids"]) == sorted(ids) else status,
            "reserved": pool["reserved_bytes"],
            "leased": pool["leased_bytes"] or status["leases"]["count"],
            "lanes": sum(status["lanes"].values()),
            "bytes beyond objects": kept - pool["padding_bytes"] - stored,
            "system": self._unlike_the_baseline(),
        }
        return ", ".join(f"{name}: {what}" for name, what in problems.items() if what)

    def _unlike_the_baseline(self) -> str:
        expected = self._alone
        files, memory, threads = expected.files.copy(), expected.memory.copy(), expected.threads
        for is_there, share in (
            (self.worker, self._with_worker - self._alone),
            (self.reader, self._with_both - self._with_worker),
        ):
            if is_there is not None:
                files, memory = files + share.files, memory + share.memory
                threads += share.threads
        now = footprint(self.daemon.pid)
        if now == Footprint(files, threads, memory):
            return ""
        return f"expected {Footprint(files, threads, memory)}, found {now}"

    def look(self, tokens: Sequence[int]) -> Presence:
        """Every object of a prompt is right or absent, and absent for a reason that can be."""
        presence = self.audit.look(tokens)
        assert set(presence.missing.values()) <= {*GONE, MissReason.TOO_SHORT}, presence
        return presence

    def check_everything(self) -> None:
        """All that any run may have stored is right or absent, and the server has nothing besides."""
        found = sum(len(self.look(tokens).present) for tokens in self.known)
        status = self.daemon.status()
        assert found <= sum(model["chunks"] + model["pieces"] for model in status["models"])

    def check_service(self) -> None:
        """The server stores, and hands out what it stored.

        Where time-outs are short, a busy machine may let the server take the witness for dead: it comes back, and what
        it has lost is counted.
        """
        for _ in range(TRIES):
            tokens = self.new_tokens(CHUNK + 5)
            before = self.witness.come_back()
            assert before.healthy, before
            after = self.witness.store(self.new_request_id(), tokens)
            if after.captured - before.captured == len(tokens):
                assert not self.look(tokens).missing
                return
            assert set(after.lost) <= {"server_unavailable"}, after
        raise AssertionError(f"nothing was stored in {TRIES} tries: {after}")
