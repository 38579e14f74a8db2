"""Helpers for large copies: one thread moves memory at half the speed that two of them reach.

A lane that has a large copy shares it with a helper that is free, if a processor is left for it besides those that
other lanes and their helpers use; else it copies alone. Both take the next segment off one list until it is empty, so
neither waits long for a thread that starts late or is slow. The lane may also look at what has been copied, in order
(`behind`: a checksum is made so, while the helper copies on).

    lane    ─ next ─ copy ─ next ─ copy ─ ... ─ wait until the helper has put its last segment down ─▶
    helper       ─ next ─ copy ─ ...        ─┘

`copy` returns when every byte has been copied, whoever did it: what is true behind a plain copy is true behind this
one (chunk_copy.py looks at the stamps then). A helper that hangs makes the lane hang that it helps, as if the lane's
own copy did, and is not given to any other.

The GIL makes `next` on a list's iterator atomic, and is free while numpy copies.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Behind = Callable[[Bytes], object]
"""Called with parts of a target that have been copied, in order."""

SEGMENT_BYTES = 1 << 20
MIN_SHARED_BYTES = 4 << 20
"""Below, waking a helper costs about what it saves."""


class Segment(NamedTuple):
    """`nbytes` bytes from `source` on go to `target`; both are offsets."""

    target: int
    source: int
    nbytes: int


class Crew:
    """The helpers of all lanes. Any thread may call `copy`.

    Args:
        helpers: threads besides the lane's own; 0: every lane copies alone.
        processors: how many of them and of lanes may be at work at once. Lanes are never held back: only helpers are.
    """

    def __init__(self, helpers: int, processors: int) -> None:
        self._helpers = helpers
        self._processors = processors
        self._free = deque(_Helper(f"copy-helper-{index}") for index in range(helpers))
        self._lanes: deque[None] = deque()
        """One for each lane that is copying. A deque, because a counter would need a lock."""

    @property
    def free(self) -> int:
        """Helpers that are not at work."""
        return len(self._free)

    def copy(
        self,
        target: Bytes,
        source: Bytes,
        segments: Sequence[Segment],
        behind: Behind | None = None,
    ) -> None:
        """Copy all segments.

        Args:
            target, source: contiguous, 1-D.
            segments: see `cut`; their targets do not overlap, and ascend.
            behind: is called with every segment's target, in order, in the caller's thread.
        """
        self._lanes.append(None)
        try:
            self._copy(_Work(target, source, segments), behind)
        finally:
            self._lanes.pop()

    def _copy(self, work: _Work, behind: Behind | None) -> None:
        at_work = len(self._lanes) + self._helpers - len(self._free)
        helper = self._take() if work.is_large and at_work < self._processors else None
        if helper is None:
            work.share(behind)
            return
        helper.begin(work)
        try:
            work.share(behind)
        finally:
            error = helper.wait()
            self._free.append(helper)
        if error is not None:
            raise error
        work.look(behind)

    def close(self) -> None:
        """End the helpers that are free; call it when nobody copies any more. The threads are daemons anyway."""
        while (helper := self._take()) is not None:
            helper.end()

    def _take(self) -> _Helper | None:
        try:
            return self._free.pop()
        except IndexError:
            return None


ALONE = Crew(0, 1)


def cut(target: int, source: int, nbytes: int) -> Iterator[Segment]:
    """A contiguous copy as segments of at most `SEGMENT_BYTES`."""
    for start in range(0, nbytes, SEGMENT_BYTES):
        yield Segment(target + start, source + start, min(SEGMENT_BYTES, nbytes - start))


def _copy(target: Bytes, source: Bytes, segment: Segment) -> None:
    to, begin, nbytes = segment
    np.copyto(target[to : to + nbytes], source[begin : begin + nbytes])


class _Work:
    """Segments to copy, for one or two threads."""

    def __init__(self, target: Bytes, source: Bytes, segments: Sequence[Segment]) -> None:
        self._target = target
        self._source = source
        self._segments = list(segments)
        self._todo = iter(enumerate(self._segments))
        self._copied = bytearray(len(self._segments))
        self._seen = 0

    @property
    def is_large(self) -> bool:
        """Whether a helper is worth waking."""
        return sum(item.nbytes for item in self._segments) >= MIN_SHARED_BYTES

    def share(self, behind: Behind | None = None) -> None:
        """Copy segment after segment, until none is left to begin; look at those that are done."""
        for index, segment in self._todo:
            _copy(self._target, self._source, segment)
            self._copied[index] = 1
            self.look(behind)

    def look(self, behind: Behind | None) -> None:
        """Hand on what has been copied without a gap and not been handed on before."""
        while behind and self._seen < len(self._segments) and self._copied[self._seen]:
            to, _, nbytes = self._segments[self._seen]
            self._seen += 1
            behind(self._target[to : to + nbytes])


class _Helper:
    """One thread; whoever took it off the crew's list is the only one to use it."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def begin(self, work: _Work) -> None:
        self._work.put(work)

    def wait(self) -> BaseException | None:
        return self._done.get()

    def end(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            error = None
            try:
                work.share()
            except BaseException as caught:  # noqa: BLE001 - it is the lane's
                error = caught.with_traceback(None)  # frames would keep views of the ring alive
            del work  # the views too, before the lane may close the ring
            self._done.put(error)
            del error
