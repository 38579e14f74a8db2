"""Requests to the server and their replies: one thread owns the socket, everybody else gets futures.

    engine threads                         link thread (daemon)
    submit ──▶ _pending[uid], _outbox ──▶  _backlog ──▶ DEALER socket ──▶ server
       ◀── future ◀── _pending.pop(uid) ◀── decode ◀───────────────────── replies

Invariants:
- Whoever pops a uid from `_pending` completes its future, and nobody else does. So reply, time-out, `fail_all` and
  `close` may race, and a future still ends exactly once; a reply whose uid is gone is dropped.
- A request is put into `_pending` before it is put into `_outbox`, and the link thread skips what is no longer pending:
  what has timed out while the server was away is not sent to its successor.
- The socket queues nothing for a server that is not there (ZMQ_IMMEDIATE); requests wait in `_backlog`, from which the
  forgotten ones are thrown out, so that it stays bounded as `_pending` is.
- Every request carries the generation of the socket that it was meant for, and goes over no other.
- Bulk frames (plain bytes, in either direction) are copied neither on the way out nor on the way in. Whoever sends one
  leaves its memory alone until the request has ended.
- A forked child has none of this: there every method fails at once, or does nothing.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq

from lmcache_qclient.link.wake import Wake
from lmcache_qprotocol.codec import (
    BULK_REPLIES,
    Frame,
    decode_reply,
    decode_uid,
    encode,
    encode_request,
)
from lmcache_qprotocol.errors import ProtocolError
from lmcache_qprotocol.limits import Limits
from lmcache_qprotocol.messages import ReplyMeta
from lmcache_qprotocol.operations import Operation

logger = logging.getLogger(__name__)

NOBLOCK = int(zmq.NOBLOCK)
RCVMORE = int(zmq.RCVMORE)
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
LOOK_S = 0.1
"""Between two looks at whether the server lives, for who waits for its answer."""

_reply_meta = msgspec.msgpack.Decoder(ReplyMeta)


class ReplyFuture(concurrent.futures.Future[Any]):
    """The future of one request; it can't be cancelled, `RequestLink.forget` gives it up.

    Attributes:
        uid: the request's uid frame; empty when it was refused before it got one.
    """

    def __init__(self, uid: bytes = b"") -> None:
        super().__init__()
        self.uid = uid
        self.set_running_or_notify_cancel()


class _Pending(NamedTuple):
    operation: Operation
    future: ReplyFuture


class _Outgoing(NamedTuple):
    generation: int
    uid: bytes
    frames: list[Frame]
    is_bulk: bool


class RequestLink:
    """A DEALER connection; see the head of this file.

    Args:
        url: "tcp://host:port" or "ipc:///path".
        name: of the thread.
        max_outstanding: most unanswered requests; more fail at once.

    Attributes:
        boot_id: of the server that answered last; None before `hello`, and when it took us for a stranger.
        on_boot_id: called on the link thread with the new value when `boot_id` changes from a known one. It must not
            block or raise.

    Raises:
        ValueError: ZeroMQ does not understand the url.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "lmcache-q-link",
        max_outstanding: int = Limits().outstanding_requests,
    ) -> None:
        self.url = url
        self.boot_id: bytes | None = None
        self.on_boot_id: Callable[[bytes | None], None] | None = None
        self._max_outstanding = max_outstanding
        self._pending: dict[bytes, _Pending] = {}
        self._outbox: deque[_Outgoing] = deque()
        self._backlog: deque[_Outgoing] = deque()
        self._numbers = itertools.count(1)
        self._generation = 0
        self._closed = False
        self._pid = os.getpid()
        self._context = zmq.Context(io_threads=1)
        try:
            self._socket = self._open_socket()
        except zmq.ZMQError as error:
            self._context.term()
            raise ValueError(
                f"can't use {url!r} as the server's address ({error}): write tcp://host:port or ipc:///path"
            ) from None
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # --- for all threads ----------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Requests without an answer yet."""
        return len(self._pending)

    def submit(self, operation: Operation, payloads: Sequence[Any] = ()) -> ReplyFuture:
        """Send a request; never blocks. Encoding is done here, on the caller's thread.

        Returns:
            A future of the result. It fails with RequestError (the server's code) or with ConnectionError; it has no
            time-out of its own.

        Raises:
            ValueError, TypeError: the payloads don't fit the operation.
        """
        refusal = self._refusal()
        if refusal is not None:
            return _failed(refusal)
        uid = encode(next(self._numbers))
        frames = encode_request(uid, operation, payloads)
        is_bulk = operation.has_bulk_payload
        future = ReplyFuture(uid)
        self._pending[uid] = _Pending(operation, future)
        self._outbox.append(_Outgoing(self._generation, uid, frames, is_bulk))
        self._wake.set()
        if self._closed:  # closed meanwhile: `close` may have looked before this request was there
            self._fail(uid, self._closed_error())
        return future

    def call(
        self,
        operation: Operation,
        payloads: Sequence[Any] = (),
        timeout_s: float = 10.0,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> Any:
        """Send a request and `wait` for the result."""
        return self.wait(self.submit(operation, payloads), operation, timeout_s, is_alive)

    def wait(
        self,
        future: ReplyFuture,
        operation: Operation,
        timeout_s: float = 10.0,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> Any:
        """Wait for the result of a request that has been submitted; it is given up when none comes.

        Args:
            is_alive: asked now and then; once it is false, nobody will answer any more, and the wait ends.

        Raises:
            RequestError: the server can't serve it.
            ConnectionError: no answer in time, or the server is dead, or the link is closed, full, or was reset
                meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                return future.result(min(left, LOOK_S))
            except concurrent.futures.TimeoutError:
                if not is_alive():
                    break
        if not self.forget(future):
            return future.result()  # the reply has come in this very moment
        if left > 0:
            raise ConnectionError(
                f"the server at {self.url} died before it answered {operation.name}"
            )
        raise ConnectionError(
            f"no answer from {self.url} to {operation.name} within {timeout_s:g} s: "
            "start the server with `lmcache-qserver start`, or check its address (--url)"
        )

    def forget(self, future: ReplyFuture) -> bool:
        """Give a request up: its future never completes, a late reply is dropped.

        Returns:
            False when its end came first; the future is, or is about to be, done then.
        """
        return self._pending.pop(future.uid, None) is not None

    def fail_all(self, error: Exception) -> int:
        """Fail everything outstanding, because the server is known to be gone.

        Returns:
            The number of futures that failed.
        """
        failed = 0
        while self._pending:
            try:
                _, pending = self._pending.popitem()
            except KeyError:
                break
            pending.future.set_exception(error)
            failed += 1
        return failed

    def reconnect(self) -> None:
        """Replace the socket by a new one with a new identity; everything outstanding fails with ConnectionError."""
        if self._refusal(full=False) is not None:
            return
        self._generation += 1
        self.fail_all(
            ConnectionError(f"the connection to {self.url} was replaced: send the request again")
        )
        self._wake.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail everything outstanding and end the thread; idempotent.

        Args:
            timeout_s: how long to wait for the thread, which may be in a future's callback.
        """
        if os.getpid() != self._pid or self._closed:
            return
        self._closed = True
        self._wake.set()
        self.fail_all(self._closed_error())
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _refusal(self, full: bool = True) -> ConnectionError | None:
        if os.getpid() != self._pid:
            return ConnectionError(
                "this link belongs to the parent process: open a new one after fork"
            )
        if self._closed:
            return self._closed_error()
        if full and len(self._pending) >= self._max_outstanding:
            return ConnectionError(
                f"{len(self._pending)} requests to {self.url} are unanswered: wait for some before sending more"
            )
        return None

    def _closed_error(self) -> ConnectionError:
        return ConnectionError(f"the link to {self.url} is closed: open a new one")

    def _fail(self, uid: bytes, error: Exception) -> None:
        pending = self._pending.pop(uid, None)
        if pending is not None:
            pending.future.set_exception(error)

    # --- the link thread ----------------------------------------------------------------------------------------

    def _open_socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, 0)  # `_max_outstanding` is the bound
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        try:
            socket.connect(self.url)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # a bug; whoever waits must learn of it
            logger.exception("the link to %s has failed", self.url)
        finally:
            self._closed = True
            self.fail_all(self._closed_error())
            self._socket.close()
            self._context.term()
            self._wake.close()

    def _serve(self) -> None:
        """One message a turn: behind it the thread waits again at once, and who waits for the reply can run."""
        generation = self._generation
        wake_fd = self._wake.fileno()
        poller = self._poller()
        blocked = False
        while not self._closed:
            ready = [item for item, _ in poller.poll()]
            if wake_fd in ready:
                self._wake.clear()
                if generation != self._generation:
                    generation = self._generation
                    self._replace_socket()
                    poller = self._poller()
                    blocked = False
                    ready = [wake_fd]
            if blocked or wake_fd in ready:
                was_blocked, blocked = blocked, self._send(generation)
                if blocked != was_blocked:
                    events = zmq.POLLIN | zmq.POLLOUT if blocked else zmq.POLLIN
                    poller.register(self._socket, events)
            if self._socket in ready:
                self._receive()

    def _poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._wake.fileno(), zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        return poller

    def _replace_socket(self) -> None:
        self._socket.close()
        self.boot_id = None
        self._socket = self._open_socket()

    def _send(self, generation: int) -> bool:
        """Send what waits. Returns True when the server is not connected and something still waits."""
        self._fill_backlog()
        backlog = self._backlog
        while backlog:
            item = backlog[0]
            if item.generation > generation:
                return False  # meant for the next socket; `reconnect` has set the wake
            if item.generation == generation and item.uid in self._pending:
                try:
                    # Frames below 64 KiB are copied all the same: that is cheaper for them.
                    self._socket.send_multipart(item.frames, NOBLOCK, copy=not item.is_bulk)
                except zmq.Again:
                    return True
            backlog.popleft()
        return False

    def _fill_backlog(self) -> None:
        while self._outbox:
            self._backlog.append(self._outbox.popleft())
        if len(self._backlog) > self._max_outstanding:
            self._backlog = deque(item for item in self._backlog if item.uid in self._pending)

    def _receive(self) -> None:
        try:
            frames = self._receive_frames()
        except zmq.Again:
            return
        self._complete(frames)

    def _receive_frames(self) -> list[Any]:
        frames: list[Any] = [self._socket.recv(NOBLOCK)]
        while self._socket.getsockopt(RCVMORE):
            if len(frames) == 2 and frames[1] in BULK_REPLIES:
                frames.append(self._socket.recv(NOBLOCK, copy=False).buffer)
            else:
                frames.append(self._socket.recv(NOBLOCK))
        return frames

    def _complete(self, frames: list[Frame]) -> None:
        try:
            uid, _ = decode_uid(frames)
        except ProtocolError as error:
            logger.warning("dropped a reply of %s: %s", self.url, error)
            return
        pending = self._pending.pop(uid, None)
        if pending is None:
            return
        try:
            result = self._decode(frames, pending.operation)
        except Exception as error:  # noqa: BLE001 - it is the waiting caller's
            pending.future.set_exception(error)
        else:
            pending.future.set_result(result)

    def _decode(self, frames: list[Frame], operation: Operation) -> Any:
        try:
            self._note_boot_id(_reply_meta.decode(frames[3]).boot_id if len(frames) > 3 else None)
            return decode_reply(frames, operation).result
        except (ProtocolError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConnectionError(
                f"{self.url} answered {operation.name} with something else ({error}): "
                "is it an lmcache-qserver of this version?"
            ) from None

    def _note_boot_id(self, boot_id: bytes | None) -> None:
        before, self.boot_id = self.boot_id, boot_id
        if before is None or before == boot_id:
            return
        if self.on_boot_id is not None:
            self.on_boot_id(boot_id)
        raise ConnectionError(
            f"the server at {self.url} has been restarted and does not know this connection: say hello again"
        )


def _failed(error: Exception) -> ReplyFuture:
    future = ReplyFuture()
    future.set_exception(error)
    return future
