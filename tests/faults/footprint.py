"""What a server holds of the system: descriptors, threads, mapped rings; to be compared, run by run."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class Footprint:
    """Of one process, now.

    Attributes:
        files: descriptors by kind ("socket:[]", "memfd:lmcache-q-ring (deleted)", ...).
        threads: how many.
        memory: mapped memfds by name.
    """

    files: Counter[str]
    threads: int
    memory: Counter[str]

    def __sub__(self, other: Footprint) -> Footprint:
        files, memory = Counter(self.files), Counter(self.memory)
        files.subtract(other.files)
        memory.subtract(other.memory)
        return Footprint(+files, self.threads - other.threads, +memory)


def footprint(pid: int) -> Footprint:
    """Of a process that runs."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    # A large mapping is several lines once parts of it have other rights; rings and pools have one each.
    memory = Counter(line.split(maxsplit=5)[5] for line in maps.splitlines() if "/memfd:" in line)
    return Footprint(_files(pid), len(os.listdir(f"/proc/{pid}/task")), memory)


def _files(pid: int) -> Counter[str]:
    files: Counter[str] = Counter()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            files[_NUMBERS.sub("", os.readlink(entry.path))] += 1
    return files


def shared_memory_names() -> frozenset[str]:
    """What has a name in /dev/shm and could be ours."""
    return frozenset(name for name in os.listdir("/dev/shm") if "lmcache" in name or "psm_" in name)
