"""The ring's memory on a device, over a runtime that only keeps account: which calls, with what, and in which order."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_qclient.capture.cuda_memory import CudaRingMemory

DEVICE = torch.device("cuda", 0)
UUID = bytes(range(16))


class Status(int):
    name = "cudaErrorMemoryAllocation"


class Handle:
    """As the package's: its bytes are at an address."""

    def __init__(self, fill: int) -> None:
        self._bytes = ctypes.create_string_buffer(bytes([fill]) * 64, 64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


class FakeRuntime:
    """`cuda.bindings.runtime` with two flags and no device."""

    cudaEventDisableTiming, cudaEventInterprocess = 2, 4

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        answers = {
            "cudaGetDeviceProperties": SimpleNamespace(uuid=SimpleNamespace(bytes=UUID)),
            "cudaMalloc": 0x7000,
            "cudaEventCreateWithFlags": 0x50,
            "cudaIpcGetMemHandle": Handle(1),
            "cudaIpcGetEventHandle": Handle(2),
        }

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name == self._fails:
                return (Status(2), None)
            return (Status(0), answers[name]) if name in answers else (Status(0),)

        call.__name__ = name
        return call


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of torch's clean-ups were called."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: calls.append("ipc_collect"))
    return calls


def test_memory_and_event_can_be_opened_by_another_process() -> None:
    runtime = FakeRuntime()
    memory = CudaRingMemory(4096, DEVICE, runtime)
    assert ("cudaMalloc", 4096) in runtime.calls
    assert ("cudaEventCreateWithFlags", 2 | 4) in runtime.calls, "interprocess, without timing"
    assert (memory.uuid, memory.nbytes) == (UUID, 4096)
    assert (memory.handle, memory.event_handle) == (b"\1" * 64, b"\2" * 64)
    assert memory.__cuda_array_interface__["data"] == (0x7000, False)
    memory.record_event(99)
    assert runtime.calls[-1] == ("cudaEventRecord", 0x50, 99)


def test_the_memory_goes_before_the_caches_are_emptied(collected: list[str]) -> None:
    runtime = FakeRuntime()
    memory = CudaRingMemory(4096, DEVICE, runtime)
    before = len(runtime.calls)
    memory.close()
    memory.close()
    assert runtime.calls[before:] == [("cudaEventDestroy", 0x50), ("cudaFree", 0x7000)]
    assert collected == ["empty_cache", "ipc_collect"]


@pytest.mark.parametrize(
    "fails", ["cudaEventCreateWithFlags", "cudaIpcGetMemHandle", "cudaIpcGetEventHandle"]
)
def test_what_fails_half_way_leaves_nothing(fails: str) -> None:
    runtime = FakeRuntime(fails)
    with pytest.raises(RuntimeError, match=fails):
        CudaRingMemory(4096, DEVICE, runtime)
    assert runtime.calls[-1] == ("cudaFree", 0x7000)


def test_the_package_takes_the_calls() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    if runtime.cudaGetDeviceCount()[0] == 0:
        pytest.skip("there is a card here: tests/gpu does more than this")
    for call, arguments in (
        (runtime.cudaSetDevice, (0,)),
        (runtime.cudaGetDeviceProperties, (0,)),
        (runtime.cudaMalloc, (4096,)),
        (runtime.cudaEventCreateWithFlags, (6,)),
        (runtime.cudaIpcGetMemHandle, (4096,)),
        (runtime.cudaIpcGetEventHandle, (1,)),
        (runtime.cudaEventRecord, (1, 2)),
        (runtime.cudaEventDestroy, (1,)),
        (runtime.cudaFree, (4096,)),
    ):
        status, *_ = call(*arguments)
        assert status.name in ("cudaErrorInsufficientDriver", "cudaErrorNoDevice")
