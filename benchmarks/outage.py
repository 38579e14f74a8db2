"""outage: tokens per second of a capturing engine while its server is gone, divided by those before and after.

One engine computes batch after batch. In the first batch of every outage, while it computes, the server is killed
(SIGKILL), or stopped (SIGSTOP: it hangs, its sockets stay open). Some more batches follow; then the server is started
again at the same address, or continued, and short batches go on until something is captured again. Then the next cycle.

Batch i of an outage is compared with the mean of batches i of the phase before and of the phase after, so that a steady
drift of the machine cancels out. The batch in which the server goes is the first of the outage.

Every token of all batches must be in the worker's account in the end, as captured or as lost under a reason.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cores import pinned, server_core
from benchmarks.engine_handle import Batch, EngineHandle, running_engine
from benchmarks.load import MIXED, Load, fitted
from benchmarks.samples import bootstrap_interval, speed_ratio
from lmcache_qserver.testing.daemon import RunningDaemon, start_daemon, stop_daemon

POOL = 256 << 20
HEARTBEAT_S = 1.0
"""A server that hangs is noticed by a ping without an answer: one interval and 5 s later."""
BATCHES = 5
"""Of a phase in which the server is there, and of an outage by SIGKILL."""
HANG_BATCHES = 9
"""Of an outage by SIGSTOP: some before it has been noticed, some after."""
GOES_AFTER = 0.3
"""Of a batch's time: then the server goes."""
SHORT = Load(prompts=1, prompt_tokens=40, new_tokens=2)
RESUME_S = 60.0


class Server:
    """A daemon that comes back at its address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starts = 0
        self.daemon = self._start("tcp://127.0.0.1:0", 0)

    def _start(self, url: str, http_port: int) -> RunningDaemon:
        self._starts += 1
        # A killed daemon's ready file stays behind, so each has its own.
        ready = self._folder / f"ready-{self._starts}.json"
        with pinned(server_core()):
            return start_daemon(
                self._folder, url=url, http_port=http_port, pool_bytes=POOL, ready_file=ready
            )

    def kill(self) -> None:
        """SIGKILL."""
        self.daemon.process.kill()
        self.daemon.process.wait()

    def restart(self) -> None:
        """Start a new process at the old address; returns when it is ready."""
        self.daemon = self._start(self.daemon.url, int(self.daemon.http_url.rpartition(":")[2]))

    def hang(self) -> None:
        """SIGSTOP."""
        self.daemon.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self.daemon.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def restartable_server() -> Iterator[Server]:
    """A server that is stopped in the end, whatever has been done to it."""
    with tempfile.TemporaryDirectory(prefix="qserver-") as folder:
        server = Server(Path(folder))
        try:
            yield server
        finally:
            if server.daemon.process.poll() is None:
                server.go_on()
                stop_daemon(server.daemon)


@dataclass
class Phases:
    """What has been seen.

    Attributes:
        up: the batches of each phase with a server; one phase more than `down`.
        down: of each outage.
        resumed: seconds after each outage until something was captured again.
        lost: tokens by reason, from the begin of each outage until then; those of stores under way at the begin, too.
        computed: tokens, from the begin of each outage until then.
    """

    up: list[list[Batch]] = field(default_factory=list)
    down: list[list[Batch]] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    computed: int = 0

    def pairs(self, seconds: Callable[[Batch], float]) -> list[list[tuple[float, float]]]:
        """(outage, mean of before and after) of each batch of each outage."""
        found = []
        for index, down in enumerate(self.down):
            around = zip(self.up[index], self.up[index + 1], strict=True)
            up = [(seconds(before) + seconds(after)) / 2 for before, after in around]
            found.append([(seconds(one), up[place % len(up)]) for place, one in enumerate(down)])
        return found


class Run:
    """An engine under load while its server comes and goes."""

    def __init__(self, engine: EngineHandle, server: Server, *, hang: bool) -> None:
        self.engine = engine
        self.server = server
        self.hang = hang
        self.phases = Phases()
        self.load = MIXED
        self._seed = 0

    def run(self, cycles: int) -> None:
        """All phases."""
        self._batch(self.load)
        self.load = fitted(self.load, lambda load: self._batch(load).seconds)
        self._batch(self.load)
        self.phases.up.append(self._batches(BATCHES))
        for _ in range(cycles):
            lost, computed = Counter(self.engine.account["lost"]), self.engine.computed
            self.phases.down.append(self._outage())
            self.phases.resumed.append(self._recovery())
            self.phases.lost += Counter(self.engine.account["lost"]) - lost
            self.phases.computed += self.engine.computed - computed
            self.phases.up.append(self._batches(BATCHES))

    def _batch(self, load: Load) -> Batch:
        self._seed += 1
        return self.engine.run(load, self._seed)

    def _batches(self, number: int) -> list[Batch]:
        return [self._batch(self.load) for _ in range(number)]

    def _outage(self) -> list[Batch]:
        self._seed += 1
        self.engine.begin(self.load, self._seed)
        time.sleep(GOES_AFTER * statistics.median(one.seconds for one in self.phases.up[-1]))
        if self.hang:
            self.server.hang()
        else:
            self.server.kill()
        first = self.engine.end()
        return [first, *self._batches((HANG_BATCHES if self.hang else BATCHES) - 1)]

    def _recovery(self) -> float:
        if self.hang:
            self.server.go_on()
        else:
            self.server.restart()
        began, before = time.monotonic(), self.engine.account["captured"]
        while self.engine.account["captured"] == before:
            if time.monotonic() - began > RESUME_S:
                raise RuntimeError(f"capture did not resume within {RESUME_S:g} s after the outage")
            self._batch(SHORT)
        return time.monotonic() - began


def measure(model: Path, cycles: int, dtype: str, *, hang: bool) -> dict[str, Any]:
    """Throughput in the outages against that around them, what was lost, and how soon capture came back.

    Raises:
        RuntimeError: capture did not come back, or a token is not in the account.
    """
    with pinned(server_core()), restartable_server() as server:
        with running_engine(
            model, dtype=dtype, server_url=server.daemon.url, heartbeat_s=HEARTBEAT_S
        ) as engine:
            run = Run(engine, server, hang=hang)
            run.run(cycles)
        coverage = server.daemon.status()["coverage"]
    _check(coverage, engine.computed)
    phases = run.phases
    by_outage = phases.pairs(lambda batch: batch.seconds)
    cpu = [pair for outage in phases.pairs(lambda batch: batch.cpu_seconds) for pair in outage]
    pairs = [pair for outage in by_outage for pair in outage]
    low, high = bootstrap_interval(pairs)
    return {
        "ratio": speed_ratio(pairs),
        "low": low,
        "high": high,
        "pairs": len(pairs),
        "outages": cycles,
        "cpu_ratio": speed_ratio(cpu),
        "ratio_of_first_batch": speed_ratio([outage[0] for outage in by_outage]),
        "tokens_computed": phases.computed,
        "tokens_lost": dict(phases.lost),
        "resumes_after_s": statistics.median(phases.resumed),
        "resumes_after_s_max": max(phases.resumed),
        "batch": str(run.load),
        "dtype": dtype,
    }


def _check(coverage: dict[str, Any], computed: int) -> None:
    counted = coverage["captured"] + sum(coverage["lost"].values())
    if coverage["computed"] != computed or counted != computed:
        raise RuntimeError(f"{computed} tokens were scheduled, the account is {coverage}")
