"""Copies that write around the processor's caches.

What the daemon copies it does not look at again, and writing it through the caches reads each line of the target before
it is overwritten. Measured in the daemon, going around them makes stores of 64 MiB 10 to 20 % faster, and those of
16 MiB not noticeably (docs/benchmarks.md). glibc knows stores that go around them, and takes them for copies above a
threshold, by default three quarters of the last-level cache (240 MiB on the machine where this was measured). It can be
set before a process starts and at no other time, so the daemon starts itself over, once, before it has loaded anything.

The processor family that has no such tunable ignores it, as other C libraries do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

TUNABLES = "GLIBC_TUNABLES"
THRESHOLD = "glibc.cpu.x86_non_temporal_threshold"
THRESHOLD_BYTES = 512 << 10
"""Below a segment of copying/crew.py, above everything that is looked at soon."""


def with_threshold(environment: Mapping[str, str]) -> dict[str, str] | None:
    """The environment to start over with; None when the threshold is set there, by us or by whoever runs us."""
    tunables = environment.get(TUNABLES, "")
    if THRESHOLD in tunables:
        return None
    ours = f"{THRESHOLD}={THRESHOLD_BYTES:#x}"
    return {**environment, TUNABLES: f"{tunables}:{ours}" if tunables else ours}


def start_over(
    execute: Callable[[str, list[str], dict[str, str]], NoReturn] = os.execve,
) -> None:
    """Replace this process by itself with the threshold set; return when it is set, or can't be."""
    environment = with_threshold(os.environ)
    if environment is None or not sys.platform.startswith("linux") or not sys.executable:
        return
    try:
        execute(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    except OSError as error:
        print(f"lmcache-qserver: copies go through the caches ({error})", file=sys.stderr)
