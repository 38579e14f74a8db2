"""redis: the same chunks into and out of a plain Redis, as what one would pick instead.

SET from a ring's memory and GET into fresh bytes, by redis-py over a Unix socket, Redis without persistence; against
one `np.copyto` of the same bytes, as store_and_retrieve.py. A GET gives bytes in the ring's order: neither the stamps'
proof nor the transposition is in it. Needs Debian's redis-server and the redis package; without them it is left out.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.samples import interleaved, speed_ratio
from benchmarks.store_and_retrieve import PlainCopy
from benchmarks.worker import MIB, PLACES
from lmcache_qserver.testing.daemon import wait_until


def why_not() -> str:
    """What is missing for this benchmark; empty when nothing is."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed (apt-get install redis-server)"
    try:
        importlib.import_module("redis")
    except ImportError:
        return "redis-py is not installed (pip install redis)"
    return ""


@contextmanager
def _running_redis() -> Iterator[Any]:
    """A client of a Redis of our own."""
    redis = importlib.import_module("redis")
    with tempfile.TemporaryDirectory(prefix="bench-redis-") as folder:
        path = Path(folder) / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
        process = subprocess.Popen(
            ["redis-server", *options, "--dir", folder], stdout=subprocess.DEVNULL
        )
        try:
            wait_until(path.exists, "redis listens")
            yield redis.Redis(unix_socket_path=str(path))
        finally:
            process.terminate()
            process.wait(10)


def measure(chunk_mib: int, rounds: int) -> dict[str, float]:
    """Ratios of SET and GET."""
    nbytes = chunk_mib * MIB
    copy = PlainCopy(nbytes)
    ring = np.random.default_rng(1).integers(0, 255, PLACES * nbytes, np.uint8)
    with _running_redis() as client:

        def put(index: int) -> None:
            start = index % PLACES * nbytes
            client.set(f"chunk-{index}", ring[start : start + nbytes].data)

        def get(index: int) -> None:
            assert len(client.get(f"chunk-{index}")) == nbytes

        put(0)
        stored = interleaved(put, copy, rounds)
        fetched = interleaved(get, copy, rounds)
    return {
        "redis_set_vs_memcpy": speed_ratio(stored),
        "redis_get_vs_memcpy": speed_ratio(fetched),
    }
