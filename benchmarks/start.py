"""ready_s and rss_mb: from exec to /readyz with a pool of 1 GiB, and the daemon's memory beside the pool's pages.

Median of several starts, one after the other; each gets its pool's pages anew from the kernel.
"""

from __future__ import annotations

import statistics
import urllib.request
from pathlib import Path

from lmcache_qserver.testing.daemon import running_daemon

STARTS = 5


def beyond_pool_bytes(pid: int) -> int:
    """Resident bytes that are not shared memory; the pool is the only shared memory that an idle daemon has."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS", "RssShmem")))
    kib = {name: int(value.split()[0]) for name, value in fields.items()}
    return (kib["VmRSS"] - kib["RssShmem"]) * 1024


def measure() -> dict[str, float]:
    """Seconds and megabytes (1e6)."""
    ready, memory = [], []
    for _ in range(STARTS):
        with running_daemon(pool_bytes="1GiB") as server:
            # The ready file is there when /readyz says yes; asking proves it.
            with urllib.request.urlopen(server.http_url + "/readyz", timeout=5):
                ready.append(server.start_s)
            memory.append(beyond_pool_bytes(server.pid) / 1e6)
    return {"ready_s": statistics.median(ready), "rss_mb": statistics.median(memory)}
