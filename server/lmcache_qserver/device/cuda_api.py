"""DeviceApi over NVIDIA's runtime, by the `cuda-bindings` package (extra `[cuda]`). It has never run on a card.

One call here is one or two calls there; what they are for is said in api.py. docs/gpu.md says how to try it.

Handles of other processes are 64 opaque bytes; the package's handle types show their address only, whatever its
version, so they are filled through that.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
from cuda.bindings import driver, runtime

from lmcache_qserver.device.api import (
    HANDLE_BYTES,
    Bytes,
    DeviceError,
    Event,
    Memory,
    Stream,
)

_HARMLESS = frozenset(
    {
        "cudaErrorInvalidValue",
        "cudaErrorMemoryAllocation",
        "cudaErrorInvalidDevicePointer",
        "cudaErrorInvalidResourceHandle",
        "cudaErrorMapBufferObjectFailed",
        "cudaErrorInvalidDevice",
        "cudaErrorInvalidContext",
        "cudaErrorDeviceUninitialized",
        "cudaErrorPeerAccessUnsupported",
        "cudaErrorHostMemoryAlreadyRegistered",
        "cudaErrorHostMemoryNotRegistered",
        "cudaErrorNotSupported",
        "cudaErrorInsufficientDriver",
        "cudaErrorNoDevice",
        "CUDA_ERROR_INVALID_VALUE",
        "CUDA_ERROR_NOT_FOUND",
    }
)
"""What says that a call was wrong, not that the context is lost. Of everything else the worst is believed."""


class CudaApi:
    """A DeviceApi.

    Args:
        uuid: of the device, 16 bytes.

    Raises:
        DeviceError: no device of this process has this UUID, or there is no driver.
    """

    def __init__(self, uuid: bytes) -> None:
        self._index = _index_of(uuid)
        self.name = f"cuda:{self._index}"
        self._dropped: list[Memory] = []

    def enter_thread(self) -> None:
        """See `DeviceApi`."""
        _call(runtime.cudaSetDevice, self._index)

    # --- host memory --------------------------------------------------------------------------------------------

    def register_host(self, memory: Bytes) -> None:
        """See `DeviceApi`."""
        flags = runtime.cudaHostRegisterPortable
        _call(runtime.cudaHostRegister, memory.ctypes.data, memory.nbytes, flags)

    def unregister_host(self, memory: Bytes) -> None:
        """See `DeviceApi`."""
        _call(runtime.cudaHostUnregister, memory.ctypes.data)

    def allocate_host(self, nbytes: int) -> Bytes:
        """See `DeviceApi`."""
        address = _call(runtime.cudaMallocHost, nbytes)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(int(address)))

    def free_host(self, memory: Bytes) -> None:
        """See `DeviceApi`."""
        _call(runtime.cudaFreeHost, memory.ctypes.data)

    # --- memory of other processes ------------------------------------------------------------------------------

    def open_memory(self, handle: bytes) -> tuple[Memory, int]:
        """See `DeviceApi`."""
        flags = runtime.cudaIpcMemLazyEnablePeerAccess
        opened = _filled(runtime.cudaIpcMemHandle_t(), handle)
        address = int(_call(runtime.cudaIpcOpenMemHandle, opened, flags))
        try:
            base, nbytes = _call(driver.cuMemGetAddressRange, address)
        except BaseException:
            with contextlib.suppress(DeviceError):
                _call(runtime.cudaIpcCloseMemHandle, address)
            raise
        return Memory(address), int(base) + int(nbytes) - address

    def drop_memory(self, memory: Memory) -> None:
        """See `DeviceApi`."""
        self._dropped.append(memory)

    def empty_cache(self) -> None:
        """See `DeviceApi`."""
        pool = _call(runtime.cudaDeviceGetDefaultMemPool, self._index)
        _call(runtime.cudaMemPoolTrimTo, pool, 0)

    def ipc_collect(self) -> None:
        """See `DeviceApi`; other threads may be at it too."""
        while self._dropped:
            with contextlib.suppress(IndexError):
                _call(runtime.cudaIpcCloseMemHandle, self._dropped.pop())

    def memory_info(self) -> tuple[int, int]:
        """See `DeviceApi`."""
        free, total = _call(runtime.cudaMemGetInfo)
        return int(free), int(total)

    # --- streams and events -------------------------------------------------------------------------------------

    def create_stream(self) -> Stream:
        """See `DeviceApi`."""
        flags = runtime.cudaStreamNonBlocking
        return Stream(int(_call(runtime.cudaStreamCreateWithFlags, flags)))

    def destroy_stream(self, stream: Stream) -> None:
        """See `DeviceApi`."""
        _call(runtime.cudaStreamDestroy, stream)

    def wait_stream(self, stream: Stream) -> None:
        """See `DeviceApi`."""
        _call(runtime.cudaStreamSynchronize, stream)

    def open_event(self, handle: bytes) -> Event:
        """See `DeviceApi`."""
        opened = _filled(runtime.cudaIpcEventHandle_t(), handle)
        return Event(int(_call(runtime.cudaIpcOpenEventHandle, opened)))

    def create_event(self) -> Event:
        """See `DeviceApi`."""
        flags = runtime.cudaEventDisableTiming | runtime.cudaEventBlockingSync
        return Event(int(_call(runtime.cudaEventCreateWithFlags, flags)))

    def destroy_event(self, event: Event) -> None:
        """See `DeviceApi`."""
        _call(runtime.cudaEventDestroy, event)

    def record_event(self, event: Event, stream: Stream) -> None:
        """See `DeviceApi`."""
        _call(runtime.cudaEventRecord, event, stream)

    def stream_wait_event(self, stream: Stream, event: Event) -> None:
        """See `DeviceApi`."""
        _call(runtime.cudaStreamWaitEvent, stream, event, runtime.cudaEventWaitDefault)

    def wait_event(self, event: Event) -> None:
        """See `DeviceApi`."""
        _call(runtime.cudaEventSynchronize, event)

    # --- copying ------------------------------------------------------------------------------------------------

    def copy_to_host(self, stream: Stream, target: Bytes, memory: Memory, offset: int) -> None:
        """See `DeviceApi`."""
        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        address = target.ctypes.data
        _call(runtime.cudaMemcpyAsync, address, memory + offset, target.nbytes, kind, stream)


def _index_of(uuid: bytes) -> int:
    for index in range(int(_call(runtime.cudaGetDeviceCount))):
        if bytes(_call(runtime.cudaGetDeviceProperties, index).uuid.bytes) == uuid:
            return index
    raise DeviceError(
        f"no device of the server's process has the UUID {uuid.hex()}: look at its CUDA_VISIBLE_DEVICES"
    )


def _filled(opened: Any, handle: bytes) -> Any:
    if len(handle) != HANDLE_BYTES:
        raise DeviceError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
    ctypes.memmove(opened.getPtr(), handle, HANDLE_BYTES)
    return opened


def _call(function: Any, *arguments: Any) -> Any:
    """What the call gives besides its status: nothing, one value, or several."""
    try:
        status, *found = function(*arguments)
    except RuntimeError as error:  # the package's word for a driver that is not there
        raise DeviceError(f"{function.__name__}: {error}") from None
    if int(status):
        raise DeviceError(
            f"{function.__name__}: {status.name}", sticky=status.name not in _HARMLESS
        )
    return found[0] if len(found) == 1 else tuple(found)
