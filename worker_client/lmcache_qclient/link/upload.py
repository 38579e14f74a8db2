"""Storing by messages: one chunk (or piece) in parts, out of memory that the server can't reach.

    ask (begin) ─▶ nothing to send: stored already, or no room
               └─▶ gather a part, send it, gather the next, ... ─▶ gather the stamps, send them (end) ─▶ the end

Rows are gathered before stamps: stamps that are right then prove every row, as behind the server's own copy
(PROTOCOL.md, Stamps). Parts are gathered into a few buffers that are used again when the server has answered for them,
so an upload of any size takes little memory, and a server that is slow makes its sender wait.
"""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_qclient.link.connection import Connection
from lmcache_qclient.link.requests import ReplyFuture
from lmcache_qprotocol.messages import RangeKey, StoreProof, StoreResult, UploadReply
from lmcache_qprotocol.operations import BEGIN_UPLOAD_Q, END_UPLOAD_Q, UPLOAD_PART_Q, Operation

Bytes = npt.NDArray[np.uint8]

PART_BYTES = 2 << 20
"""A ping waits behind the parts that are under way, so they are few and not long."""
PARTS_UNDER_WAY = 4
WIRE_STAMP = np.dtype("<i8")


@dataclass(frozen=True)
class Payload:
    """What is to be stored, and how to read it.

    Attributes:
        key: of one chunk, or of a piece.
        proof: the nonce of its stamps.
        gather: copies the bytes from an offset on into an array; called in order of offset. The bytes are the chunk's
            blocks, `[blocks, layers, block_size, hidden_dim]`.
        stamps: int64, one per row of the key's range; called when all bytes are gathered.
    """

    key: RangeKey
    instance_id: int | str
    proof: StoreProof
    gather: Callable[[int, Bytes], None]
    stamps: Callable[[], npt.NDArray[np.int64]]


class Uploader:
    """Uploads one payload after the other over a connection; for one thread at a time.

    Args:
        connection: open; its transport is inline.
        timeout_s: for every answer, seconds.
    """

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._free: list[Bytes] = []

    def upload(self, payload: Payload) -> StoreResult:
        """Store, and wait for the end.

        Raises:
            RequestError: the server can't serve it; unknown_upload when it took too long.
            ConnectionError: no answer in time, or the connection is lost.
        """
        future = self.begin(payload)
        return future if isinstance(future, StoreResult) else self._wait(future)

    def begin(self, payload: Payload) -> StoreResult | ReplyFuture:
        """Send all of it; nothing of the payload is read any more when this returns or raises.

        Returns:
            The end's answer, which has not come yet; or the end itself, when nothing was to be sent.

        Raises:
            RequestError, ConnectionError: as `upload`.
        """
        reply: UploadReply = self._ask(
            BEGIN_UPLOAD_Q, (payload.key, payload.instance_id, payload.proof)
        )
        if reply.result is not None:
            return reply.result
        self._send_parts(payload, reply)
        stamps = payload.stamps().astype(WIRE_STAMP)
        return self._connection.link.submit(
            END_UPLOAD_Q, (reply.upload_id, memoryview(stamps.tobytes()))
        )

    def _send_parts(self, payload: Payload, reply: UploadReply) -> None:
        size = min(PART_BYTES, self._connection.hello.limits.bulk_bytes)
        if self._free and len(self._free[0]) != size:
            self._free.clear()
        under_way: deque[tuple[Bytes, ReplyFuture]] = deque()
        for offset in range(0, reply.nbytes, size):
            if len(under_way) == PARTS_UNDER_WAY:
                self._take_back(*under_way.popleft())
            # A buffer of an upload that failed is not used again: ZeroMQ may still read it.
            buffer = self._free.pop() if self._free else np.empty(size, dtype=np.uint8)
            part = buffer[: min(size, reply.nbytes - offset)]
            payload.gather(offset, part)
            future = self._connection.link.submit(
                UPLOAD_PART_Q, (reply.upload_id, offset, _frame(part))
            )
            under_way.append((buffer, future))
        while under_way:
            self._take_back(*under_way.popleft())

    def _take_back(self, buffer: Bytes, future: ReplyFuture) -> None:
        self._wait(future)
        self._free.append(buffer)

    def _ask(self, operation: Operation, payloads: Sequence[Any]) -> Any:
        return self._connection.link.call(operation, payloads, self._timeout_s)

    def _wait(self, future: ReplyFuture) -> Any:
        try:
            return future.result(self._timeout_s)
        except concurrent.futures.TimeoutError:
            if not self._connection.link.forget(future):
                return future.result()  # the answer has come in this very moment
        raise ConnectionError(
            f"{self._connection.url} did not answer for a part of an upload within {self._timeout_s:g} s"
        )


def _frame(part: Bytes) -> memoryview:
    return memoryview(part)  # type: ignore[arg-type]  # numpy's stubs hide the buffer from Python 3.10
