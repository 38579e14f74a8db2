"""From a message's frames to its answer: decode, call the operation's handler, answer.

How an operation is handled (`Order`):

    NOW        the handler returns its result at once
    IN_TURN    registering and unregistering: one at a time over all clients, in order of arrival
    BESIDE     stores: each goes on by itself to its end, whatever becomes of its client or of the dispatcher
    EITHER     reading: at once if the pool can answer, beside if the persistent tier has to be asked

A client has at most `outstanding_requests` of what is not answered at once, and `OUTSTANDING_MESSAGES` full messages'
worth of bytes: a decoded message takes up to fourteen times its length until it is answered.

Every message ends in exactly one of: a result, an error frame, a legacy failure, a counted silence (a legacy client and
an operation without failing result), a counted drop (no frames to echo). An error frame goes to whoever can read one:
clients that have said hello, and whoever uses an operation that only native clients know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from lmcache_qprotocol.codec import (
    Frame,
    decode_operation,
    decode_payloads,
    decode_uid,
    encode,
    encode_error,
    encode_result,
)
from lmcache_qprotocol.errors import ErrorCode, ProtocolError, QServerError, RequestError
from lmcache_qprotocol.limits import MAX_FRAMES, Limits
from lmcache_qprotocol.messages import ReplyMeta
from lmcache_qprotocol.operations import SILENCE, Operation
from lmcache_qserver.log_fields import told
from lmcache_qserver.qstore.reading import PinnedBytes
from lmcache_qserver.wire.bulk_answers import BulkAnswers
from lmcache_qserver.wire.clients import Client, Clients
from lmcache_qserver.wire.complaints import Complaints
from lmcache_qserver.wire.counts import OK, UNDECODED, WireCounts

log = logging.getLogger(__name__)

INTERNAL = RequestError(ErrorCode.INTERNAL, "the server failed at this request; its log says why")
"""What a client is told of an exception that nobody expected: nothing but that it happened."""

OUTSTANDING_MESSAGES = 4
"""Unanswered bytes of a client, in messages of the largest size."""

Payloads = tuple[Any, ...]
Send = Callable[[bytes, Sequence[Frame]], None]


class Order(Enum):
    """When a handler runs; see the file's head."""

    NOW = "now"
    IN_TURN = "in turn"
    BESIDE = "beside"
    EITHER = "either"


class Handler(NamedTuple):
    """One row of the dispatch table. `call` returns a result (NOW), an awaitable of it, or one of both (EITHER).

    Attributes:
        while_stopping: served while the daemon drains.
    """

    order: Order
    call: Callable[[Client, Payloads], Any]
    while_stopping: bool = True


class _Echo(NamedTuple):
    """What an answer needs of its request."""

    client: Client
    uid: bytes
    op_frame: bytes
    operation: Operation | None
    nbytes: int

    @property
    def name(self) -> str:
        return UNDECODED if self.operation is None else self.operation.name


class Dispatcher:
    """Serves one message at a time; `start` and `stop` bracket its life on the loop.

    Args:
        handlers: by operation name.
        send: puts an answer on the socket; must not block.
        bulk: sends the answers that are bytes of the pool.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        clients: Clients,
        counts: WireCounts,
        send: Send,
        bulk: BulkAnswers,
        *,
        boot_id: bytes,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self._handlers = handlers
        self._clients = clients
        self._counts = counts
        self._send = send
        self._bulk = bulk
        self._limits = limits
        self._clock = clock
        self._boot_id = boot_id
        self._meta_frame = encode(ReplyMeta(boot_id))
        self._complaints = Complaints(log)
        self._silences = Complaints(log)
        self._faults = {
            name: Complaints(log, level=logging.ERROR) for name in (*handlers, UNDECODED)
        }
        self._turns: asyncio.Queue[tuple[_Echo, Awaitable[Any]]] = asyncio.Queue()
        self._beside: set[asyncio.Future[Any]] = set()
        self._worker: asyncio.Task[None] | None = None
        self._stopping = False
        self._stopped = False

    def start(self) -> None:
        """Begin to serve; call it on the loop, before the first message."""
        self._worker = asyncio.create_task(self._take_turns())

    def refuse_new_work(self) -> None:
        """From now on nothing that could take long is begun."""
        self._stopping = True

    async def finish(self) -> None:
        """Wait until everything that was begun has been answered."""
        await self._turns.join()
        while self._beside:
            await asyncio.wait(self._beside)

    async def stop(self) -> None:
        """Begin nothing more and answer nothing any more."""
        self._stopped = True
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        while not self._turns.empty():
            _, coroutine = self._turns.get_nowait()
            if isinstance(coroutine, Coroutine):
                coroutine.close()

    def handle(self, identity: bytes, frames: Sequence[Frame]) -> None:
        """Serve one message. Never raises, whatever the frames hold.

        Args:
            frames: without the routing identity.
        """
        now = self._clock()
        client = self._clients.seen(identity, now)
        try:
            uid, op_frame = decode_uid(frames if len(frames) <= MAX_FRAMES else frames[:2])
        except ProtocolError as error:
            self._counts.unanswerable += 1
            self._complaints.say(f"dropped a message that can't be answered: {error.message}", now)
            return
        operation = _operation(op_frame)
        nbytes = sum(map(len, frames))
        echo = _Echo(client or Client(identity, now), uid, op_frame, operation, nbytes)
        try:
            if client is None:
                raise RequestError(ErrorCode.BUSY, "too many clients; try again in some minutes")
            self._serve(echo, frames)
        except QServerError as error:
            self._fail(echo, error)
        except Exception:  # noqa: BLE001 - logged there
            self._note_fault(echo)
            self._fail(echo, INTERNAL)

    def _serve(self, echo: _Echo, frames: Sequence[Frame]) -> None:
        self._check_size(frames, echo.nbytes)
        self._check_outstanding(echo)
        operation = echo.operation or decode_operation(echo.op_frame)
        payloads = decode_payloads(operation, frames)
        handler = self._handlers[operation.name]
        if self._stopping and not handler.while_stopping:
            raise RequestError(
                ErrorCode.SHUTTING_DOWN, "the server is stopping; connect again later"
            )
        work = handler.call(echo.client, payloads)
        if handler.order is Order.NOW or (
            handler.order is Order.EITHER and not isinstance(work, Awaitable)
        ):
            self._answer(echo, work)
            return
        echo.client.outstanding += 1
        echo.client.outstanding_bytes += echo.nbytes
        if handler.order is Order.IN_TURN:
            self._turns.put_nowait((echo, work))
            return
        # A callback, not a task that waits for another: the answer goes out one turn of the loop earlier.
        beside = asyncio.ensure_future(work)
        self._beside.add(beside)
        beside.add_done_callback(partial(self._end_beside, echo))

    def _check_outstanding(self, echo: _Echo) -> None:
        """Before the message is decoded, which is what costs time and memory."""
        if echo.operation is None or self._handlers[echo.operation.name].order is Order.NOW:
            return
        client, limits = echo.client, self._limits
        nbytes = client.outstanding_bytes + echo.nbytes
        if (
            client.outstanding >= limits.outstanding_requests
            or nbytes > OUTSTANDING_MESSAGES * limits.message_bytes
        ):
            raise RequestError(
                ErrorCode.BUSY,
                f"{client.outstanding} requests of {client.outstanding_bytes} bytes are unanswered; "
                "wait for some of them",
            )

    def _check_size(self, frames: Sequence[Frame], nbytes: int) -> None:
        if len(frames) > MAX_FRAMES:
            raise ProtocolError(
                ErrorCode.BAD_FRAME, f"a message has at most {MAX_FRAMES} frames, not {len(frames)}"
            )
        if nbytes > self._limits.message_bytes:
            raise RequestError(
                ErrorCode.TOO_LARGE,
                f"a message has at most {self._limits.message_bytes} bytes, not {nbytes}; split it",
            )

    async def _take_turns(self) -> None:
        while True:
            echo, work = await self._turns.get()
            try:
                await self._finish_one(echo, work)
            finally:
                self._turns.task_done()

    async def _finish_one(self, echo: _Echo, work: Awaitable[Any]) -> None:
        error: BaseException | None = None
        result = None
        try:
            result = await work
        except Exception as caught:  # noqa: BLE001 - answered, and logged there
            error = caught
        finally:
            self._settle(echo)
        self._end(echo, result, error)

    def _end_beside(self, echo: _Echo, beside: asyncio.Future[Any]) -> None:
        self._beside.discard(beside)
        self._settle(echo)
        if beside.cancelled() or self._stopped:
            return
        error = beside.exception()
        self._end(echo, None if error else beside.result(), error)

    @staticmethod
    def _settle(echo: _Echo) -> None:
        echo.client.outstanding -= 1
        echo.client.outstanding_bytes -= echo.nbytes

    def _end(self, echo: _Echo, result: Any, error: BaseException | None) -> None:
        """Answer what was begun. A result that can't be encoded is the server's failure, too."""
        try:
            if error is not None:
                raise error
            self._answer(echo, result)
        except QServerError as refusal:
            self._fail(echo, refusal)
        except Exception:  # noqa: BLE001 - logged there
            self._note_fault(echo)
            self._fail(echo, INTERNAL)

    def _answer(self, echo: _Echo, result: Any) -> None:
        meta = self._meta_frame if echo.client.native else None
        if isinstance(result, PinnedBytes):
            frames = encode_result(echo.uid, echo.op_frame, result.view, meta)
            self._count(echo, OK)
            self._bulk.send(echo.client, frames, result)
            return
        frames = encode_result(echo.uid, echo.op_frame, result, meta)
        self._count(echo, OK)
        self._send(echo.client.identity, frames)

    def _fail(self, echo: _Echo, error: QServerError) -> None:
        client, operation = echo.client, echo.operation
        self._count(echo, error.code.value)
        if client.native or (operation is not None and operation.legacy_id is None):
            meta = ReplyMeta(self._boot_id, error.code, error.message)
            self._send(client.identity, encode_error(echo.uid, echo.op_frame, meta))
        elif operation is not None and operation.legacy_failure is not SILENCE:
            self._send(
                client.identity,
                encode_result(echo.uid, echo.op_frame, operation.legacy_failure, None),
            )
        else:
            self._counts.silenced += 1
            self._log_silence(client, error)

    def _note_fault(self, echo: _Echo) -> None:
        """Log the exception under way, which is the server's fault; a peer may provoke it again and again."""
        session = echo.client.session
        who = told(operation=echo.name, client=session.program, pid=session.pid)
        self._faults[echo.name].say("a request failed", self._clock(), exc_info=True, extra=who)

    def _log_silence(self, client: Client, error: QServerError) -> None:
        if not client.silence_logged:
            client.silence_logged = True
            text = f"a legacy client gets no answer to its failed request: {error}"
            self._silences.say(text, self._clock())

    def _count(self, echo: _Echo, code: str) -> None:
        self._counts.requests[echo.name, code] += 1


def _operation(op_frame: bytes) -> Operation | None:
    try:
        return decode_operation(op_frame)
    except ProtocolError:
        return None
