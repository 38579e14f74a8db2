"""Device processes of the real daemon, with the simulated device in them: what they do, and what is left of them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import StoreResult, WorkerReport
from lmcache_qprotocol.reasons import LossReason
from lmcache_qserver.testing.bare_client import BareClient, BareLifeline, register_small_ring
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon, wait_until
from lmcache_qserver.testing.sim_worker import (
    CHUNK_BYTES,
    CHUNK_SIZE,
    SimDeviceWorker,
    content,
    query_of,
)

BLOCKS = (0, 1, 5, 6)
OTHER_DEVICE = b"sim-device-no-02"
REPORT = WorkerReport(computed=0, captured=0, lost={}, pending=0)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(devices="sim", chunk_size=CHUNK_SIZE, copy_timeout_s=1.0) as one:
        yield one


class Connected:
    """A client with its lifeline, and a worker on the device."""

    def __init__(self, daemon: RunningDaemon, uuid: bytes | None = None) -> None:
        self.stack = contextlib.ExitStack()
        self.client = self.stack.enter_context(BareClient(daemon.url))
        self.lifeline = self.stack.enter_context(BareLifeline(daemon.lifeline))
        _, self.pool_fd = self.lifeline.attach(self.client.hello().session)
        self.stack.callback(os.close, self.pool_fd)
        self.worker = SimDeviceWorker() if uuid is None else SimDeviceWorker(uuid)
        self.stack.callback(self.worker.close)

    def close(self) -> None:
        """Idempotent."""
        self.stack.close()

    def read(self, number: int) -> bytes:
        """A chunk out of the pool, as a reader on this host sees it."""
        reply = self.client.ask("retrieve_q", query_of(number)).result
        assert [chunk.nbytes for chunk in reply.chunks] == [CHUNK_BYTES]
        found = os.pread(self.pool_fd, CHUNK_BYTES, reply.chunks[0].offset)
        self.client.ask("release_q", (reply.lease_id,))
        return found


Connect = Callable[..., Connected]


@pytest.fixture
def connect(daemon: RunningDaemon) -> Iterator[Connect]:
    """Makes connections, which end with the test; no device process is there at the begin."""
    forget_processes(daemon)
    with contextlib.ExitStack() as stack:

        def make(to: RunningDaemon = daemon, uuid: bytes | None = None) -> Connected:
            connected = Connected(to, uuid)
            stack.callback(connected.close)
            return connected

        yield make
    wait_until(lambda: not daemon.status()["registered_q_ids"], "all rings are released")


@pytest.fixture
def one(connect: Connect) -> Connected:
    return connect()


@pytest.fixture
def other(connect: Connect) -> Connected:
    return connect(uuid=OTHER_DEVICE)


def processes(daemon: RunningDaemon) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = daemon.status()["devices"]
    return found


def ready_pid(daemon: RunningDaemon) -> int:
    """The one device process that is ready."""
    ready = [one["pid"] for one in processes(daemon) if one["state"] == "ready"]
    assert len(ready) == 1, ready
    return int(ready[0])


def forget_processes(daemon: RunningDaemon) -> None:
    """So that the next ring starts a process of its own."""
    wait_until(lambda: all(one["pid"] for one in processes(daemon)), "none is starting")
    for one in processes(daemon):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one["pid"], signal.SIGKILL)
    wait_until(lambda: not processes(daemon), "no device process is left")


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def is_stopped(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all("State:\tT" in (task / "status").read_text() for task in tasks)


def maps_of(pid: int, name: str) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count(name)


def copy_failed(result: StoreResult) -> bool:
    assert result.outcome is not None
    return not result.ok and result.outcome.refused == {LossReason.COPY_FAILED: 1}


def test_a_ring_on_a_device_is_stored_and_read_back_bit_equal(
    daemon: RunningDaemon, one: Connected
) -> None:
    one.worker.register(one.client)
    for number in range(100, 110):
        assert one.worker.store(one.client, number, BLOCKS).ok
    for number in range(100, 110):
        assert one.read(number) == content(number)
    status = daemon.status()
    assert [process["device"] for process in status["devices"]] == ["sim:0"]
    assert ready_pid(daemon) != daemon.pid
    assert status["q_context_meta"]["1"]["device"] == "sim:0"


def test_stamps_are_checked_there_too(daemon: RunningDaemon, one: Connected) -> None:
    one.worker.register(one.client)
    one.worker.write(120, BLOCKS)
    key, instance, _, event, proof = one.worker.store_request(120, BLOCKS)
    result = one.client.ask("store_q", key, instance, ((0, 1, 5, 7),), event, proof).result
    assert result.outcome.refused == {LossReason.STAMP_MISMATCH: 1}


def test_the_daemon_itself_loads_no_device_library(daemon: RunningDaemon, one: Connected) -> None:
    one.worker.register(one.client)
    for pid in (daemon.pid, ready_pid(daemon)):
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "libcuda" not in maps
        assert "torch" not in maps


def test_what_kind_a_ring_is_must_be_known(daemon: RunningDaemon, one: Connected) -> None:
    for kind in ("cuda", "", "rocm"):
        strange = msgspec.structs.replace(one.worker.description, kind=kind)
        with pytest.raises(RequestError) as caught:
            one.client.ask("register_q_cache", 1, (), "m", 1, "t", None, (), strange)
        assert caught.value.code is ErrorCode.UNSUPPORTED_TRANSPORT
        assert "shm or sim" in caught.value.message
    bare = msgspec.structs.replace(one.worker.description, device=None)
    with pytest.raises(RequestError) as caught:
        one.client.ask("register_q_cache", 1, (), "m", 1, "t", None, (), bare)
    assert caught.value.code is ErrorCode.BAD_PAYLOAD


def test_a_ring_on_a_device_needs_a_lifeline_and_an_event(
    daemon: RunningDaemon, one: Connected
) -> None:
    with BareClient(daemon.url) as alone:
        alone.hello()
        with pytest.raises(RequestError) as caught:
            one.worker.register(alone)
        assert caught.value.code is ErrorCode.LIFELINE_REQUIRED
    one.worker.register(one.client)
    key, instance, groups, _, proof = one.worker.store_request(1, BLOCKS)
    for event in (b"", b"short"):
        with pytest.raises(RequestError) as caught:
            one.client.ask("store_q", key, instance, groups, event, proof)
        assert caught.value.code is ErrorCode.BAD_PAYLOAD


def test_handles_that_name_nothing_are_refused_and_cost_nobody_else(
    daemon: RunningDaemon, one: Connected
) -> None:
    one.worker.register(one.client)
    pid = ready_pid(daemon)
    device = one.worker.description.device
    assert device is not None
    for changes in (
        {"handle": bytes(64)},
        {"handle": device.handle[:4] + b"\xff" * 60},
        {"nbytes": device.nbytes + (1 << 20)},
    ):
        wrong = msgspec.structs.replace(
            one.worker.description, device=msgspec.structs.replace(device, **changes)
        )
        with pytest.raises(RequestError) as caught:
            one.client.ask("register_q_cache", 2, (), "m", 1, "t", None, (), wrong)
        assert caught.value.code is ErrorCode.RING_REFUSED
    assert one.worker.store(one.client, 130, BLOCKS).ok
    assert ready_pid(daemon) == pid


def test_a_killed_process_costs_its_rings_only_and_is_started_again(
    daemon: RunningDaemon, one: Connected, other: Connected
) -> None:
    one.worker.register(one.client)
    other.worker.register(other.client, 2)
    small = register_small_ring  # a ring in host memory lives through all of it
    with pytest.raises(RequestError):
        small(one.client, one.lifeline, 3, CHUNK_SIZE + 1)
    assert one.worker.store(one.client, 140, BLOCKS).ok
    victim = _process_of(daemon, one, other)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: daemon.status()["registered_q_ids"] == [2], "its instance is released")
    assert other.worker.store(other.client, 141, BLOCKS, 2).ok
    with pytest.raises(RequestError) as caught:
        one.worker.store(one.client, 142, BLOCKS)
    assert caught.value.code is ErrorCode.UNKNOWN_INSTANCE
    assert one.client.ask("ping", 1, REPORT).result is False, "which is how the worker hears of it"
    one.worker.register(one.client)
    assert one.worker.store(one.client, 143, BLOCKS).ok
    assert one.read(140) == content(140), "what was stored stays"


def _process_of(daemon: RunningDaemon, one: Connected, other: Connected) -> int:
    """The pid that has `one`'s memory mapped and not `other`'s: told by which one is there first."""
    pids = [process["pid"] for process in processes(daemon)]
    inode = os.fstat(one.worker.fd).st_ino
    (found,) = [pid for pid in pids if f" {inode} " in Path(f"/proc/{pid}/maps").read_text()]
    return int(found)


def test_a_lost_device_context_costs_the_process_and_the_store_is_refused(
    daemon: RunningDaemon, one: Connected
) -> None:
    one.worker.register(one.client)
    before = ready_pid(daemon)
    one.worker.break_device()
    assert copy_failed(one.worker.store(one.client, 150, BLOCKS))
    wait_until(lambda: not daemon.status()["registered_q_ids"], "the instance is released")
    one.worker.mend_device()
    one.worker.register(one.client)
    assert ready_pid(daemon) != before
    assert one.worker.store(one.client, 150, BLOCKS).ok
    assert one.read(150) == content(150)


@pytest.mark.parametrize("how", ["event", "sigstop"])
def test_a_hang_costs_the_process_within_the_time_of_a_copy(
    daemon: RunningDaemon, one: Connected, how: str
) -> None:
    one.worker.register(one.client)
    before = ready_pid(daemon)
    if how == "event":
        one.worker.hang_device()
    else:
        os.kill(before, signal.SIGSTOP)
        wait_until(partial(is_stopped, before), "all its threads have stopped")
    number = 160 if how == "event" else 165
    assert copy_failed(one.worker.store(one.client, number, BLOCKS))
    wait_until(lambda: not Path(f"/proc/{before}").exists(), "it is gone, and reaped")
    wait_until(lambda: not daemon.status()["registered_q_ids"], "the instance is released")
    one.worker.mend_device()
    one.worker.register(one.client)
    assert one.worker.store(one.client, number + 1, BLOCKS).ok
    assert one.read(number + 1) == content(number + 1)
    status = daemon.status()
    assert status["pool"]["reserved_bytes"] == 0, "the slots of the copy that hung are free again"
    assert status["lanes"] == {"hung": 0, "stuck_after_release": 0}


def test_killing_it_under_copies_leaves_the_daemon_whole(
    daemon: RunningDaemon, connect: Connect
) -> None:
    """At random points of stores that run beside one another; every answer comes, and every byte adds up."""
    for round_ in range(6):
        one = connect()
        one.worker.register(one.client)
        pid = ready_pid(daemon)
        killer = threading.Timer(0.004 * round_, os.kill, (pid, signal.SIGKILL))
        killer.start()
        stored = []
        for number in range(1000 + 100 * round_, 1040 + 100 * round_):
            if not one.client.ask("ping", 1, REPORT).result:
                break
            with contextlib.suppress(RequestError):  # it went between the two
                if one.worker.store(one.client, number, BLOCKS).ok:
                    stored.append(number)
        killer.join()
        for number in stored:
            assert one.read(number) == content(number)
        wait_until(lambda: not processes(daemon), "the process is gone")
    assert daemon.status()["pool"]["reserved_bytes"] == 0


def test_registering_again_and_again_leaves_nothing(daemon: RunningDaemon, one: Connected) -> None:
    one.worker.register(one.client)
    pid = ready_pid(daemon)
    one.client.ask("unregister_q_cache", 1, REPORT)
    files, threads = daemon.open_files(), threads_of(daemon.pid)
    child_files, child_threads = len(os.listdir(f"/proc/{pid}/fd")), threads_of(pid)
    for number in range(100):
        one.worker.register(one.client)
        if number % 10 == 0:
            assert one.worker.store(one.client, 2000 + number, BLOCKS).ok
        one.client.ask("unregister_q_cache", 1, REPORT)
    # No more than before: what had been unregistered then may have been on its way out.
    wait_until(lambda: daemon.open_files() <= files, "no descriptor is left")
    wait_until(lambda: threads_of(daemon.pid) <= threads, "no thread is left")
    assert ready_pid(daemon) == pid
    wait_until(lambda: threads_of(pid) <= child_threads, "no thread is left there")
    wait_until(
        lambda: len(os.listdir(f"/proc/{pid}/fd")) <= child_files, "no descriptor is left there"
    )
    assert maps_of(pid, "sim-device") == 0, "no ring is mapped"


def test_a_worker_that_dies_leaves_no_mapping(daemon: RunningDaemon, one: Connected) -> None:
    one.worker.register(one.client)
    pid = ready_pid(daemon)
    assert maps_of(pid, "sim-device") == 1
    one.close()
    wait_until(lambda: maps_of(pid, "sim-device") == 0, "the ring is unmapped")


def test_everything_ends_with_the_daemon(connect: Connect) -> None:
    """Even when it is killed."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with running_daemon(devices="sim", chunk_size=CHUNK_SIZE) as daemon:
            one = connect(daemon)
            one.worker.register(one.client)
            below = _descendants(daemon.pid)
            assert ready_pid(daemon) in below
            assert len(below) == 2, "the fork server, and one device"
            os.kill(daemon.pid, how)
            daemon.process.wait(20)
            for pid in below:
                wait_until(partial(_has_ended, pid), "all its processes have ended")
            assert "Traceback" not in daemon.log()


def test_a_signal_to_the_whole_group_is_the_daemons_business(
    daemon: RunningDaemon, one: Connected
) -> None:
    one.worker.register(one.client)
    for pid in _descendants(daemon.pid):
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert one.worker.store(one.client, 3000, BLOCKS).ok


def test_without_devices_there_is_no_process_and_no_kind(connect: Connect) -> None:
    with running_daemon(devices="off", chunk_size=CHUNK_SIZE) as daemon:
        one = connect(daemon)
        with pytest.raises(RequestError) as caught:
            one.worker.register(one.client)
        assert caught.value.code is ErrorCode.UNSUPPORTED_TRANSPORT
        assert _descendants(daemon.pid) == []
        assert daemon.status()["devices"] == []


def test_a_device_that_is_not_there_is_said(connect: Connect) -> None:
    """NVIDIA's, on a machine without one: its process says so, and ends; the daemon does not mind."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a card here")
    with running_daemon(devices="cuda", chunk_size=CHUNK_SIZE) as daemon:
        one = connect(daemon)
        cuda = msgspec.structs.replace(one.worker.description, kind="cuda")
        with pytest.raises(RequestError) as caught:
            one.client.ask("register_q_cache", 1, (), "m", 1, "t", None, (), cuda)
        assert caught.value.code is ErrorCode.RING_REFUSED
        assert "cudaGetDeviceCount" in caught.value.message
        wait_until(lambda: not processes(daemon), "the process has ended")
        register_small_ring(one.client, one.lifeline, 1, CHUNK_SIZE)


def _has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        text = Path(f"/proc/{pid}/task/{task}/children").read_text()
        for child in map(int, text.split()):
            found += [child, *_descendants(child)]
    return found
