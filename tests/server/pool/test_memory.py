"""The arena: what the seals promise to a reader, populating, closing."""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lmcache_qserver.pool import PoolMemory, memory
from lmcache_qserver.pool.memory import F_SEAL_FUTURE_WRITE, PAGE_BYTES

MIB = 1 << 20
NO_SUCH_ADVICE = 9999


@pytest.fixture
def arena() -> Iterator[PoolMemory]:
    with PoolMemory(8 * MIB) as arena:
        yield arena


def resident_bytes(arena: PoolMemory) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_it_is_whole_pages_of_zeros_and_takes_none_yet() -> None:
    with PoolMemory(10 * MIB + 1) as arena:
        assert arena.nbytes == 10 * MIB + PAGE_BYTES
        assert arena.array.dtype == np.uint8
        assert arena.array.shape == (arena.nbytes,)
        assert os.fstat(arena.fd).st_size == arena.nbytes
        assert resident_bytes(arena) == 0
        assert not arena.array.any()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_size_that_is_not_positive_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        PoolMemory(nbytes)


def test_a_size_the_kernel_refuses_leaves_no_descriptor_behind() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises((OSError, OverflowError)):
        PoolMemory((1 << 63) - PAGE_BYTES)
    assert set(os.listdir("/proc/self/fd")) == before


def test_seals(arena: PoolMemory) -> None:
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) == wanted


def test_the_descriptor_does_not_survive_exec(arena: PoolMemory) -> None:
    assert not os.get_inheritable(arena.fd)


def test_a_reader_in_another_process_reads_later_writes_and_can_write_nothing(
    arena: PoolMemory,
) -> None:
    ours, theirs = socket.socketpair()
    script = Path(__file__).with_name("fd_reader.py")
    command = [sys.executable, str(script), str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as reader:
        theirs.close()
        ours.settimeout(60)
        socket.send_fds(ours, [b"p"], [arena.fd])
        answers = ours.makefile("rb")
        assert json.loads(answers.readline()) == {
            "map writable": "EPERM",
            "mprotect writable": "EACCES",
            "reopen and map writable": "EPERM",
            "write": "EPERM",
            "punch a hole": "EPERM",
            "shrink": "EPERM",
            "grow": "EPERM",
            "add a seal": "EPERM",
            "map read-only": "allowed",
        }
        for content in (b"written before...", b"written later..."):
            arena.array[:16] = np.frombuffer(content[:16], np.uint8)
            ours.sendall(b"?")
            assert answers.read(16) == content[:16]
        answers.close()
        ours.shutdown(socket.SHUT_RDWR)
        assert reader.wait(60) == 0


def test_the_seal_holds_for_the_owner_too_but_a_forked_child_inherits_the_mapping(
    arena: PoolMemory,
) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, arena.nbytes)
    child = os.fork()
    if child == 0:
        arena.array[0] = 77
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert arena.array[0] == 77


@pytest.fixture(params=["madvise", "touch"])
def way_to_populate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "touch":
        monkeypatch.setattr(memory, "MADV_POPULATE_WRITE", NO_SUCH_ADVICE)
    return str(request.param)


@pytest.mark.usefixtures("way_to_populate")
class TestPopulate:
    def test_the_steps_give_a_page_to_every_byte_and_keep_content(self, arena: PoolMemory) -> None:
        arena.array[[0, 5 * MIB, arena.nbytes - 1]] = 7
        for offset, nbytes in arena.populate_steps(3 * MIB):
            arena.populate(offset, nbytes)
            assert resident_bytes(arena) >= offset + nbytes
        assert resident_bytes(arena) == arena.nbytes
        assert np.flatnonzero(arena.array).tolist() == [0, 5 * MIB, arena.nbytes - 1]

    def test_it_gives_pages_to_no_other_range(self, arena: PoolMemory) -> None:
        arena.populate(2 * MIB, MIB)
        assert resident_bytes(arena) == MIB

    def test_other_threads_run_meanwhile(self) -> None:
        started, done = threading.Event(), threading.Event()
        with PoolMemory(256 * MIB) as arena:

            def populate() -> None:
                started.set()
                arena.populate(0, arena.nbytes)
                done.set()

            # Nobody is made to give up the GIL: others run only while it is released.
            interval = sys.getswitchinterval()
            sys.setswitchinterval(1000)
            try:
                thread = threading.Thread(target=populate)
                thread.start()
                started.wait()
                ran_meanwhile = not done.is_set()
                thread.join()
            finally:
                sys.setswitchinterval(interval)
        assert ran_meanwhile


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (1, PAGE_BYTES),
        (0, PAGE_BYTES + 1),
        (-PAGE_BYTES, PAGE_BYTES),
        (0, -PAGE_BYTES),
        (8 * MIB, PAGE_BYTES),
        (0, 8 * MIB + PAGE_BYTES),
    ],
)
def test_populate_refuses_ranges_that_are_not_whole_pages_of_the_arena(
    arena: PoolMemory, offset: int, nbytes: int
) -> None:
    with pytest.raises(ValueError, match=r"whole pages|outside"):
        arena.populate(offset, nbytes)


def test_populating_nothing_is_nothing(arena: PoolMemory) -> None:
    arena.populate(0, 0)
    assert resident_bytes(arena) == 0


def test_an_error_of_the_kernel_is_told(arena: PoolMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(address: int, nbytes: int, advice: int) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(memory, "_madvise", out_of_memory)
    with pytest.raises(OSError, match="populating") as caught:
        arena.populate(0, PAGE_BYTES)
    assert caught.value.errno == errno.ENOMEM


def test_steps_cover_the_arena_in_order() -> None:
    with PoolMemory(130 * MIB) as arena:
        assert list(arena.populate_steps()) == [
            (0, 64 * MIB),
            (64 * MIB, 64 * MIB),
            (128 * MIB, 2 * MIB),
        ]


@pytest.mark.parametrize("step", [0, -PAGE_BYTES, PAGE_BYTES + 1])
def test_a_step_that_is_not_whole_pages_is_refused(arena: PoolMemory, step: int) -> None:
    with pytest.raises(ValueError, match="step_bytes"):
        arena.populate_steps(step)


def test_close_leaves_views_alive_and_gives_everything_back_with_the_last() -> None:
    before = set(os.listdir("/proc/self/fd"))
    arena = PoolMemory(MIB, name="lmcache-qserver-close-test")
    view = arena.array[10:20]
    view[:] = 5
    arena.close()
    arena.close()
    assert view.tolist() == [5] * 10
    assert "lmcache-qserver-close-test" in Path("/proc/self/maps").read_text()
    del view
    assert "lmcache-qserver-close-test" not in Path("/proc/self/maps").read_text()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_closed_arena_says_so() -> None:
    arena = PoolMemory(MIB)
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        _ = arena.array
    with pytest.raises(ValueError, match="closed"):
        _ = arena.fd
    with pytest.raises(ValueError, match="closed"):
        arena.populate(0, PAGE_BYTES)


def test_allocating_makes_pages_and_leaves_content_alone() -> None:
    with PoolMemory(8 * PAGE_BYTES) as memory:
        memory.array[PAGE_BYTES : 2 * PAGE_BYTES] = 7
        assert os.fstat(memory.fd).st_blocks * 512 == PAGE_BYTES
        memory.allocate(0, 8 * PAGE_BYTES)
        assert os.fstat(memory.fd).st_blocks * 512 == 8 * PAGE_BYTES
        assert (memory.array[PAGE_BYTES : 2 * PAGE_BYTES] == 7).all()
        assert not memory.array[:PAGE_BYTES].any()


@pytest.mark.parametrize(
    ("number", "fatal"),
    [(errno.ENOSPC, True), (errno.ENOMEM, True), (errno.EOPNOTSUPP, False), (errno.EPERM, False)],
)
def test_only_a_lack_of_memory_is_an_error_of_allocating(
    monkeypatch: pytest.MonkeyPatch, number: int, fatal: bool
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with PoolMemory(PAGE_BYTES) as memory:
        if fatal:
            with pytest.raises(OSError, match=os.strerror(number)):
                memory.allocate(0, PAGE_BYTES)
        else:
            memory.allocate(0, PAGE_BYTES)
