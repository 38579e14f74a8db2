"""A page of numbers that a process of a run and the driver share: it outlives the process.

What a process was at when it was killed stands here; nothing else can tell it afterwards. The driver writes the pauses.
"""

from __future__ import annotations

import mmap
import struct
import threading
from enum import IntEnum
from pathlib import Path

_NUMBER = struct.Struct("=q")
_NUMBERS = 4


class Phase(IntEnum):
    """What a worker or reader is at."""

    IDLE = 0
    COMPUTING = 1
    """A worker's forward pass: rows and stamps are being written."""
    STORING = 2
    """Its stores are sent, and not all are answered."""
    ASKING = 3
    """A reader's request is under way."""
    COPYING = 4
    """It copies out of the pool, under a lease."""


class Page:
    """Numbers in a file that is mapped by all who use it; only one process writes each."""

    def __init__(self, path: Path) -> None:
        path.touch(mode=0o600)
        with path.open("r+b") as file:
            file.truncate(_NUMBER.size * _NUMBERS)
            self._map = mmap.mmap(file.fileno(), _NUMBER.size * _NUMBERS)
        self._lock = threading.Lock()

    def _get(self, index: int) -> int:
        value: int = _NUMBER.unpack_from(self._map, index * _NUMBER.size)[0]
        return value

    def _set(self, index: int, value: int) -> None:
        _NUMBER.pack_into(self._map, index * _NUMBER.size, value)

    @property
    def pause_s(self) -> float:
        """How long each copy pauses half way, seconds."""
        return self._get(0) / 1e6

    @pause_s.setter
    def pause_s(self, seconds: float) -> None:
        self._set(0, round(seconds * 1e6))

    @property
    def phase(self) -> Phase:
        """What the process is at."""
        return Phase(self._get(1))

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._set(1, phase)

    @property
    def copies_under_way(self) -> int:
        """Copies that have begun and not ended."""
        return self._get(2) - self._get(3)

    def begin_copy(self) -> None:
        """Any thread."""
        with self._lock:
            self._set(2, self._get(2) + 1)

    def end_copy(self) -> None:
        """Any thread."""
        with self._lock:
            self._set(3, self._get(3) + 1)

    def clear(self) -> None:
        """For the next process that will write here."""
        for index in range(1, _NUMBERS):
            self._set(index, 0)

    def close(self) -> None:
        """Unmap."""
        self._map.close()
