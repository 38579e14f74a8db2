"""Where capture's time goes: CPU time of the connector's hooks, per step and per call.

`python -m benchmarks.profile`, with the environment of `make bench`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from benchmarks.cores import pinned, server_core
from benchmarks.engine import fast_dtype
from benchmarks.engine_handle import Batch, running_engine
from benchmarks.load import fitted
from benchmarks.overhead import LOADS, POOL
from demo.__main__ import MODEL
from demo.model import prepare
from demo.table import render_table
from lmcache_qserver.testing.daemon import running_daemon

BATCHES = 3


def main() -> None:
    """Measure both loads on one engine, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default=fast_dtype())
    dtype = parser.parse_args().dtype
    prepare(MODEL, print)
    rows: list[dict[str, Any]] = []
    with (
        pinned(server_core()),
        running_daemon(pool_bytes=POOL) as server,
        running_engine(MODEL, dtype=dtype, server_url=server.url, profile=True) as engine,
    ):
        for name, load in LOADS.items():
            engine.run(load, -1)
            fit = fitted(load, lambda load: engine.run(load, -2).seconds)
            batches = [engine.run(fit, seed) for seed in range(BATCHES)]
            rows += hook_rows(f"{name} {fit}", batches)
    print(render_table(rows))


def hook_rows(load: str, batches: list[Batch]) -> Iterator[dict[str, Any]]:
    """One row a hook, the dearest first, then their sum."""
    steps = sum(batch.steps for batch in batches)
    cpu = sum(batch.cpu_seconds for batch in batches)
    total = 0.0
    names = sorted({name for batch in batches for name in batch.hooks})
    sums = {name: [_sum(batches, name, part) for part in (0, 1)] for name in names}
    for name, (calls, seconds) in sorted(sums.items(), key=lambda item: -item[1][1]):
        total += seconds
        yield {
            "load": load,
            "hook": name,
            "calls/step": calls / steps,
            "us/call": 1e6 * seconds / calls,
            "us/step": 1e6 * seconds / steps,
            "% of CPU": 100 * seconds / cpu,
        }
    yield {
        "load": load,
        "hook": f"all, of a step of {1e3 * cpu / steps:.1f} ms",
        "us/step": 1e6 * total / steps,
        "% of CPU": 100 * total / cpu,
    }


def _sum(batches: list[Batch], name: str, part: int) -> float:
    return sum(batch.hooks.get(name, [0, 0.0])[part] for batch in batches)


if __name__ == "__main__":
    main()
