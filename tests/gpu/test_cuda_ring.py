"""CUDA rings on a real card: `make test-gpu`. Never run yet; docs/gpu.md says what to look for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.reasons import LossReason
from lmcache_qserver.testing.daemon import RunningDaemon, environment, wait_until
from tests.gpu.device_worker import (
    BLOCKS_PER_CHUNK,
    CHUNK_BYTES,
    DEVICE,
    NUM_BLOCKS,
    DeviceWorker,
    rows_of,
)

pytestmark = pytest.mark.gpu

BLOCKS = tuple(range(BLOCKS_PER_CHUNK))
SLACK_BYTES = 8 << 20
"""Of device memory: other processes may be at work, and drivers keep a little."""


@pytest.fixture
def worker(daemon: RunningDaemon) -> Iterator[DeviceWorker]:
    one = DeviceWorker(daemon.url, daemon.lifeline)
    one.register()
    yield one
    one.close()


def device_process(daemon: RunningDaemon) -> dict[str, Any]:
    (found,) = daemon.status()["devices"]
    return dict(found)


def free_bytes() -> int:
    """Of the device."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(DEVICE)[0]


def test_a_ring_registers_by_handle_and_names_its_device(
    daemon: RunningDaemon, worker: DeviceWorker
) -> None:
    status = daemon.status()
    assert status["q_context_meta"][str(os.getpid())]["device"].startswith("cuda:")
    assert device_process(daemon)["pid"] != daemon.pid


def test_stored_chunks_come_back_bit_equal(worker: DeviceWorker) -> None:
    scattered = (5, 6, 7, 1, 0, 30, 31, 32, 33, 63, 2, 3, 20, 21, 22, 40)
    for number, blocks in ((1, BLOCKS), (2, scattered)):
        worker.queue_step(number, blocks)
        assert worker.store(number, blocks).ok
        assert worker.read(number) == rows_of(number).view(torch.uint8).numpy().tobytes()


def test_the_copy_waits_for_the_workers_event(worker: DeviceWorker) -> None:
    """The step is queued behind a long kernel, and the store is sent at once."""
    for number in range(10, 20):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # about 0.1 s
        worker.queue_step(number, BLOCKS)
        assert not torch.cuda.current_stream(DEVICE).query(), "the step is still to come"
        assert worker.store(number, BLOCKS).ok
        assert worker.read(number) == rows_of(number).view(torch.uint8).numpy().tobytes()


def test_blocks_that_were_given_away_are_refused(worker: DeviceWorker) -> None:
    worker.queue_step(30, BLOCKS)
    worker.queue_step(31, BLOCKS)
    outcome = worker.store(30, BLOCKS).outcome
    assert outcome is not None
    assert outcome.refused == {LossReason.STAMP_MISMATCH: 1}


def test_a_handle_that_names_nothing_is_refused(daemon: RunningDaemon) -> None:
    one = DeviceWorker(daemon.url, daemon.lifeline)
    device = one.description.device
    assert device is not None
    import msgspec

    wrong = msgspec.structs.replace(device, handle=bytes(64))
    one.description = msgspec.structs.replace(one.description, device=wrong)
    with pytest.raises(RequestError) as caught:
        one.register()
    assert caught.value.code is ErrorCode.RING_REFUSED
    one.stack.close()
    one.ring.close()


def test_bandwidth_beside_a_plain_pinned_copy(worker: DeviceWorker) -> None:
    """Printed, not judged: `pytest -s`."""
    seconds = []
    for number in range(100, 140):
        worker.queue_step(number, BLOCKS)
        torch.cuda.synchronize()
        began = time.perf_counter()
        assert worker.store(number, BLOCKS).ok
        seconds.append(time.perf_counter() - began)
    source = torch.zeros(CHUNK_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.zeros(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
    plain = []
    for _ in range(40):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        plain.append(time.perf_counter() - began)
    ours, theirs = sorted(seconds)[20], sorted(plain)[20]
    print(
        f"\n{CHUNK_BYTES / 2**20:.0f} MiB device to host, median of 40: store {1e3 * ours:.2f} ms "
        f"({CHUNK_BYTES / ours / 1e9:.1f} GB/s, with the request's way there and back), plain pinned copy "
        f"{1e3 * theirs:.2f} ms ({CHUNK_BYTES / theirs / 1e9:.1f} GB/s)"
    )


def test_memory_is_released_after_sigkill_of_the_worker(daemon: RunningDaemon) -> None:
    before = free_bytes()
    argv = [sys.executable, "-m", "tests.gpu.device_worker", daemon.url, daemon.lifeline]
    with subprocess.Popen(argv, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"registered\n"
        assert free_bytes() < before - SLACK_BYTES
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not daemon.status()["registered_q_ids"], "the instance is released")
    wait_until(lambda: free_bytes() >= before - SLACK_BYTES, "the device's memory is free again")


def test_a_killed_device_process_is_started_again(
    daemon: RunningDaemon, worker: DeviceWorker
) -> None:
    os.kill(device_process(daemon)["pid"], signal.SIGKILL)
    wait_until(lambda: not daemon.status()["registered_q_ids"], "the instance is released")
    worker.register()
    worker.queue_step(50, BLOCKS)
    assert worker.store(50, BLOCKS).ok
    assert worker.read(50) == rows_of(50).view(torch.uint8).numpy().tobytes()


def test_a_thousand_registrations_do_not_grow(daemon: RunningDaemon, worker: DeviceWorker) -> None:
    pid = device_process(daemon)["pid"]

    def cycle() -> None:
        worker.unregister()
        worker.register()

    for _ in range(10):
        cycle()
    free, files = free_bytes(), len(os.listdir(f"/proc/{pid}/fd"))
    threads = len(os.listdir(f"/proc/{pid}/task"))
    for _ in range(1000):
        cycle()
    assert device_process(daemon)["pid"] == pid
    assert free_bytes() >= free - SLACK_BYTES
    assert len(os.listdir(f"/proc/{pid}/fd")) == files
    wait_until(lambda: len(os.listdir(f"/proc/{pid}/task")) <= threads, "no thread is left")
    assert worker.ring.num_blocks == NUM_BLOCKS
