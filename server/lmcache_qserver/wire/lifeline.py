"""The lifeline: a Unix socket beside the ZeroMQ endpoint that passes memory, and whose end is the end of a client.

    accept ──uid is allowed──▶ UNATTACHED ──attach {session}──▶ ATTACHED ──closed, or the process is dead──▶ gone
                                   └──not within ATTACH_S──▶ closed

How death is noticed, whichever comes first: the peer's end of the socket is closed (by the kernel, if the process was
killed), or the pidfd of the process that connected becomes readable. The second is needed because a child that the
worker forked may hold the socket open for hours.

Who owns a descriptor: an offered ring belongs to its connection until `take_ring` hands it to registration; what is
left is closed with the connection, and aside: closing may block (closing.py). Every number here is bounded:
connections, rings per connection, descriptors per packet (one; a packet with more is refused), packet bytes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from lmcache_qprotocol.errors import ErrorCode, ProtocolError, QServerError, RequestError
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
from lmcache_qserver.closing import close_aside
from lmcache_qserver.copying import RingMemory, RingSource
from lmcache_qserver.log_fields import told
from lmcache_qserver.wire import descriptors, socket_path
from lmcache_qserver.wire.clients import Clients, Session
from lmcache_qserver.wire.complaints import Complaints
from lmcache_qserver.wire.counts import WireCounts

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
MAX_RINGS = 8
"""Offered and not yet registered, per connection."""
ATTACH_S = 30.0
ACCEPT_PAUSE_S = 0.5
"""After accept has failed for want of descriptors: the listener stays readable, and would keep the loop busy."""
PACKETS_PER_TURN = 16


def uid_is_allowed(uid: int, allowed: tuple[int, ...]) -> bool:
    """The daemon's own user, root, and who was allowed explicitly."""
    return uid in (os.geteuid(), 0, *allowed)


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        close_aside(fd)


class Connection:
    """One accepted connection; `session` is None until it has attached."""

    def __init__(
        self,
        server: LifelineServer,
        connection: socket.socket,
        pidfd: int | None,
    ) -> None:
        self._server = server
        self._loop = server.loop
        self._socket = connection
        self._pidfd = pidfd
        self._rings: dict[bytes, RingSource] = {}
        self.session: Session | None = None
        self.closed = False
        self._loop.add_reader(connection.fileno(), self._read)
        if pidfd is not None:
            self._loop.add_reader(pidfd, self._lost, "its process has ended")
        self._deadline = self._loop.call_later(ATTACH_S, self._check_attached)

    def take_ring(self, ring_token: bytes) -> RingSource | None:
        """The ring that was offered under this token; it is the caller's from now on."""
        return self._rings.pop(ring_token, None)

    def close(self) -> None:
        """Close the socket and the rings that nobody took. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._deadline.cancel()
        self._loop.remove_reader(self._socket.fileno())
        descriptors.hang_up(self._socket)
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()
        self._server.forget(self)

    def _check_attached(self) -> None:
        if self.session is None:
            self.close()

    def _lost(self, why: str) -> None:
        session = self.session
        self.close()
        if session is not None and not session.gone:
            log.info(
                "a lifeline is closed: %s", why, extra=told(client=session.program, pid=session.pid)
            )
            self._server.clients.end(session)

    def _read(self) -> None:
        for _ in range(PACKETS_PER_TURN):
            if self.closed:
                return
            try:
                received = descriptors.receive(self._socket, MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._lost(str(error))
                return
            if not received.data:
                _close_all(received.fds)
                self._lost("the other side has closed it")
                return
            self._serve(received)

    def _serve(self, received: descriptors.Received) -> None:
        fds = received.fds
        try:
            self._check(received)
            packet = decode_packet(received.data)
            if isinstance(packet, OfferRing):
                offered, fds = fds, ()
                self._offer(packet, offered)
            elif isinstance(packet, Attach):
                self._attach(packet)
            else:
                raise ProtocolError(
                    ErrorCode.BAD_PAYLOAD, "this packet is for the server to send, not for clients"
                )
        except QServerError as error:
            self._server.counts.lifeline_refused_packets += 1
            self._send(Refused(error.code, error.message[:1024]))
        finally:
            _close_all(fds)

    @staticmethod
    def _check(received: descriptors.Received) -> None:
        if received.lost_fds:
            raise RequestError(
                ErrorCode.BUSY, "the server has no file descriptor left; raise its LimitNOFILE"
            )
        if received.cut or len(received.fds) > 1:
            raise ProtocolError(
                ErrorCode.BAD_FRAME,
                f"a packet has at most {MAX_PACKET_BYTES} bytes and one descriptor",
            )

    def _attach(self, packet: Attach) -> None:
        if self.session is not None:
            raise RequestError(
                ErrorCode.BAD_PAYLOAD, "this connection is attached already; open another one"
            )
        session = self._server.clients.by_token(packet.session)
        if session is None:
            raise RequestError(
                ErrorCode.HELLO_REQUIRED,
                "this session is unknown or over; say hello and attach again",
            )
        if session.lifeline is not None:
            raise RequestError(
                ErrorCode.NOT_OWNER,
                "this session has a lifeline already; say hello for a new session",
            )
        try:
            pool_fd = descriptors.reopen_read_only(self._server.pool_fd)
        except OSError as error:
            raise RequestError(
                ErrorCode.BUSY, f"the server has no file descriptor left ({error.strerror})"
            ) from None
        self.session = session
        session.lifeline = self
        self._deadline.cancel()
        try:
            self._send(Attached(self._server.pool_bytes), pool_fd)
        finally:
            os.close(pool_fd)

    def _offer(self, packet: OfferRing, fds: tuple[int, ...]) -> None:
        """Keep the ring; the descriptor is ours and ends up in the ring, or closed."""
        if not fds:
            raise RequestError(
                ErrorCode.BAD_PAYLOAD, "offer_ring needs the ring's descriptor beside it"
            )
        ring = self._server.take_memory(fds[0], packet.nbytes)
        try:
            if self.session is None:
                raise RequestError(ErrorCode.HELLO_REQUIRED, "attach first")
            if packet.ring_token in self._rings:
                raise RequestError(
                    ErrorCode.BAD_PAYLOAD, "this ring token was offered already; draw another one"
                )
            if len(self._rings) >= MAX_RINGS:
                raise RequestError(
                    ErrorCode.BUSY,
                    f"{MAX_RINGS} rings are offered and not registered; register them",
                )
        except RequestError:
            ring.close()
            raise
        self._rings[packet.ring_token] = ring
        self._send(Accepted())

    def _send(self, packet: Packet, fd: int | None = None) -> None:
        try:
            descriptors.send(self._socket, encode_packet(packet), fd)
        except BlockingIOError:
            self._lost("it does not read its answers")
        except OSError as error:
            self._lost(str(error))


class LifelineServer:
    """Listens, and judges who may connect.

    Args:
        pool_fd: the sealed memory of the pool; it stays the caller's.
        take_memory: makes a ring of a descriptor, which is the ring's from then on, and of the announced bytes.
        allowed_uids: users besides the daemon's own and root.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clients: Clients,
        counts: WireCounts,
        *,
        pool_fd: int,
        pool_bytes: int,
        allowed_uids: tuple[int, ...],
        clock: Callable[[], float],
        take_memory: Callable[[int, int], RingSource] = RingMemory,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.loop = loop
        self.clients = clients
        self.counts = counts
        self.pool_fd = pool_fd
        self.pool_bytes = pool_bytes
        self.take_memory = take_memory
        self._allowed_uids = allowed_uids
        self._clock = clock
        self._max_connections = max_connections
        self._complaints = Complaints(log)
        self._connections: set[Connection] = set()
        self._listener: socket.socket | None = None
        self._path: Path | None = None
        self._identity = (0, 0)

    def __len__(self) -> int:
        """Open connections."""
        return len(self._connections)

    def open(self, path: Path) -> None:
        """Listen at `path`.

        Raises:
            OSError: see `socket_path.listen`.
        """
        self._listener = socket_path.listen(path, others=bool(self._allowed_uids))
        self._path = path
        self._identity = socket_path.file_identity(path)
        self.loop.add_reader(self._listener.fileno(), self._accept)

    def close_listener(self) -> None:
        """Take no more connections, and remove the file; connections stay. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        self.loop.remove_reader(listener.fileno())
        listener.close()
        if self._path is not None:
            socket_path.remove(self._path, self._identity)

    def close(self) -> None:
        """Close everything."""
        self.close_listener()
        for connection in tuple(self._connections):
            connection.close()

    def forget(self, connection: Connection) -> None:
        """Called by a connection that has been closed."""
        self._connections.discard(connection)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._complaints.say(f"the lifeline can't take connections: {error}", self._clock())
            self.loop.remove_reader(self._listener.fileno())
            self.loop.call_later(ACCEPT_PAUSE_S, self._resume)
            return
        self._admit(accepted)

    def _resume(self) -> None:
        if self._listener is not None:
            self.loop.add_reader(self._listener.fileno(), self._accept)

    def _admit(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        uid = descriptors.peer_uid(accepted)
        if not uid_is_allowed(uid, self._allowed_uids):
            self._refuse(accepted, f"user {uid} may not use the lifeline; see --allow-uid")
            return
        if len(self._connections) >= self._max_connections:
            self._refuse(accepted, f"the lifeline has {self._max_connections} connections already")
            return
        try:
            pidfd = descriptors.peer_pidfd(accepted)
        except ProcessLookupError:
            descriptors.hang_up(accepted)
            return
        except OSError as error:
            self._refuse(accepted, f"no file descriptor is left: {error.strerror}")
            return
        self._connections.add(Connection(self, accepted, pidfd))

    def _refuse(self, accepted: socket.socket, why: str) -> None:
        descriptors.hang_up(accepted)
        self.counts.lifeline_refused_peers += 1
        self._complaints.say(f"refused a connection: {why}", self._clock())
