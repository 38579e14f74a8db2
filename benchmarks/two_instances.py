"""two_instances: bytes per second of two workers that store at once, against one of them alone.

Each worker is a process that stores chunks without a pause, one at a time. Both run the same number of stores, alone
and together in turns, from a common start; the rate is that of the slower one's end.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection as Pipe

from benchmarks.worker import MIB, worker
from lmcache_qserver.testing.daemon import RunningDaemon

STORES = 24


def _run(pipe: Pipe, url: str, chunk_mib: int, number: int) -> None:
    """In a process: for each start time that comes, store, and send the time of the end."""
    with worker(url, chunk_mib, f"pair-{chunk_mib}-{number}") as ours:
        index = 0
        pipe.send(None)
        while (start := pipe.recv()) is not None:
            time.sleep(max(0.0, start - time.monotonic()))
            for _ in range(STORES):
                ours.store(ours.prepare(index))
                ours.settle()
                index += 1
            pipe.send(time.monotonic())


def measure(server: RunningDaemon, chunk_mib: int, rounds: int) -> dict[str, float]:
    """Rate of both together divided by that of one, and both in GB/s; medians."""
    spawn = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for number in range(2):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(
            target=_run, args=(theirs, server.url, chunk_mib, number), daemon=True
        )
        process.start()
        ends.append(ours)
        processes.append(process)
    try:
        for pipe in ends:
            pipe.recv()
        _rate(ends, chunk_mib)  # warm-up
        pairs = [(_rate(ends[:1], chunk_mib), _rate(ends, chunk_mib)) for _ in range(rounds)]
    finally:
        for pipe in ends:
            pipe.send(None)
        for process in processes:
            process.join(30)
    return {
        "ratio": statistics.median(both / one for one, both in pairs),
        "one_gb_s": statistics.median(one for one, _ in pairs),
        "both_gb_s": statistics.median(both for _, both in pairs),
    }


def _rate(pipes: list[Pipe], chunk_mib: int) -> float:
    start = time.monotonic() + 0.02
    for pipe in pipes:
        pipe.send(start)
    end = max(pipe.recv() for pipe in pipes)
    nbytes: float = len(pipes) * STORES * chunk_mib * MIB / 1e9
    return nbytes / float(end - start)
