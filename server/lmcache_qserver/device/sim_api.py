"""The simulated device: a DeviceApi whose rules are a card's worst manners, to find faults of order without a card.

Rules:

1.  The device has memory of its own. The host sees of it what copies bring, and nothing else.
2.  A call that queues returns before anything has happened. Work happens in *steps*: a step takes one stream by lot,
    among those whose first piece of work can go on, and does a part of that work.
3.  Within a stream work is done in order, each piece after the one before is over. Between streams there is no order
    but what events make.
4.  A copy, and a kernel's write, is done in pieces, in an order drawn by lot. A piece reads what the source holds then;
    whoever looks in between sees some pieces new and others old.
5.  An event counts its records and their completions. To wait for it means: for the completion of the last record
    before the call. The completion is work in the stream, and comes late: some steps after its turn.
6.  An event that was never recorded holds nobody up.
7.  Host memory that is copied into is pinned; memory that work still needs is not freed, dropped or unpinned; who
    owns a handle's memory frees it after the last other process has let go. Whatever breaks this is a *violation*: it
    is noted, and raises.
8.  Every host call lets some steps happen, a number drawn by lot; none as well. Who waits makes steps until it need
    not. When none can go on, `idle` is called: it raises where nobody else could change that.
9.  An event whose count of completions is negative stands for a lost device context: whatever meets it fails with a
    sticky error, as does every call after it.
10. Everything drawn by lot comes from one seed. There is no time: nothing sleeps but `idle`.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lmcache_qserver.device.api import Bytes, DeviceError, Event, Memory, Stream

Counts = npt.NDArray[np.int64]
Resolve = Callable[[bytes], Bytes]
"""The bytes that a handle names; of an event's handle, two int64: records and completions."""

MAX_PIECES = 6
MAX_LATE_STEPS = 5
MAX_STEPS_PER_CALL = 4


class SimViolation(DeviceError):
    """The caller broke a rule of device memory (rule 7)."""


class SimDeadlock(DeviceError):
    """Nothing can go on any more."""


class _Work:
    """One piece of work in a stream."""

    def can_go_on(self) -> bool:
        return True

    def go_on(self, lot: random.Random) -> bool:
        """Do a part; True when it is over."""
        raise NotImplementedError

    def touches(self, span: range) -> bool:
        """Whether it will still write to these addresses."""
        return False

    def reads(self, memory: Memory) -> bool:
        """Whether it will still read from a mapping."""
        return False


class _Move(_Work):
    """Bytes to bytes, in pieces."""

    def __init__(
        self, target: Bytes, source: Bytes, memory: Memory | None, lot: random.Random
    ) -> None:
        self._target, self._source, self._memory = target, source, memory
        cuts = sorted(lot.randrange(len(target) + 1) for _ in range(lot.randrange(MAX_PIECES)))
        self._pieces = [*itertools.pairwise((0, *cuts, len(target)))]
        lot.shuffle(self._pieces)

    def go_on(self, lot: random.Random) -> bool:
        start, end = self._pieces.pop()
        self._target[start:end] = self._source[start:end]
        return not self._pieces

    def touches(self, span: range) -> bool:
        mine = span_of(self._target)
        return mine.start < span.stop and span.start < mine.stop

    def reads(self, memory: Memory) -> bool:
        return memory == self._memory


class _Record(_Work):
    def __init__(self, counts: Counts, number: int, lot: random.Random) -> None:
        self._counts, self._number = counts, number
        self._late = lot.randrange(MAX_LATE_STEPS + 1)

    def go_on(self, lot: random.Random) -> bool:
        if self._late:
            self._late -= 1
            return False
        self._counts[1] = max(self._number, int(self._counts[1]))
        return True


class _Wait(_Work):
    def __init__(self, counts: Counts, number: int) -> None:
        self._counts, self._number = counts, number

    def can_go_on(self) -> bool:
        return not 0 <= self._counts[1] < self._number

    def go_on(self, lot: random.Random) -> bool:
        if self._counts[1] < 0:
            raise DeviceError("an illegal address was met", sticky=True)
        return True


class SimDevice:
    """A DeviceApi; see the head of this file. Any thread may call.

    Args:
        seed: of all lots.
        resolve: what handles name.
        idle: called, without any lock, when nothing can go on.

    Attributes:
        violations: what was broken of rule 7, in words.
        calls: names of the calls that free something, in order.
    """

    name = "sim:0"

    def __init__(self, seed: int, resolve: Resolve, idle: Callable[[], None] | None = None) -> None:
        self._lot = random.Random(seed)
        self._resolve = resolve
        self._idle = idle or _deadlock
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._streams: dict[Stream, deque[_Work]] = {}
        self._events: dict[Event, Counts] = {}
        self._memory: dict[Memory, Bytes] = {}
        self._dropped: set[Memory] = set()
        self._pinned: list[range] = []
        self._broken = False
        self.violations: list[str] = []
        self.calls: list[str] = []

    # --- what tests look at ---------------------------------------------------------------------------------------

    @property
    def mapped_bytes(self) -> int:
        """Bytes of other processes' memory that are mapped."""
        return sum(len(memory) for memory in self._memory.values())

    @property
    def held(self) -> dict[str, int]:
        """What has been made and not given back."""
        return {
            "streams": len(self._streams),
            "events": len(self._events),
            "mappings": len(self._memory),
            "pinned": len(self._pinned),
        }

    def will_write(self, memory: Bytes) -> bool:
        """Whether work is queued that writes there."""
        span = span_of(memory)
        return any(work.touches(span) for queue in self._streams.values() for work in queue)

    def step(self) -> bool:
        """One step (rule 2); False when nothing can go on.

        Raises:
            DeviceError: rule 9.
        """
        with self._lock:
            ready = [queue for queue in self._streams.values() if queue and queue[0].can_go_on()]
            if not ready:
                return False
            queue = self._lot.choice(ready)
            try:
                if queue[0].go_on(self._lot):
                    queue.popleft()
            except DeviceError:
                self._broken = True
                raise
            return True

    def steps(self, count: int) -> None:
        """So many steps, or as many as can be done."""
        for _ in range(count):
            if not self.step():
                return

    # --- the part of a worker -------------------------------------------------------------------------------------

    def queue_write(self, stream: Stream, target: Bytes, data: Bytes) -> None:
        """A kernel: the data goes to device memory of this process's own."""
        with self._lock:
            self._call()
            self._streams[stream].append(_Move(target, data.copy(), None, self._lot))

    def check_free(self, memory: Bytes) -> None:
        """The owner is about to free its memory (rule 7)."""
        if any(other is memory for other in self._memory.values()):
            self._violated("memory was freed while another process has it mapped")

    # --- DeviceApi ------------------------------------------------------------------------------------------------

    def enter_thread(self) -> None:
        """See `DeviceApi`."""

    def register_host(self, memory: Bytes) -> None:
        """See `DeviceApi`."""
        self._call()
        self._pinned.append(span_of(memory))

    def unregister_host(self, memory: Bytes) -> None:
        """See `DeviceApi`."""
        self._call()
        with self._lock:
            if self.will_write(memory):
                self._violated("host memory was unpinned under a copy")
            self._pinned.remove(span_of(memory))

    def allocate_host(self, nbytes: int) -> Bytes:
        """See `DeviceApi`."""
        memory = np.full(nbytes, 0xA5, np.uint8)
        self.register_host(memory)
        return memory

    def free_host(self, memory: Bytes) -> None:
        """See `DeviceApi`."""
        self.unregister_host(memory)

    def open_memory(self, handle: bytes) -> tuple[Memory, int]:
        """See `DeviceApi`."""
        self._call()
        found = self._resolve(handle)
        memory = Memory(next(self._ids))
        self._memory[memory] = found
        return memory, len(found)

    def drop_memory(self, memory: Memory) -> None:
        """See `DeviceApi`."""
        self._call()
        with self._lock:
            self.calls.append("drop_memory")
            if any(work.reads(memory) for queue in self._streams.values() for work in queue):
                self._violated("memory was dropped under a copy")
            self._dropped.add(memory)

    def empty_cache(self) -> None:
        """See `DeviceApi`."""
        self.calls.append("empty_cache")

    def ipc_collect(self) -> None:
        """See `DeviceApi`."""
        with self._lock:
            self.calls.append("ipc_collect")
            for memory in self._dropped:
                del self._memory[memory]
            self._dropped.clear()

    def memory_info(self) -> tuple[int, int]:
        """See `DeviceApi`."""
        total = 1 << 30
        return total - self.mapped_bytes, total

    def create_stream(self) -> Stream:
        """See `DeviceApi`."""
        self._call()
        stream = Stream(next(self._ids))
        self._streams[stream] = deque()
        return stream

    def destroy_stream(self, stream: Stream) -> None:
        """See `DeviceApi`."""
        with self._lock:
            if self._streams[stream]:
                self._violated("a stream was destroyed with work in it")
            del self._streams[stream]

    def wait_stream(self, stream: Stream) -> None:
        """See `DeviceApi`."""
        self._call()
        self._make_steps_until(lambda: not self._streams[stream])

    def open_event(self, handle: bytes) -> Event:
        """See `DeviceApi`."""
        self._call()
        return self._new_event(self._resolve(handle).view(np.int64)[:2])

    def create_event(self) -> Event:
        """See `DeviceApi`."""
        self._call()
        return self._new_event(np.zeros(2, np.int64))

    def destroy_event(self, event: Event) -> None:
        """See `DeviceApi`."""
        del self._events[event]

    def record_event(self, event: Event, stream: Stream) -> None:
        """See `DeviceApi`."""
        with self._lock:
            self._call()
            counts = self._events[event]
            counts[0] += 1
            self._streams[stream].append(_Record(counts, int(counts[0]), self._lot))

    def stream_wait_event(self, stream: Stream, event: Event) -> None:
        """See `DeviceApi`."""
        with self._lock:
            self._call()
            counts = self._events[event]
            self._streams[stream].append(_Wait(counts, int(counts[0])))

    def wait_event(self, event: Event) -> None:
        """See `DeviceApi`."""
        self._call()
        counts = self._events[event]
        number = int(counts[0])
        self._make_steps_until(lambda: bool(counts[1] >= number))

    def copy_to_host(self, stream: Stream, target: Bytes, memory: Memory, offset: int) -> None:
        """See `DeviceApi`."""
        with self._lock:
            self._call()
            if memory in self._dropped or memory not in self._memory:
                self._violated("a copy was queued out of memory that has been dropped")
            span = span_of(target)
            if not any(pin.start <= span.start and span.stop <= pin.stop for pin in self._pinned):
                self._violated("a copy was queued into memory that is not pinned")
            source = self._memory[memory]
            if not 0 <= offset <= len(source) - len(target):
                self._violated("a copy was queued out of bounds")
            source = source[offset : offset + len(target)]
            self._streams[stream].append(_Move(target, source, memory, self._lot))

    # --- within ---------------------------------------------------------------------------------------------------

    def _new_event(self, counts: Counts) -> Event:
        event = Event(next(self._ids))
        self._events[event] = counts
        return event

    def _call(self) -> None:
        if self._broken:
            raise DeviceError("the device context is lost", sticky=True)
        self.steps(self._lot.randrange(MAX_STEPS_PER_CALL))

    def _make_steps_until(self, over: Callable[[], bool]) -> None:
        while not over():
            if self._broken:
                raise DeviceError("the device context is lost", sticky=True)
            if not self.step():
                self._idle()

    def _violated(self, what: str) -> None:
        self.violations.append(what)
        raise SimViolation(what)


def span_of(memory: Bytes) -> range:
    """The addresses of contiguous bytes."""
    start = memory.ctypes.data
    return range(start, start + memory.nbytes)


def _deadlock() -> None:
    raise SimDeadlock("nothing can go on")
