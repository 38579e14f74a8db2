"""DeviceApi: all that copying out of a device needs of it. Kept thin, because what lies behind it needs a card to test.

Handles (memory, streams, events) are opaque integers of one process. A call that only queues work returns at once; the
three that wait say so. Every call may raise DeviceError.
"""

from __future__ import annotations

from typing import NewType, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Memory = NewType("Memory", int)
Stream = NewType("Stream", int)
Event = NewType("Event", int)

HANDLE_BYTES = 64
"""Of an interprocess handle, of memory and of an event alike."""


class DeviceError(Exception):
    """The device refused a call.

    Attributes:
        sticky: the process's device context is lost: every later call would fail too, and only another process helps.
    """

    def __init__(self, message: str, *, sticky: bool = False) -> None:
        super().__init__(message)
        self.sticky = sticky


class DeviceApi(Protocol):
    """One device, in one process. Any thread may call once it has called `enter_thread`.

    Attributes:
        name: as torch names it, by this process's numbering: "cuda:0".
    """

    @property
    def name(self) -> str: ...

    def enter_thread(self) -> None:
        """This thread's calls go to the device from now on."""

    # --- host memory --------------------------------------------------------------------------------------------

    def register_host(self, memory: Bytes) -> None:
        """Pin memory that is there already, so that the device copies into it by itself. Waits."""

    def unregister_host(self, memory: Bytes) -> None:
        """The opposite; no copy into it may be under way."""

    def allocate_host(self, nbytes: int) -> Bytes:
        """New pinned memory."""

    def free_host(self, memory: Bytes) -> None:
        """The opposite; no copy into it may be under way."""

    # --- memory of other processes ------------------------------------------------------------------------------

    def open_memory(self, handle: bytes) -> tuple[Memory, int]:
        """Another process's allocation, and its bytes from the handle's address on.

        Args:
            handle: HANDLE_BYTES bytes.
        """

    def drop_memory(self, memory: Memory) -> None:
        """This process's reference to it goes; no copy out of it may be under way. `ipc_collect` unmaps it."""

    def empty_cache(self) -> None:
        """Give memory that this process only keeps for later back to the device."""

    def ipc_collect(self) -> None:
        """Unmap what has been dropped."""

    def memory_info(self) -> tuple[int, int]:
        """Bytes of the device that are free, and all."""

    # --- streams and events -------------------------------------------------------------------------------------

    def create_stream(self) -> Stream:
        """A queue of work: in order within itself, in no order against other streams."""

    def destroy_stream(self, stream: Stream) -> None:
        """Nothing may be under way in it."""

    def wait_stream(self, stream: Stream) -> None:
        """Wait until all that is queued is done. Waits."""

    def open_event(self, handle: bytes) -> Event:
        """Another process's event.

        Args:
            handle: HANDLE_BYTES bytes.
        """

    def create_event(self) -> Event:
        """An event of this process's own; done until it is recorded."""

    def destroy_event(self, event: Event) -> None:
        """The opposite of both."""

    def record_event(self, event: Event, stream: Stream) -> None:
        """Queue: the event is done when all that was queued in the stream before is."""

    def stream_wait_event(self, stream: Stream, event: Event) -> None:
        """Queue: later work in the stream waits for the event's last record before this call."""

    def wait_event(self, event: Event) -> None:
        """Wait for the event's last record before this call. Waits, without keeping a processor busy."""

    # --- copying ------------------------------------------------------------------------------------------------

    def copy_to_host(self, stream: Stream, target: Bytes, memory: Memory, offset: int) -> None:
        """Queue: copy `target.nbytes` bytes from byte `offset` of the memory on into pinned host memory."""
