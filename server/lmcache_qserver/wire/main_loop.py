"""The ROUTER socket on the event loop.

The socket's descriptor is edge-triggered: it becomes readable when the socket's *state* changes, not as long as
messages wait. Two rules follow, and missing either one loses wake-ups:

    - after a wake-up, read until there is nothing left (or schedule the rest: one peer must not keep the loop);
    - after every send, look at the events again, because sending consumes the edge too. (An answer that is sent while
      a turn reads needs nothing: the turn looks again before it ends.)

Behind a message the events are asked for, because a read that finds nothing costs an exception, twice as much.

Sending never blocks. ROUTER_MANDATORY tells of peers that are gone (EHOSTUNREACH) and of peers that do not read
(EAGAIN); either answer is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import zmq

from lmcache_qprotocol.codec import BULK_REQUESTS, Frame
from lmcache_qserver.wire import socket_path
from lmcache_qserver.wire.complaints import Complaints
from lmcache_qserver.wire.counts import WireCounts

log = logging.getLogger(__name__)

# Plain integers: operators of the enumerations cost microseconds.
EVENTS, POLLIN, NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
RCVMORE, SNDMORE = int(zmq.RCVMORE), int(zmq.SNDMORE)
OP_FRAME = 2
"""Place of the operation, behind the routing identity and the uid."""

MESSAGES_PER_TURN = 64
"""Messages read before the loop may do something else."""
BYTES_PER_TURN = 1 << 20
"""The same in bytes: a message of 10 MB takes 0.1 s to decode."""
UNREAD_MESSAGES = 32
"""Requests of one client that wait here to be read; the next ones stay with it. They may be large, so there are few."""
UNSENT_MESSAGES = 1024
"""Answers that wait for one client to read them, as many as it may have unanswered requests."""
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 10_000
UNREAD_MS = 30_000
"""A client that takes nothing of what is sent to it for so long is disconnected, though it may answer otherwise."""
CLOSE_LINGER_MS = 1000


class MainLoop:
    """Reads messages, hands them to `handle`, sends answers.

    Args:
        handle: called with (routing identity, frames behind it); answers by `send`.
        max_frame_bytes: a client that sends a larger frame is disconnected.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handle: Callable[[bytes, list[Frame]], None],
        counts: WireCounts,
        *,
        max_frame_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._handle = handle
        self._counts = counts
        self._clock = clock
        self._complaints = Complaints(log)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self._socket.setsockopt(zmq.SNDHWM, UNSENT_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, UNREAD_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
        # A dead worker's forked child, or a cut cable, holds a connection open that nobody serves: ZeroMQ asks, then
        # closes.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.TCP_MAXRT, UNREAD_MS)
        self._fd = cast(int, self._socket.getsockopt(zmq.FD))
        self._scheduled = False
        self._reading = False
        self._open = False

    def bind(self, endpoint: str) -> str:
        """Bind; the url with its real port. Nothing is read before `start`: messages wait.

        Raises:
            OSError: the address is in use, or not of this host.
        """
        if endpoint.startswith("ipc://"):
            # ZeroMQ itself would remove whatever is there: another daemon's socket, or a file.
            socket_path.remove_stale(Path(endpoint[6:]), socket.SOCK_STREAM, "--url")
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise OSError(error.errno, str(error)) from None
        return cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def start(self) -> None:
        """Begin to read."""
        self._open = True
        self._loop.add_reader(self._fd, self._read)
        self._read_soon()

    def send(self, identity: bytes, frames: Sequence[Frame]) -> None:
        """Send an answer; one that can't be delivered is counted and dropped."""
        if not self._open:
            return
        try:
            self._socket.send_multipart([identity, *frames], NOBLOCK)
        except zmq.ZMQError as error:
            self._undeliverable(error)
        self._look_behind_a_send()

    def send_bulk(self, identity: bytes, frames: Sequence[Frame]) -> zmq.MessageTracker | None:
        """Send an answer whose memoryview frame ZeroMQ reads where it lies, until the tracker is done.

        Returns:
            None when it can't be delivered; that is counted, and nothing is read then.
        """
        if not self._open:
            return None
        tracker = None
        try:
            self._socket.send(identity, NOBLOCK | SNDMORE)
            # Behind the identity nothing can fail: the message has its client, and takes no more room in its queue.
            for place, frame in enumerate(frames):
                flags = NOBLOCK | SNDMORE * (place < len(frames) - 1)
                if type(frame) is memoryview:
                    # However short it is: what ZeroMQ copies, nobody counts.
                    bulk = zmq.Frame(frame, track=True, copy=False, copy_threshold=0)
                    self._socket.send(bulk, flags, copy=False)
                    tracker = bulk.tracker
                else:
                    self._socket.send(frame, flags)
        except zmq.ZMQError as error:
            self._undeliverable(error)
        self._look_behind_a_send()
        return tracker

    def _undeliverable(self, error: zmq.ZMQError) -> None:
        self._counts.undeliverable += 1
        self._complaints.say(f"an answer could not be delivered: {error}", self._clock())

    def _look_behind_a_send(self) -> None:
        if not self._reading and self._is_readable():
            self._read_soon()

    def close(self) -> None:
        """Stop reading; what has been sent still goes out for up to a second."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
        self._socket.close()
        self._context.term()

    def _read_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._read_scheduled)

    def _read_scheduled(self) -> None:
        self._scheduled = False
        self._read()

    def _read(self) -> None:
        """One turn."""
        if not self._open:
            return
        self._reading = True
        try:
            is_rest = self._read_turn()
        finally:
            self._reading = False
        if is_rest:
            self._read_soon()

    def _read_turn(self) -> bool:
        """Read until nothing is left, which gives False, or the turn's measure is full."""
        messages = nbytes = 0
        while messages < MESSAGES_PER_TURN and nbytes < BYTES_PER_TURN:
            if messages and not (self._open and self._is_readable()):
                return False
            try:
                identity, *frames = self._receive()
            except zmq.Again:
                return False
            messages += 1
            nbytes += sum(map(len, frames))
            try:
                self._handle(identity, frames)
            except Exception:  # a raise here would leave the rest of the messages without a wake-up
                log.exception("handling a message failed")
        return True

    def _receive(self) -> list[Any]:
        """All frames of a message, the routing identity first; those of a bulk request stay where ZeroMQ has them.

        Copying a long frame keeps the interpreter from everything else; making a view of a short one costs more than
        copying it.
        """
        frames: list[Any] = [self._socket.recv(NOBLOCK)]
        while self._socket.getsockopt(RCVMORE):
            if len(frames) > OP_FRAME and frames[OP_FRAME] in BULK_REQUESTS:
                frames.append(self._socket.recv(NOBLOCK, copy=False).buffer)
            else:
                frames.append(self._socket.recv(NOBLOCK))
        return frames

    def _is_readable(self) -> bool:
        return bool(cast(int, self._socket.getsockopt(EVENTS)) & POLLIN)
