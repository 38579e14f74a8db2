"""What a persistent tier costs the stores in front of it: the same prompts into a daemon with one, and without.

    paced    prompts of four chunks with a pause behind each, as many as the disk takes: what is written is that of the
             prompts before
    rushed   one prompt behind the other: more than the disk takes

A writer behind one daemon would slow the other down, too: they share the machine. So daemons take turns by blocks of
`BLOCK` prompts, and before a block without the tier all is written. A pair is the median of a block with and of one
without; 1.0 is no cost, 0.95 is 5 %. `python -m benchmarks.tier_stores --folder DISK`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.samples import bootstrap_interval, seconds, speed_ratio
from benchmarks.worker import PLACES, Worker, worker
from lmcache_qprotocol.operations import FLUSH_Q
from lmcache_qserver.face.asking import ask_daemon
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon

BLOCK = 6
SIZES_MIB = (16, 64)
PAUSE_S_PER_MIB = 0.008
"""Half of what a disk of 1 GB/s takes to write a chunk of each of the four places."""


class Prompts:
    """Stores new prompts into one daemon."""

    def __init__(self, to: Worker, pause_s: float) -> None:
        self._to = to
        self._pause_s = pause_s
        self._number = 0

    def block(self) -> float:
        """Median seconds of a prompt."""
        times = []
        for _ in range(BLOCK):
            self._number += 1
            chunks = [self._to.prepare(self._number, place) for place in range(PLACES)]
            times.append(seconds(lambda chunks=chunks: self._to.store_all(chunks)))  # type: ignore[misc]  # default binds the loop variable
            self._to.settle()
            time.sleep(self._pause_s)
        return statistics.median(times)


def flush(server: RunningDaemon) -> None:
    """Until all is written."""
    reply = ask_daemon(server.url, FLUSH_Q, (120_000,), 130.0)
    assert reply.persisted, reply


def measure(folder: str, chunk_mib: int, rounds: int, pause_s: float) -> dict[str, Any]:
    """The ratio, its interval, and what became of what was stored."""
    pool = f"{max(2048, 32 * chunk_mib)}MiB"
    with (
        tempfile.TemporaryDirectory(dir=folder) as place,
        running_daemon(pool_bytes=pool) as off,
        running_daemon(pool_bytes=pool, l2=f"file://{place}/l2", l2_max_bytes="4GiB") as on,
        worker(off.url, chunk_mib, "off") as to_off,
        worker(on.url, chunk_mib, "on") as to_on,
    ):
        without, with_tier = Prompts(to_off, pause_s), Prompts(to_on, pause_s)
        pairs = []
        for number in range(-1, rounds):
            times = {}
            for name in ("on", "off") if number % 2 else ("off", "on"):
                if name == "off":
                    flush(on)
                times[name] = (with_tier if name == "on" else without).block()
            if number >= 0:
                pairs.append((times["on"], times["off"]))
        flush(on)
        tier = on.status()["l2"]
    return {
        "ratio": speed_ratio(pairs),
        "interval": bootstrap_interval(pairs),
        "on_ms": 1000 * statistics.median(ours for ours, _ in pairs),
        "off_ms": 1000 * statistics.median(theirs for _, theirs in pairs),
        "submitted": tier["submitted"],
        "written": tier["written"],
        "lost": {reason: count for reason, count in tier["lost"].items() if count},
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of blocks per figure")
    options = parser.parse_args()
    for size in SIZES_MIB:
        for name, pause_s in (("paced", PAUSE_S_PER_MIB * size), ("rushed", 0.0)):
            figures = measure(str(Path(options.folder).resolve()), size, options.rounds, pause_s)
            print(f"l2_store_{name}_{size}MiB", json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
