"""Packets with file descriptors beside them, and who is at the other end of a Unix socket."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
from typing import NamedTuple

from lmcache_qserver.closing import close_at_once

SO_PEERPIDFD = 77  # Linux 6.5; the socket module has no name for it
_CREDENTIALS = struct.Struct("3i")
_FD = struct.Struct("i")
_MAX_ANCILLARY = socket.CMSG_SPACE(253 * _FD.size)
"""As many descriptors as the kernel lets go with one packet (SCM_MAX_FD)."""
_GONE = frozenset({errno.ESRCH, errno.ENODATA})
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})


class Received(NamedTuple):
    """One packet.

    Attributes:
        data: empty when the peer has closed.
        fds: the receiver's own, close-on-exec.
        cut: the packet was longer than the buffer.
        lost_fds: this process had no descriptor left for some of those that came along.
    """

    data: bytes
    fds: tuple[int, ...]
    cut: bool
    lost_fds: bool


def receive(connection: socket.socket, max_bytes: int) -> Received:
    """The next packet, with all descriptors beside it: what the kernel has no room for it closes here and now, and that
    may block (closing.py).

    Raises:
        BlockingIOError: there is none yet.
        OSError: the connection is broken.
    """
    data, ancillary, flags, _ = connection.recvmsg(
        max_bytes, _MAX_ANCILLARY, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    )
    fds = tuple(
        fd
        for level, kind, payload in ancillary
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
        for (fd,) in _FD.iter_unpack(payload[: len(payload) - len(payload) % _FD.size])
    )
    return Received(data, fds, bool(flags & socket.MSG_TRUNC), bool(flags & socket.MSG_CTRUNC))


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
        OSError: this process has no descriptor left.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno in _GONE:
            raise ProcessLookupError(error.errno, "the peer's process has ended") from None
        if error.errno in _NO_DESCRIPTOR:
            raise
        return None


def hang_up(connection: socket.socket) -> None:
    """End the connection: the peer knows at once, the closing is done aside (closing.py)."""
    with contextlib.suppress(OSError):  # the peer was faster
        connection.shutdown(socket.SHUT_RDWR)
    try:
        threading.Thread(target=_drain, args=(connection,), name="hang-up", daemon=True).start()
    except RuntimeError:  # the system has no thread to give
        _drain(connection)


def _drain(connection: socket.socket) -> None:
    """Close; descriptors in packets that nobody has read would otherwise be closed by the kernel, lingering or not."""
    with connection, contextlib.suppress(OSError):
        while True:
            received = receive(connection, 1)
            for fd in received.fds:
                close_at_once(fd)
            if not received.data and not received.fds:
                return


def reopen_read_only(fd: int) -> int:
    """A new descriptor of the same file that can't write or truncate; the caller closes it.

    The pool's seals refuse that anyway; this refuses it once more. Without /proc it is a plain duplicate.
    """
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return os.dup(fd)
