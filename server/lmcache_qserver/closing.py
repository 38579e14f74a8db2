"""Closing descriptors that a peer has passed, without waiting for the peer.

`close` takes as long as a peer likes: a socket with SO_LINGER waits until its data are acknowledged, a file on FUSE
asks its server, the last reference to a large memfd frees all its pages. So the event loop closes none of them itself:
each goes to a short thread of its own, so that one that blocks holds up no other.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading

_NO_LINGER = struct.pack("2i", 0, 0)


def close_aside(fd: int) -> None:
    """Close the descriptor soon. It belongs to this call from now on, whatever kind it is."""
    try:
        threading.Thread(target=close_at_once, args=(fd,), name="close", daemon=True).start()
    except RuntimeError:  # the system has no thread to give
        close_at_once(fd)


def close_at_once(fd: int) -> None:
    """Close the descriptor in this thread; a socket's own wish to linger is not granted."""
    if stat.S_ISSOCK(os.fstat(fd).st_mode):
        with contextlib.suppress(OSError):
            of_fd = socket.socket(fileno=fd)
            try:
                of_fd.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            finally:
                of_fd.detach()
    os.close(fd)
