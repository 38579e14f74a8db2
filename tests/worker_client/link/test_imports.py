"""What importing the client loads, and what it must not."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORBIDDEN = (
    "uvloop",
    "click",
    "aiohttp",
    "prometheus_client",
    "xxhash",
    "lmcache_qserver",
    "torch",
)


@pytest.mark.parametrize(
    "module",
    [
        "lmcache_qclient",
        "lmcache_qclient.link.connection",
        "lmcache_qclient.link.forks",
        "lmcache_qclient.link.health",
        "lmcache_qclient.link.lifeline",
        "lmcache_qclient.link.pulse",
        "lmcache_qclient.link.requests",
        "lmcache_qclient.link.wake",
        "lmcache_qclient.qcache",
    ],
)
def test_importing_loads_nothing_of_the_server_and_no_torch(module: str) -> None:
    script = f"import sys, {module}; print(*sorted({{*{FORBIDDEN!r}}} & set(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.split() == []
