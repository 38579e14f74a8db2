"""The copy of a store out of a ring on a device: what chunk_copy.py does for host memory, queued on a stream.

    wait for the worker's event ─▶ rows of all chunks ─▶ their stamps ─▶ "done" event ─▶ │ wait, prove, clear
    └────────────────────── one stream, in order ─────────────────────────────────────┘  └ this thread

Each arrow matters:

- *After the worker's event*, because the worker only queues its writes: before the event the ring holds old rows.
- *Stamps behind rows*, in one stream: the worker empties a block's stamps before it gives the block away, so stamps
  that are right behind the copy of the rows prove that the rows were the chunk's all the time.
- *Proven behind the "done" event*: a slot whose copy is under way has any bytes in it, and so has the stamps' buffer.
  The buffer is emptied before every copy, so stamps of an earlier one can't pass for this one's.
- *Nothing returns before the stream is empty*, not even an error: who gets an answer may use slots and blocks again.

A run of neighbouring blocks is contiguous on both sides, so it is one transfer straight into the pinned pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.stamps import EMPTY, STAMP_BYTES
from lmcache_qserver.copying.chunk_copy import (
    ChunkCopy,
    StampFault,
    check_stamps,
    clear_others,
    neighbour_runs,
)
from lmcache_qserver.copying.ring_geometry import RingGeometry
from lmcache_qserver.device.api import HANDLE_BYTES, Bytes, DeviceApi, DeviceError, Event, Memory

MAX_EVENTS = 16
"""Handles of events that are kept open for a ring; its worker needs one."""
MIN_STAMPS = 1 << 13


class RingCopy:
    """One ring, opened in this process; used by one thread. Close it, whatever `open` did.

    Args:
        api: its device.
        geometry: of the ring, not checked yet.
        nbytes: of the ring, as announced.
        handle: of the ring's memory.
    """

    def __init__(self, api: DeviceApi, geometry: RingGeometry, nbytes: int, handle: bytes) -> None:
        self._api = api
        self._geometry = geometry
        self._nbytes = nbytes
        self._handle = handle
        self._memory: Memory | None = None
        self._events: dict[bytes, Event] = {}
        self._stream = api.create_stream()
        self._done = api.create_event()
        self._stamps: npt.NDArray[np.int64] | None = None
        self._stamp_bytes: Bytes | None = None

    def open(self) -> None:
        """Map the ring.

        Raises:
            RequestError(ring_refused): the handle is none, or its memory is smaller than announced.
            DeviceError: the device is lost.
        """
        self._geometry.check(self._nbytes)
        if len(self._handle) != HANDLE_BYTES:
            raise _refused(f"a device handle has {HANDLE_BYTES} bytes, not {len(self._handle)}")
        try:
            self._memory, there = self._api.open_memory(self._handle)
        except DeviceError as error:
            if error.sticky:
                raise
            raise _refused(f"the device does not open the ring's handle: {error}") from None
        if there < self._nbytes:
            raise _refused(
                f"the ring's allocation has {there} bytes, {self._nbytes} were announced"
            )

    def copy(self, chunks: Sequence[ChunkCopy], event: bytes) -> StampFault | None:
        """Copy chunks, stop at the first whose stamps are wrong.

        Args:
            chunks: their targets lie in pinned memory, and do not overlap.
            event: handle of the worker's event.

        Raises:
            DeviceError: nothing is under way any more, unless it is sticky.
        """
        assert self._memory is not None
        place = 0
        self._prepare_stamps(sum(len(chunk.block_ids) for chunk in chunks))
        try:
            self._wait_for_worker(event)
            for chunk in chunks:
                self._queue_rows(chunk)
            for chunk in chunks:
                self._queue_stamps(chunk, place)
                place += len(chunk.block_ids)
            self._wait_until_done()
        except DeviceError as error:
            if not error.sticky:
                self._api.wait_stream(self._stream)
            raise
        return self._prove(chunks)

    def close(self) -> None:
        """Give everything back: what is under way ends, references go, then the cache, then the mappings. Once."""
        api = self._api
        self._drain()
        for event in (*self._events.values(), self._done):
            api.destroy_event(event)
        api.destroy_stream(self._stream)
        if self._stamp_bytes is not None:
            self._stamps, buffer, self._stamp_bytes = None, self._stamp_bytes, None
            api.free_host(buffer)
        if self._memory is not None:
            api.drop_memory(self._memory)
        api.empty_cache()
        api.ipc_collect()

    # --- the arrows of the head -----------------------------------------------------------------------------------

    def _wait_for_worker(self, event: bytes) -> None:
        self._api.stream_wait_event(self._stream, self._event(event))

    def _queue_rows(self, chunk: ChunkCopy) -> None:
        size = self._geometry.block_bytes
        for place, first, count in neighbour_runs(chunk.block_ids):
            target = chunk.target[place * size : (place + count) * size]
            self._queue(target, first * size)

    def _queue_stamps(self, chunk: ChunkCopy, place: int) -> None:
        """Into the buffer from block `place` on."""
        assert self._stamp_bytes is not None
        size = self._geometry.block_size * STAMP_BYTES
        for begin, first, count in neighbour_runs(chunk.block_ids):
            to = (place + begin) * size
            target = self._stamp_bytes[to : to + count * size]
            self._queue(target, self._geometry.stamps_offset + first * size)

    def _wait_until_done(self) -> None:
        self._api.record_event(self._done, self._stream)
        self._api.wait_event(self._done)

    def _prove(self, chunks: Sequence[ChunkCopy]) -> StampFault | None:
        assert self._stamps is not None
        place = 0
        for index, chunk in enumerate(chunks):
            count = len(chunk.block_ids) * self._geometry.block_size
            found = self._stamps[place : place + count]
            place += count
            clear_others(chunk, self._geometry.block_size)
            fault = check_stamps(found[chunk.skip :][: chunk.rows], chunk.first_stamp, index)
            if fault is not None:
                return fault
        return None

    def _drain(self) -> None:
        self._api.wait_stream(self._stream)

    # --- what they need -------------------------------------------------------------------------------------------

    def _queue(self, target: Bytes, offset: int) -> None:
        assert self._memory is not None
        self._api.copy_to_host(self._stream, target, self._memory, offset)

    def _event(self, handle: bytes) -> Event:
        event = self._events.get(handle)
        if event is None:
            if len(self._events) >= MAX_EVENTS:
                # The stream is empty between copies, so nothing waits for the oldest one.
                self._api.destroy_event(self._events.pop(next(iter(self._events))))
            event = self._events[handle] = self._api.open_event(handle)
        return event

    def _prepare_stamps(self, blocks: int) -> None:
        """An empty buffer for the stamps of so many blocks."""
        needed = blocks * self._geometry.block_size
        if self._stamps is None or len(self._stamps) < needed:
            if self._stamp_bytes is not None:
                self._stamps, buffer, self._stamp_bytes = None, self._stamp_bytes, None
                self._api.free_host(buffer)
            count = max(MIN_STAMPS, 1 << (needed - 1).bit_length())
            self._stamp_bytes = self._api.allocate_host(count * STAMP_BYTES)
            self._stamps = self._stamp_bytes.view(np.int64)
        self._stamps[:needed] = EMPTY


def _refused(message: str) -> RequestError:
    return RequestError(ErrorCode.RING_REFUSED, message)
