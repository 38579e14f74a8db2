"""Descriptors that no honest worker offers as its ring."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from lmcache_qserver.testing.bare_client import small_ring

LINGER_S = 20
"""Longer than any bystander waits."""
O_PATH = 0o10000000
MFD_HUGETLB = 4


@contextlib.contextmanager
def closing(*fds: int) -> Iterator[int]:
    """The first of the descriptors; all are closed at the end, if they are not already."""
    try:
        yield fds[0]
    finally:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)


def memfd(nbytes: int, seals: int | None, flags: int = 0) -> int:
    """A memfd with these seals."""
    fd = os.memfd_create("hostile-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, nbytes)
    if seals is not None:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


_, RING_BYTES, STAMPS_OFFSET = _probe = small_ring()
os.close(_probe[0])


def _regular_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(RING_BYTES)
        return os.dup(file.fileno())


def _tmpfs_file() -> int:
    fd, path = tempfile.mkstemp(dir="/dev/shm")
    os.unlink(path)
    os.ftruncate(fd, RING_BYTES)
    return fd


def _pipe(end: int) -> int:
    ends = os.pipe()
    os.close(ends[1 - end])
    return ends[end]


def _socket(kind: int) -> int:
    with socket.socket(socket.AF_UNIX, kind) as made:
        return os.dup(made.fileno())


def _path_only() -> int:
    fd = memfd(RING_BYTES, fcntl.F_SEAL_SHRINK)
    try:
        return os.open(f"/proc/self/fd/{fd}", O_PATH)
    finally:
        os.close(fd)


def _reopened(flags: int) -> int:
    fd = memfd(RING_BYTES, fcntl.F_SEAL_SHRINK)
    try:
        return os.open(f"/proc/self/fd/{fd}", flags)
    finally:
        os.close(fd)


def _epoll() -> int:
    with select.epoll() as made:
        return os.dup(made.fileno())


def _eventfd() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.eventfd(0, 0))


def _hugetlb() -> int:
    return memfd(2 << 20, fcntl.F_SEAL_SHRINK, MFD_HUGETLB)


def lingering_socket() -> tuple[int, int]:
    """(a TCP socket whose close waits for its peer, that peer, which reads nothing)."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("2i", 1, LINGER_S))
    sender.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sender.send(bytes(1 << 16))
    return sender.detach(), receiver.detach()


def _file(path: str, flags: int = os.O_RDONLY) -> Callable[[], int]:
    return lambda: os.open(path, flags)


REFUSED: dict[str, Callable[[], int]] = {
    "unsealed": lambda: memfd(RING_BYTES, None),
    "sealed against growing only": lambda: memfd(RING_BYTES, fcntl.F_SEAL_GROW),
    "sealed against sealing only": lambda: memfd(RING_BYTES, fcntl.F_SEAL_SEAL),
    "shorter than announced": lambda: memfd(RING_BYTES - 1, fcntl.F_SEAL_SHRINK),
    "empty": lambda: memfd(0, fcntl.F_SEAL_SHRINK),
    "regular file": _regular_file,
    "file on tmpfs": _tmpfs_file,
    "file of the system": _file("/proc/self/status"),
    "pipe to read": lambda: _pipe(0),
    "pipe to write": lambda: _pipe(1),
    "stream socket": lambda: _socket(socket.SOCK_STREAM),
    "packet socket": lambda: _socket(socket.SOCK_SEQPACKET),
    "/dev/zero": _file("/dev/zero"),
    "/dev/null": _file("/dev/null", os.O_RDWR),
    "/dev/full": _file("/dev/full", os.O_RDWR),
    "directory": _file("/tmp"),
    "path only": _path_only,
    "write only": lambda: _reopened(os.O_WRONLY),
    "epoll": _epoll,
    "eventfd": _eventfd,
}
"""Kinds that can be made everywhere; each must be refused as a ring of `RING_BYTES`."""

if Path("/proc/sys/vm/nr_hugepages").exists():
    try:
        os.close(_hugetlb())
        REFUSED["huge pages"] = _hugetlb
    except OSError:
        pass
