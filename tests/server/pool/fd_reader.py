"""A reader process: gets the pool's fd over a Unix socket and tries what it must not be able to do.

Run as `python fd_reader.py <socket fd>`. It sends one line of JSON: attempt -> errno name, or
"allowed". Then it answers every byte that it gets with the first 16 bytes of its read-only mapping,
until the socket closes.
"""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import socket
import sys
from collections.abc import Callable

F_SEAL_FUTURE_WRITE = 0x10
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
PROT_READ, PROT_WRITE, MAP_SHARED = 1, 2, 1

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t) + (ctypes.c_int,) * 3 + (ctypes.c_long,)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


def check(result: int | None) -> None:
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "allowed"


def map_shared(fd: int, nbytes: int, protection: int) -> int:
    address = libc.mmap(None, nbytes, protection, MAP_SHARED, fd, 0)
    check(-1 if address == ctypes.c_void_p(-1).value else 0)
    return int(address)


def upgrade(fd: int, nbytes: int) -> None:
    """A read-only mapping, made writable later."""
    check(libc.mprotect(map_shared(fd, nbytes, PROT_READ), nbytes, PROT_READ | PROT_WRITE))


def reopen_and_map(fd: int, nbytes: int) -> None:
    """A fresh file description of the same memory, opened for writing."""
    map_shared(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), nbytes, PROT_READ | PROT_WRITE)


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    _, (fd,), _, _ = socket.recv_fds(link, 1, 1)
    nbytes = os.fstat(fd).st_size
    punch = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    results = {
        "map writable": outcome(lambda: map_shared(fd, nbytes, PROT_READ | PROT_WRITE)),
        "mprotect writable": outcome(lambda: upgrade(fd, nbytes)),
        "reopen and map writable": outcome(lambda: reopen_and_map(fd, nbytes)),
        "write": outcome(lambda: os.pwrite(fd, b"x", 0)),
        "punch a hole": outcome(lambda: check(libc.fallocate(fd, punch, 0, nbytes))),
        "shrink": outcome(lambda: os.ftruncate(fd, nbytes // 2)),
        "grow": outcome(lambda: os.ftruncate(fd, nbytes * 2)),
        "add a seal": outcome(lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)),
        "map read-only": outcome(lambda: map_shared(fd, nbytes, PROT_READ)),
    }
    mapping = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
    link.sendall(json.dumps(results).encode() + b"\n")
    while link.recv(1):
        link.sendall(mapping[:16])


if __name__ == "__main__":
    main()
