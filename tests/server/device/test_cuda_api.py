"""The calls of CudaApi without a card: the package takes every one of them, and the driver's absence is what fails.

That shows names, arguments and their types; what the calls do is for tests/gpu.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from lmcache_qserver.device.api import DeviceError, Event, Memory, Stream
from lmcache_qserver.device.child import make_api

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (extra [cuda])")
from cuda.bindings import runtime

from lmcache_qserver.device import cuda_api
from lmcache_qserver.device.cuda_api import CudaApi

BYTES = np.zeros(4096, np.uint8)
CALLS: dict[str, Callable[[CudaApi], object]] = {
    "enter_thread": lambda api: api.enter_thread(),
    "register_host": lambda api: api.register_host(BYTES),
    "unregister_host": lambda api: api.unregister_host(BYTES),
    "allocate_host": lambda api: api.allocate_host(64),
    "free_host": lambda api: api.free_host(BYTES),
    "open_memory": lambda api: api.open_memory(bytes(64)),
    "empty_cache": lambda api: api.empty_cache(),
    "memory_info": lambda api: api.memory_info(),
    "create_stream": lambda api: api.create_stream(),
    "destroy_stream": lambda api: api.destroy_stream(Stream(1)),
    "wait_stream": lambda api: api.wait_stream(Stream(1)),
    "open_event": lambda api: api.open_event(bytes(64)),
    "create_event": lambda api: api.create_event(),
    "destroy_event": lambda api: api.destroy_event(Event(1)),
    "record_event": lambda api: api.record_event(Event(1), Stream(1)),
    "stream_wait_event": lambda api: api.stream_wait_event(Stream(1), Event(1)),
    "wait_event": lambda api: api.wait_event(Event(1)),
    "copy_to_host": lambda api: api.copy_to_host(Stream(1), BYTES, Memory(1 << 32), 8),
}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> CudaApi:
    if runtime.cudaGetDeviceCount()[0] == runtime.cudaError_t.cudaSuccess:
        pytest.skip("there is a card here: tests/gpu does more than this")
    monkeypatch.setattr(cuda_api, "_index_of", lambda uuid: 0)
    return CudaApi(bytes(16))


@pytest.mark.parametrize("name", CALLS)
def test_the_package_takes_the_call(api: CudaApi, name: str) -> None:
    with pytest.raises(DeviceError, match=r"cudaError(InsufficientDriver|NoDevice)") as caught:
        CALLS[name](api)
    assert not caught.value.sticky


def test_dropped_memory_is_closed_when_it_is_collected(api: CudaApi) -> None:
    api.ipc_collect()
    api.drop_memory(Memory(1 << 32))
    with pytest.raises(DeviceError, match="cudaIpcCloseMemHandle"):
        api.ipc_collect()
    api.ipc_collect()


def test_a_handle_reaches_the_package_byte_for_byte() -> None:
    import ctypes

    handle = bytes(range(64))
    for kind in (runtime.cudaIpcMemHandle_t, runtime.cudaIpcEventHandle_t):
        filled = cuda_api._filled(kind(), handle)
        assert ctypes.string_at(filled.getPtr(), 64) == handle
    with pytest.raises(DeviceError, match="64 bytes"):
        cuda_api._filled(runtime.cudaIpcMemHandle_t(), b"short")


def test_without_a_driver_there_is_no_device() -> None:
    if runtime.cudaGetDeviceCount()[0] == runtime.cudaError_t.cudaSuccess:
        pytest.skip("there is a card here")
    with pytest.raises(DeviceError, match="cudaGetDeviceCount"):
        CudaApi(bytes(16))


def test_without_the_package_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmcache_qserver.device.cuda_api", None)
    with pytest.raises(DeviceError, match="pip install"):
        make_api("cuda", bytes(16))
