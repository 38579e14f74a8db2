"""The ring's memory on an NVIDIA device: an allocation of its own that another process can open by handle.

Through `cuda-bindings` and not through torch: torch shares parts of its cache, which other tensors lie in as well, and
keeps count of references in named files. This has never run on a card (docs/gpu.md).

Order at the end: the server lets go of its mapping, then the tensors over this memory go, then the memory itself, then
what torch's cache and its interprocess handles still hold.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

HANDLE_BYTES = 64


class CudaRingMemory:
    """`nbytes` of device memory, and an interprocess event.

    Args:
        device: of type "cuda"; without an index, the current one.
        runtime: `cuda.bindings.runtime`; another one in tests only.

    Attributes:
        uuid: of the device, 16 bytes.
        handle: of the memory, 64 bytes.
        event_handle: of the event, 64 bytes.

    Raises:
        RuntimeError: the device refuses, or `cuda-bindings` is not installed.
    """

    def __init__(self, nbytes: int, device: torch.device, runtime: Any = None) -> None:
        self._runtime = runtime = _load_runtime() if runtime is None else runtime
        self.nbytes = nbytes
        self.device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        _call(runtime.cudaSetDevice, self._index)
        properties = _call(runtime.cudaGetDeviceProperties, self._index)
        self.uuid = bytes(properties.uuid.bytes)
        self._event: int | None = None
        self._address: int | None = int(_call(runtime.cudaMalloc, nbytes))
        try:
            flags = runtime.cudaEventDisableTiming | runtime.cudaEventInterprocess
            self._event = int(_call(runtime.cudaEventCreateWithFlags, flags))
            self.handle = _bytes_of(_call(runtime.cudaIpcGetMemHandle, self._address))
            self.event_handle = _bytes_of(_call(runtime.cudaIpcGetEventHandle, self._event))
        except BaseException:
            self._free()
            raise

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What torch makes a tensor of, without a copy."""
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self._address, False),
            "version": 3,
        }

    def tensor(self) -> torch.Tensor:
        """uint8 `[nbytes]` over this memory."""
        return torch.as_tensor(self, device=self.device)

    def record_event(self, stream: int) -> None:
        """The event is done when all that is queued in the stream now is; never waits.

        Args:
            stream: its address, as `torch.cuda.Stream.cuda_stream` gives it.
        """
        _call(self._runtime.cudaEventRecord, self._event, stream)

    def close(self) -> None:
        """Free it, when no tensor and no other process uses it any more. Idempotent."""
        if self._address is None:
            return
        self._free()
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # torch's own

    def _free(self) -> None:
        event, self._event = self._event, None
        address, self._address = self._address, None
        if event is not None:
            _call(self._runtime.cudaEventDestroy, event)
        _call(self._runtime.cudaFree, address)


def _load_runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError:
        raise RuntimeError(
            'the query ring on a GPU needs cuda-bindings: pip install "lmcache-qserver[cuda]"'
        ) from None
    return runtime


def _bytes_of(handle: Any) -> bytes:
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def _call(function: Any, *arguments: Any) -> Any:
    """The call's value, if it has one."""
    status, *found = function(*arguments)
    if int(status):
        raise RuntimeError(f"{function.__name__}: {status.name}")
    return found[0] if found else None
