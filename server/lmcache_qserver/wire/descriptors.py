"""Packets with at most one file descriptor beside them, and who is at the other end of a Unix socket."""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import NamedTuple

SO_PEERPIDFD = 77  # Linux 6.5; the socket module has no name for it
_CREDENTIALS = struct.Struct("3i")
_FD = struct.Struct("i")
_GONE = frozenset({errno.ESRCH, errno.ENODATA})


class Received(NamedTuple):
    """One packet.

    Attributes:
        data: empty when the peer has closed.
        fd: the receiver's own, close-on-exec; None when there was none.
        cut: the packet was longer than the buffer, or brought more than one descriptor (the kernel has closed those).
    """

    data: bytes
    fd: int | None
    cut: bool


def receive(connection: socket.socket, max_bytes: int) -> Received:
    """The next packet.

    Raises:
        BlockingIOError: there is none yet.
        OSError: the connection is broken.
    """
    data, ancillary, flags, _ = connection.recvmsg(
        max_bytes, socket.CMSG_LEN(_FD.size), socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    )
    fds = [
        fd
        for level, kind, payload in ancillary
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
        for (fd,) in _FD.iter_unpack(payload[: len(payload) - len(payload) % _FD.size])
    ]
    for surplus in fds[1:]:
        os.close(surplus)
    cut = bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)) or len(fds) > 1
    return Received(data, fds[0] if fds else None, cut)


def send(connection: socket.socket, data: bytes, fd: int | None = None) -> None:
    """One packet; the descriptor stays the sender's.

    Raises:
        BlockingIOError: the peer does not read.
        OSError: the connection is broken.
    """
    ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd))]
    connection.sendmsg([data], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def peer_uid(connection: socket.socket) -> int:
    """The user that connected."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(packed)
    return int(uid)


def peer_pidfd(connection: socket.socket) -> int | None:
    """A descriptor that becomes readable when the process that connected ends; None on a kernel without it.

    Raises:
        ProcessLookupError: that process is gone already.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno in _GONE:
            raise ProcessLookupError(error.errno, "the peer's process has ended") from None
        return None


def reopen_read_only(fd: int) -> int:
    """A new descriptor of the same file that can't write or truncate; the caller closes it.

    The pool's seals refuse that anyway; this refuses it once more. Without /proc it is a plain duplicate.
    """
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return os.dup(fd)
