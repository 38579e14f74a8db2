"""Handles of the simulated device between processes: memory that the worker keeps open under a descriptor of its own.

    magic, pid, descriptor, offset, bytes        packed, and filled up to HANDLE_BYTES

An event is 16 bytes of such memory: two int64, records and completions.
"""

from __future__ import annotations

import mmap
import os
import struct

import numpy as np

from lmcache_qserver.device.api import HANDLE_BYTES, Bytes, DeviceError

_HANDLE = struct.Struct("=4sqqqq")
_MAGIC = b"qsim"


def handle_of(fd: int, offset: int, nbytes: int) -> bytes:
    """A handle of a range of a descriptor of this process."""
    return _HANDLE.pack(_MAGIC, os.getpid(), fd, offset, nbytes).ljust(HANDLE_BYTES, b"\0")


def resolve(handle: bytes) -> Bytes:
    """The bytes that another process's handle names, writable; unmapped with the last reference.

    Raises:
        DeviceError: it is no handle, or its process or memory is gone.
    """
    try:
        magic, pid, fd, offset, nbytes = _HANDLE.unpack_from(handle)
        if magic != _MAGIC:
            raise ValueError("not a handle of the simulated device")
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(opened, offset + nbytes)
        finally:
            os.close(opened)
    except (OSError, ValueError, struct.error) as error:
        raise DeviceError(f"invalid handle: {error}") from None
    return np.frombuffer(mapping, np.uint8)[offset:]
