"""capture_overhead: tokens per second with capture, divided by those without, for prefill and for decode.

One engine runs pairs of the same batch, once with capture and once without (benchmarks/stock.py); who goes first
alternates. The server has a core of its own. Prefix caching is off: all is computed.

A capture that loses rows would be no capture, so the server's own count is part of the figure: `captured_share` is
captured / computed over all batches with capture, where computed must be what vLLM's scheduler has scheduled.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cores import pinned, server_core
from benchmarks.engine_handle import Batch, EngineHandle, running_engine
from benchmarks.load import DECODE, PREFILL, Load, fitted
from benchmarks.samples import bootstrap_interval, speed_ratio
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon

POOL = "1GiB"
WARM_UPS = 2
LOADS = {"prefill": PREFILL, "decode": DECODE}

Pair = tuple[Batch, Batch]
"""With capture, without."""


def measure(model: Path, pairs: int, dtype: str) -> dict[str, dict[str, Any]]:
    """One entry each for prefill and decode."""
    return {name: measure_load(model, load, pairs, dtype) for name, load in LOADS.items()}


def measure_load(model: Path, load: Load, pairs: int, dtype: str) -> dict[str, Any]:
    """The ratio with its 95 % interval, tokens per second of both, and how much was captured."""
    with pinned(server_core()), running_daemon(pool_bytes=POOL) as server:
        with running_engine(model, dtype=dtype, server_url=server.url) as engine:
            load = _warm(load, engine)
            batches = [_pair(number, load, engine) for number in range(pairs)]
        captured = captured_share(server, engine.computed)
    return {**summary(batches), "captured_share": captured, "batch": str(load), "dtype": dtype}


def _warm(load: Load, engine: EngineHandle) -> Load:
    engine.run(load, -1, stock=True)
    load = fitted(load, lambda load: engine.run(load, -2, stock=True).seconds)
    for number in range(WARM_UPS):
        _pair(-3 - number, load, engine)
    return load


def _pair(number: int, load: Load, engine: EngineHandle) -> Pair:
    order = (False, True) if number % 2 else (True, False)
    taken = {stock: engine.run(load, number, stock=stock) for stock in order}
    return taken[False], taken[True]


def captured_share(server: RunningDaemon, computed: int) -> float:
    """Captured / computed by the server's count, once the engine has left.

    Raises:
        RuntimeError: it has not counted what the scheduler has scheduled.
    """
    coverage = server.status()["coverage"]
    if coverage["computed"] != computed or coverage["pending"]:
        raise RuntimeError(f"{computed} tokens were scheduled, the server counts {coverage}")
    share: float = coverage["captured"] / computed
    return share


def summary(batches: Sequence[Pair]) -> dict[str, Any]:
    """What may be said of the pairs; `cpu_ratio` is of CPU time, in which other work on the machine shows less."""
    times = [(ours.seconds, theirs.seconds) for ours, theirs in batches]
    low, high = bootstrap_interval(times)
    computed = sum(ours.computed for ours, _ in batches)
    return {
        "ratio": speed_ratio(times),
        "low": low,
        "high": high,
        "pairs": len(times),
        "with_tokens_s": computed / sum(ours for ours, _ in times),
        "without_tokens_s": computed / sum(theirs for _, theirs in times),
        "cpu_ratio": speed_ratio(
            [(ours.cpu_seconds, theirs.cpu_seconds) for ours, theirs in batches]
        ),
        "batch_s": statistics.median(theirs for _, theirs in times),
    }
