"""The lifeline: the Unix socket that passes memory by descriptor, and whose closing tells that the other side is dead.

The client speaks first and the server answers every packet with one packet, in order; a time-out in between leaves the
order unknown, so the connection is closed then. Nothing is ever read from an idle lifeline: `is_open` only polls.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import threading
from array import array

from lmcache_qclient.link.forks import close_in_children
from lmcache_qprotocol.errors import ProtocolError, RequestError
from lmcache_qprotocol.lifeline import (
    MAX_PACKET_BYTES,
    Accepted,
    Attach,
    Attached,
    OfferRing,
    Packet,
    Refused,
    decode_packet,
    encode_packet,
)

RING_TOKEN_BYTES = 16
_TIMEVAL = struct.Struct("@ll")
_HANG_UP = select.POLLHUP | select.POLLRDHUP | select.POLLERR | select.POLLNVAL


class LifelineClient:
    """An attached lifeline; made by `connect`.

    Attributes:
        path: of the server's socket.
        pool_fd: descriptor of the server's pool, for reading only; ours until `close`. -1 afterwards.
        pool_bytes: how much of it to map; checked against its size and seals.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path = path
        self.pool_fd = -1
        self.pool_bytes = 0
        self._hung_up = False
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        close_in_children(self)
        self._socket.settimeout(timeout_s)

    @classmethod
    def connect(cls, path: str, session: bytes, timeout_s: float = 5.0) -> LifelineClient:
        """Connect and attach to the session of a `HelloReply`.

        Args:
            timeout_s: for each packet of this lifeline, seconds.

        Raises:
            ConnectionError: the socket is not reachable, or what came over it can't be used.
            RequestError: the server refused; its code.
        """
        client = cls(path, timeout_s)
        try:
            client._connect(timeout_s)
            client._attach(session)
        except BaseException:
            client.close()
            raise
        return client

    # --- using it -------------------------------------------------------------------------------------------------

    def offer_ring(self, fd: int, nbytes: int) -> bytes:
        """Hand a ring's memory to the server; it stays ours too.

        Args:
            fd: a memfd of at least `nbytes` bytes, sealed against shrinking.

        Returns:
            The token by which `register_q_cache` names the ring, 16 bytes.

        Raises:
            ConnectionError, RequestError: as `connect`.
        """
        token = os.urandom(RING_TOKEN_BYTES)
        answer, received = self._exchange(OfferRing(ring_token=token, nbytes=nbytes), fd)
        _close_all(received)
        if not isinstance(answer, Accepted):
            raise self._unexpected(answer)
        return token

    def fileno(self) -> int:
        """The socket's descriptor, to be polled for hang-up (never read); -1 after `close`."""
        return self._socket.fileno()

    def is_open(self) -> bool:
        """True while neither side has closed it."""
        fd = self._socket.fileno()
        if fd < 0 or self._hung_up:
            return False
        poll = select.poll()
        poll.register(fd, select.POLLRDHUP)
        self._hung_up = any(events & _HANG_UP for _, events in poll.poll(0))
        return not self._hung_up

    @property
    def hung_up(self) -> bool:
        """True when the *server* has closed it (in most cases by dying); stays known after `close`."""
        self.is_open()
        return self._hung_up

    def close(self) -> None:
        """Close socket and pool descriptor, after noting whether the server had hung up; idempotent."""
        self.is_open()
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close the descriptors of this process only, without a word to the server and without any lock."""
        self._socket.close()
        fd, self.pool_fd = self.pool_fd, -1
        if fd >= 0:
            os.close(fd)

    # --- packets --------------------------------------------------------------------------------------------------

    def _connect(self, timeout_s: float) -> None:
        try:
            # Blocking, with the kernel's own time-out: a connect that must not block fails at once when the server has
            # others to accept first.
            seconds, rest = divmod(max(timeout_s, 1e-3), 1)
            self._socket.setblocking(True)
            self._socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(seconds), int(1e6 * rest))
            )
            self._socket.connect(self.path)
            self._socket.settimeout(timeout_s)
        except OSError as error:
            raise ConnectionError(
                f"the server's lifeline {self.path} is not reachable from here ({error}): run on the server's host, "
                "mount its runtime directory into this container, or ask for access (--allow-uid, --socket-group)"
            ) from None

    def _attach(self, session: bytes) -> None:
        answer, received = self._exchange(Attach(session=session), None)
        if not isinstance(answer, Attached) or len(received) != 1:
            _close_all(received)
            raise self._unexpected(answer)
        self.pool_fd, self.pool_bytes = received[0], answer.pool_bytes
        check_sealed(self.pool_fd, self.pool_bytes)

    def _exchange(self, packet: Packet, fd: int | None) -> tuple[Packet, list[int]]:
        """One packet out, one in. The descriptors that came are the caller's.

        Raises:
            RequestError: the server refused.
            ConnectionError: anything else; the lifeline is closed then.
        """
        with self._lock:
            try:
                answer, received = self._send_and_receive(encode_packet(packet), fd)
            except (OSError, ProtocolError) as error:
                self.close()
                raise ConnectionError(
                    f"the lifeline {self.path} is of no more use ({error}): connect again"
                ) from None
        if isinstance(answer, Refused):
            _close_all(received)
            raise RequestError(answer.code, answer.message)
        return answer, received

    def _send_and_receive(self, data: bytes, fd: int | None) -> tuple[Packet, list[int]]:
        socket.send_fds(self._socket, [data], [] if fd is None else [fd])
        answer, received, flags = _receive(self._socket)
        try:
            if not answer:
                self._hung_up = True
                raise ConnectionResetError("the server has closed it")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ConnectionError(
                    "the server's packet is too large, or too many files are open here"
                )
            return decode_packet(answer), received
        except BaseException:
            _close_all(received)
            raise

    def _unexpected(self, answer: Packet) -> ConnectionError:
        self.close()
        return ConnectionError(
            f"the lifeline {self.path} answered with an unexpected {type(answer).__name__}"
        )


def check_sealed(fd: int, nbytes: int) -> None:
    """Make sure that mapping `nbytes` of `fd` can never fault: it can't shrink, and is large enough.

    Raises:
        ConnectionError: it isn't so.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0  # not a memfd
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ConnectionError("the server's pool is not sealed against shrinking: it is not mapped")
    size = os.fstat(fd).st_size
    if size < nbytes:
        raise ConnectionError(
            f"the server's pool has {size} bytes, not the {nbytes} that it says: it is not mapped"
        )


def _receive(source: socket.socket) -> tuple[bytes, list[int], int]:
    """One packet, the descriptors beside it (closed on exec), and the message's flags.

    `socket.recv_fds` ignores its flags argument (CPython 3.11), so they would be inherited by programs.
    """
    room = socket.CMSG_SPACE(array("i").itemsize)
    data, ancillary, flags, _ = source.recvmsg(MAX_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    received = array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(content[: len(content) - len(content) % received.itemsize])
    return data, received.tolist(), flags


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
